// Small multiples: every head's history on one canvas, all on one scale. What is drawn is only what is in sight.

const CELL = { wide: 62, tall: 34, gap: 5, label: 34, layer: 120 };
const multiples = { cells: [], rows: [], tall: 0, at: 0, pointed: null, ends: null };

// A row for each layer: its band, then its heads, in as many lines as they need.
function layMultiples() {
  const room = byId("multiples-box").clientWidth - CELL.label - 16;
  const layer = Math.min(CELL.layer, Math.floor(room / 3));
  const many = Math.max(1, Math.floor((room - layer - CELL.gap) / (CELL.wide + CELL.gap)));
  const most = Math.max(...DATA.stacks.map((stack) => stack.heads));
  const perLine = Math.ceil(most / Math.ceil(most / many));
  const wide = Math.min(150, Math.floor((room - layer) / perLine) - CELL.gap);
  Object.assign(multiples, { cells: [], rows: [], ends: range() });
  let top = 4;
  for (const site of DATA.stacks.flatMap((stack) => stack.sites)) {
    multiples.rows.push({ site, top, tall: CELL.tall });
    multiples.cells.push({ site, head: null, left: CELL.label, top, wide: layer });
    BY_SITE[site].forEach((head, place) => {
      const left = CELL.label + layer + CELL.gap + (place % perLine) * (wide + CELL.gap);
      multiples.cells.push({ site, head, left, top: top + Math.floor(place / perLine) * (CELL.tall + CELL.gap), wide });
    });
    top += Math.max(1, Math.ceil(BY_SITE[site].length / perLine)) * (CELL.tall + CELL.gap);
  }
  multiples.tall = top;
  byId("courses-room").style.height = `${top}px`;
}

function pen(id) {
  const box = byId("multiples-box");
  const canvas = byId(id);
  const ratio = window.devicePixelRatio || 1;
  const [wide, tall] = [box.clientWidth, box.clientHeight];
  if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(tall * ratio)) {
    [canvas.width, canvas.height] = [Math.round(wide * ratio), Math.round(tall * ratio)];
    [canvas.style.width, canvas.style.height] = [`${wide}px`, `${tall}px`];
  }
  const drawn = canvas.getContext("2d");
  drawn.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawn.clearRect(0, 0, wide, tall);
  drawn.translate(0, -box.scrollTop);
  return drawn;
}

function inSight() {
  const box = byId("multiples-box");
  const [from, to] = [box.scrollTop - CELL.tall, box.scrollTop + box.clientHeight];
  return multiples.cells.filter((cell) => cell.top >= from && cell.top <= to);
}

function drawMultiples() {
  if (!HISTORY) return;
  layMultiples();
  paintMultiples();
  const { low, high } = multiples.ends;
  byId("multiples-help").textContent = text("multiples.help", { low: full(low), high: full(high) });
  byId("multiples-resolution").textContent = text("multiples.resolution", { n: DATA.run.per_column });
}

function paintMultiples() {
  const drawn = pen("courses");
  const [line, ink, muted, accent] = ["--line", "--ink", "--muted", "--accent"].map(theme);
  drawn.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  drawn.textAlign = "right";
  drawn.fillStyle = muted;
  for (const { site, top } of multiples.rows) drawn.fillText(cut(layerOf(BY_SITE[site][0] ?? { site }, 5), 5), CELL.label - 6, top + CELL.tall / 2 + 4);
  for (const cell of inSight()) {
    drawn.strokeStyle = cell.head && cell.head === chosen.head ? ink : line;
    drawn.lineWidth = cell.head && cell.head === chosen.head ? 2 : 1;
    drawn.strokeRect(cell.left + 0.5, cell.top + 0.5, cell.wide - 1, CELL.tall - 1);
    if (cell.head) drawHead(drawn, cell, ink);
    else drawLayer(drawn, cell, accent);
    drawTicks(drawn, cell);
  }
  drawPointer();
}

function across(cell, step) {
  const first = DATA.run.first;
  return cell.left + 2 + ((step - first) / Math.max(1, DATA.run.last - first)) * (cell.wide - 4);
}

function up(cell, value) {
  return cell.top + CELL.tall - 5 - Math.min(1, Math.max(0, shareOf(value, multiples.ends))) * (CELL.tall - 8);
}

function drawHead(drawn, cell, ink) {
  const course = courseOf(cell.head, chosen.quantity);
  if (!course) return;
  const steps = axisOf(cell.site);
  drawn.beginPath();
  let begun = false;
  for (let column = 0; column < steps.length; column += 1) {
    const value = course.at(column);
    if (value === null) continue;
    const [x, y] = [across(cell, steps[column]), up(cell, value)];
    if (begun) drawn.lineTo(x, y);
    else drawn.moveTo(x, y);
    begun = true;
  }
  drawn.strokeStyle = ink;
  drawn.lineWidth = 1.1;
  drawn.stroke();
}

function drawLayer(drawn, cell, accent) {
  const band = layerBand(cell.site, chosen.quantity);
  if (!band) return;
  const steps = axisOf(cell.site);
  const known = steps.map((_, column) => column).filter((column) => band.mean.at(column) !== null);
  const trace = (series, columns) => columns.forEach((column) => drawn.lineTo(across(cell, steps[column]), up(cell, series.at(column))));
  drawn.beginPath();
  trace(band.largest, known);
  trace(band.least, [...known].reverse());
  drawn.fillStyle = accent;
  drawn.globalAlpha = 0.22;
  drawn.fill();
  drawn.globalAlpha = 1;
  drawn.beginPath();
  trace(band.mean, known);
  drawn.strokeStyle = accent;
  drawn.lineWidth = 1.6;
  drawn.stroke();
}

// Where alarms begin, below the line; where the run was resumed, dashed through it.
function drawTicks(drawn, cell) {
  const alarms = cell.head ? cell.head.alarms : DATA.alarms.filter((alarm) => alarm.site === cell.site && alarm.head === null);
  for (const alarm of alarms) {
    drawn.fillStyle = theme(LEVEL_COLOURS[alarm.level]);
    drawn.fillRect(across(cell, alarm.since) - 1, cell.top + CELL.tall - 5, 2.5, 4);
  }
  drawn.setLineDash([2, 2]);
  drawn.strokeStyle = theme("--mark");
  drawn.lineWidth = 1;
  for (const step of DATA.run.resumed) {
    drawn.beginPath();
    drawn.moveTo(across(cell, step), cell.top + 2);
    drawn.lineTo(across(cell, step), cell.top + CELL.tall - 2);
    drawn.stroke();
  }
  drawn.setLineDash([]);
}

// The moment that is shown, or that the pointer is at, through every chart; and the keyboard's place.
function drawPointer() {
  const drawn = pen("pointer");
  const step = multiples.pointed ? multiples.pointed.step : stepNow();
  drawn.strokeStyle = theme("--accent");
  drawn.lineWidth = 1;
  for (const cell of inSight()) {
    drawn.beginPath();
    drawn.moveTo(across(cell, step), cell.top + 2);
    drawn.lineTo(across(cell, step), cell.top + CELL.tall - 2);
    drawn.stroke();
  }
  if (!byId("multiples-box").matches(":focus-visible")) return;
  const cell = multiples.cells[multiples.at];
  drawn.setLineDash([4, 3]);
  drawn.lineWidth = 2.5;
  drawn.strokeRect(cell.left - 1, cell.top - 1, cell.wide + 2, CELL.tall + 2);
  drawn.setLineDash([]);
}

function cellAt(event) {
  const box = byId("multiples-box").getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top + byId("multiples-box").scrollTop];
  const place = multiples.cells.findIndex((cell) => x >= cell.left && x <= cell.left + cell.wide && y >= cell.top && y <= cell.top + CELL.tall);
  return { place, cell: multiples.cells[place], x };
}

function nearestColumn(site, step) {
  const steps = axisOf(site);
  const after = steps.findIndex((first) => first > step);
  return after === -1 ? steps.length - 1 : Math.max(0, after - 1);
}

function pointedText(cell, column) {
  const at = chosen.quantity;
  if (cell.head) return withUnit(courseOf(cell.head, at)?.at(column) ?? null, quantity());
  const band = layerBand(cell.site, at);
  if (!band || band.mean.at(column) === null) return full(null);
  return text("multiples.range", { mean: full(band.mean.at(column)), least: full(band.least.at(column)), largest: full(band.largest.at(column)) });
}

function nameOf(cell) {
  return cell.head ? spoken(cell.head) : `${text("head.layer", { label: layerOf({ site: cell.site }) })}, ${text("multiples.mean")}`;
}

function pointAt(event) {
  const { cell, x } = cellAt(event);
  if (!cell || !HISTORY) return leaveMultiples();
  const share = Math.min(1, Math.max(0, (x - cell.left - 2) / (cell.wide - 4)));
  const column = nearestColumn(cell.site, DATA.run.first + share * (DATA.run.last - DATA.run.first));
  const step = axisOf(cell.site)[column];
  multiples.pointed = { step };
  drawPointer();
  const lines = [element("b", nameOf(cell)), element("span", text("time.step", { step })), element("span", pointedText(cell, column))];
  return showLines(lines, event.clientX, event.clientY);
}

function leaveMultiples() {
  if (multiples.pointed) {
    multiples.pointed = null;
    drawPointer();
  }
  hideTip();
}

function markChosen() {
  if (!HISTORY) return;
  const place = multiples.cells.findIndex((cell) => cell.head && cell.head === chosen.head);
  if (place >= 0) multiples.at = place;
  paintMultiples();
}

function openCell(place) {
  const cell = multiples.cells[place];
  if (!cell) return;
  multiples.at = place;
  const head = cell.head ?? BY_SITE[cell.site][0];
  if (head) choose(head);
}

function pressMultiples(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    openCell(multiples.at);
    return;
  }
  const to = neighbour(event.key);
  if (to === null) return;
  event.preventDefault();
  multiples.at = to;
  const cell = multiples.cells[to];
  const box = byId("multiples-box");
  if (cell.top < box.scrollTop) box.scrollTop = cell.top - 4;
  if (cell.top + CELL.tall > box.scrollTop + box.clientHeight) box.scrollTop = cell.top + CELL.tall + 4 - box.clientHeight;
  drawPointer();
  announce(`${nameOf(cell)}: ${pointedText(cell, columnOf(cell.site, chosen.column ?? lastColumn()))}`);
}

function neighbour(key) {
  const { cells, at } = multiples;
  const here = cells[at];
  const beside = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: cells.length - 1 }[key];
  if (beside !== undefined) return Math.min(Math.max(beside, 0), cells.length - 1);
  const tops = [...new Set(cells.map((cell) => cell.top))];
  const top = tops[tops.indexOf(here.top) + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? NaN)];
  if (top === undefined) return key === "ArrowUp" || key === "ArrowDown" ? at : null;
  const line = cells.map((cell, place) => ({ cell, place })).filter(({ cell }) => cell.top === top);
  return line.reduce((a, b) => (Math.abs(b.cell.left - here.left) < Math.abs(a.cell.left - here.left) ? b : a)).place;
}

function startMultiples() {
  const box = byId("multiples-box");
  byId("multiples").hidden = false;
  box.addEventListener("scroll", paintMultiples);
  box.addEventListener("pointermove", pointAt);
  box.addEventListener("pointerleave", leaveMultiples);
  box.addEventListener("click", (event) => openCell(cellAt(event).place));
  box.addEventListener("keydown", pressMultiples);
  box.addEventListener("focus", drawPointer);
  box.addEventListener("blur", drawPointer);
}
