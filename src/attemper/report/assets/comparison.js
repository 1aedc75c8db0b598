// Sorts the table by the size of a statistic's change. Nothing here is built from names: rows are only moved.

function sortBy(column) {
  const body = byId("heads").tBodies[0];
  const size = (row) => Number(row.cells[3 + column].dataset.size);
  const rows = [...body.rows].sort((a, b) => size(b) - size(a) || 0);
  body.append(...rows);
  for (const head of document.querySelectorAll("#heads th[data-column]")) {
    head.setAttribute("aria-sort", Number(head.dataset.column) === column ? "descending" : "none");
  }
}

function startSorting() {
  for (const head of document.querySelectorAll("#heads th[data-column]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sortBy(Number(head.dataset.column)));
    head.append(button);
  }
}

// The attention pictures of a head before and after: what is pointed at in one is pointed at in the other.

const sheets = [];
let pictured = 0;

async function showPictures() {
  const [before] = DATA.pictures[pictured];
  const name = document.querySelector(`[data-picture="${pictured}"]`).textContent;
  const [queries, keys] = [before.tokens.length, (before.keys ?? before.tokens).length];
  byId("attention-head").textContent = name;
  byId("attention-size").textContent = text("picture.text", { queries, keys });
  for (const button of document.querySelectorAll("[data-picture]")) button.setAttribute("aria-pressed", String(Number(button.dataset.picture) === pictured));
  for (const [side, one] of sheets.entries()) await one.show(DATA.pictures[pictured][side], text("picture.label", { head: name, queries, keys }));
  pointBoth(null);
}

function pointBoth(row, column = null, aloud = false) {
  const said = sheets.map((one) => one.point(row, column));
  said.forEach((line, side) => (byId(`${SIDES[side]}-said`).textContent = line));
  if (aloud) byId("live").textContent = said.join(" ");
}

const SIDES = ["before", "after"];

function startPictures() {
  if (!DATA.pictures.length) return;
  byId("attention").hidden = false;
  for (const side of SIDES) sheets.push(new Sheet(side, pointBoth));
  for (const button of document.querySelectorAll("[data-picture]")) {
    button.addEventListener("click", () => {
      pictured = Number(button.dataset.picture);
      showPictures();
    });
  }
  byId("attention").addEventListener("pointerleave", () => pointBoth(null));
}

function redrawAll() {
  applyTheme();
  for (const button of document.querySelectorAll("#heads .sort")) button.title = text("compared.sort");
  if (sheets.length) showPictures();
}

function start() {
  startLanguage(redrawAll);
  startTheme(() => {});
  startSorting();
  startPictures();
  redrawAll();
}
