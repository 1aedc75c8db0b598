// Starts the page.

function redraw() {
  if (!maps.length) return;
  drawLegend();
  drawMaps();
  if (DATA.run) drawTime();
  fillPanel();
}

function startControls() {
  byId("quantity").addEventListener("change", (event) => {
    chosen.quantity = Number(event.target.value);
    redraw();
    announce(text("heads.coloured", { title: titleOf(quantity()) }));
  });
  byId("stretch").addEventListener("change", (event) => {
    chosen.stretch = event.target.checked;
    redraw();
  });
  if (byId("role")) {
    byId("role").addEventListener("change", (event) => {
      chosen.role = event.target.value === "" ? null : Number(event.target.value);
      if (byId("all-table").firstChild) fillTable();
      redraw();
      announce(event.target.selectedOptions[0].textContent);
    });
  }
  byId("back").addEventListener("click", back);
}

// A head, or the first head of a site, named by the page itself: alarms and key figures.
function startPlaces() {
  for (const button of document.querySelectorAll("button.place[data-site]")) {
    button.addEventListener("click", () => {
      const heads = BY_SITE[Number(button.dataset.site)];
      const head = heads.find((one) => String(one.head) === button.dataset.head) || heads[0];
      if (head) choose(head, { focus: true });
    });
  }
}

// Charts have the size of their box when they are drawn: drawn again when its width changes, once a frame.
function followWidth() {
  let width = byId("heads").clientWidth;
  let waiting = false;
  new ResizeObserver(() => {
    if (waiting || byId("heads").clientWidth === width) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      width = byId("heads").clientWidth;
      redraw();
    });
  }).observe(byId("heads"));
}

// The head to open with: that of a run's first warning; else of the worst alarm, of several the one that began first;
// else the sharpest.
function firstHead() {
  const opens = DATA.opens && BY_SITE[DATA.opens.site];
  if (opens && opens.length) return opens.find((one) => one.head === DATA.opens.head) || opens[0];
  for (const level of ["critical", "warning", "notice"]) {
    const began = (head) => Math.min(...alarmsOf(head).filter((alarm) => alarm.level === level).map((alarm) => alarm.since ?? 0));
    const alarming = HEADS.reduce((a, b) => (began(b) < began(a) ? b : a));
    if (Number.isFinite(began(alarming))) return alarming;
  }
  const known = HEADS.filter((head) => valueOf(head) !== null);
  return known.length ? known.reduce((a, b) => (valueOf(b) < valueOf(a) ? b : a)) : HEADS[0];
}

function redrawAll() {
  applyTheme();
  startTitles();
  fillGlossary();
  if (byId("all-table") && byId("all-table").firstChild) fillTable();
  redraw();
}

startLanguage(redrawAll);
startTheme(redraw);
byId("heads").hidden = false;
if (byId("more") && matchMedia("(max-width: 600px)").matches) byId("more").open = false;
startDownloads();
if (HEADS.length) {
  startMaps();
  startControls();
  startPlaces();
  if (DATA.pictures.length) startPicture();
  startTable();
  chosen.head = firstHead();
  for (const map of maps) if (map.stack.sites.includes(chosen.head.site)) aim(map, chosen.head);
  fillGlossary();
  redraw();
  followWidth();
  // A live page that is drawn again goes back to the head that its reader chose.
  byId("panel").addEventListener("choose", ({ detail }) => {
    const head = (BY_SITE[detail.site] || []).find((one) => one.head === detail.head);
    if (head) choose(head, { stay: true });
  });
  if (DATA.run) startTime();
}
