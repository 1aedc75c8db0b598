// Layers x heads, one map for each stack: cells on an ECharts canvas, labels and the two rings around it in the document.

const TOP = 22; // room for the numbers of the heads
const MOST_TEXTS = 1200; // cells with a number in them: each has a style of its own, which takes time
const maps = []; // one { stack, host, area, chart, cursor, ring, wide, tall } each

function makeMap(host, stack) {
  const labels = element("div", undefined, "layers");
  labels.setAttribute("aria-hidden", "true");
  for (const at of stack.sites) {
    const site = DATA.sites[at];
    const label = element("span", site.label === "–" ? "·" : site.label);
    label.title = site.name;
    labels.append(label);
  }
  const scroll = element("div", undefined, "scroll");
  const area = element("div", undefined, "cells");
  area.tabIndex = 0;
  area.setAttribute("role", "application");
  area.setAttribute("aria-describedby", "keys");
  const drawing = element("div", undefined, "drawing");
  drawing.setAttribute("aria-hidden", "true");
  const ring = element("div", undefined, "ring");
  const cursor = element("div", undefined, "ring cursor");
  ring.hidden = cursor.hidden = true;
  area.append(drawing, ring, cursor);
  scroll.append(area);
  host.append(labels, scroll);
  const map = { stack, host, area, drawing, ring, cursor, chart: null, at: { row: 0, column: 0 }, wide: 0, tall: 0 };
  listen(map);
  return map;
}

// Cells fill the width, but never shrink below what a finger can hit: then the map scrolls inside its box.
function fit(map) {
  const room = map.host.clientWidth - map.host.firstChild.offsetWidth - 8;
  const layers = map.stack.sites.length;
  const least = matchMedia("(pointer: coarse)").matches ? 24 : 13;
  map.wide = Math.max(least, Math.min(128, Math.floor(room / Math.max(1, map.stack.heads))));
  map.tall = Math.max(least, 16, Math.min(52, map.wide, Math.floor(460 / layers)));
  map.host.style.setProperty("--tall", `${map.tall}px`);
  map.host.style.setProperty("--top", `${TOP}px`);
  map.drawing.style.width = `${map.wide * map.stack.heads}px`;
  map.drawing.style.height = `${map.tall * layers + TOP}px`;
}

function drawMap(map) {
  fit(map);
  map.area.setAttribute("aria-roledescription", text("heads.map"));
  map.area.setAttribute("aria-label", text("heads.map_of", { pattern: cut(map.stack.pattern, 100), layers: ["count.layers", { n: map.stack.sites.length }], heads: ["count.heads", { n: map.stack.heads }] }));
  if (!map.chart) map.chart = echarts.init(map.drawing, null, { renderer: "canvas" });
  map.chart.resize({ width: map.wide * map.stack.heads, height: map.tall * map.stack.sites.length + TOP });
  const rows = map.stack.sites.map((site) => BY_SITE[site]);
  const axis = { type: "category", axisLine: { show: false }, axisTick: { show: false }, splitLine: { show: false } };
  map.chart.setOption({
    ...still(),
    grid: { left: 0, right: 0, top: TOP, bottom: 0 },
    xAxis: {
      ...axis, position: "top", data: (rows[0] || []).map((head) => head.head),
      axisLabel: { color: theme("--muted"), fontSize: 11, margin: 6, interval: map.wide < 24 ? 3 : 0 },
    },
    yAxis: { ...axis, inverse: true, data: rows.map((_, row) => row), axisLabel: { show: false } },
    series: [cells(map, rows), marks(map, rows)],
  }, true);
  place(map);
}

// A square for every head, in the colour of its value, with its number where there is room.
function cells(map, rows) {
  const ends = range();
  const size = [map.wide - 2, map.tall - 2];
  const missing = hatch(theme("--hatch"), theme("--hatch-ground"), ...size);
  const broken = hatch(theme("--critical"), theme("--broken-ground"), ...size);
  const fill = (head) => {
    if (!isShown(head)) return theme("--hatch-ground");
    if (isBroken(head)) return broken;
    return valueOf(head) === null ? missing : css(viridis(shareOf(valueOf(head), ends)));
  };
  const heads = rows.flatMap((row, y) => row.map((head, x) => ({ head, at: [x, y] })));
  const roomy = map.wide >= 22 && map.tall >= 20 && heads.length <= MOST_TEXTS;
  return {
    type: "scatter", silent: true, symbol: "rect", symbolSize: size, clip: false, progressiveThreshold: Infinity,
    itemStyle: { color: ({ dataIndex }) => fill(heads[dataIndex].head), opacity: 1, borderColor: theme("--mark"), borderWidth: 1 },
    data: heads.map(({ head, at }) => (roomy ? { value: at, label: isShown(head) ? cellText(head, ends, isNarrow(map)) : { show: false } } : at)),
  };
}

function isNarrow(map) {
  return map.wide < 34 || map.tall < 26;
}

function cellText(head, ends, narrow) {
  const value = valueOf(head);
  const fontSize = narrow ? 9.5 : 11;
  const offset = narrow ? [0, 3] : [0, 0]; // below the dot of an alarm
  if (isBroken(head)) {
    return { show: true, formatter: "NaN", fontSize, offset, color: theme("--ink"), backgroundColor: theme("--broken-ground"), padding: narrow ? [1, 0] : [2, 3] };
  }
  if (value === null) return { show: false };
  return { show: true, formatter: narrow ? shortest(value) : short(value), fontSize, offset, color: inkOn(viridis(shareOf(value, ends))) };
}

// A dot in the corner of the heads that raised an alarm.
function marks(map, rows) {
  const inset = isNarrow(map) ? 5 : 9;
  return {
    type: "scatter", silent: true, progressiveThreshold: Infinity, symbol: "circle", symbolSize: map.wide >= 34 ? 6 : map.wide >= 20 ? 5 : 4,
    symbolOffset: [map.wide / 2 - inset, -map.tall / 2 + inset],
    itemStyle: { color: "#fff", borderColor: "#000", borderWidth: map.wide >= 20 ? 1.2 : 0.5, opacity: 1 },
    data: rows.flatMap((row, y) => row.flatMap((head, x) => (alarmsOf(head).length && isShown(head) ? [[x, y]] : []))),
  };
}

function put(box, map, row, column) {
  box.style.left = `${column * map.wide}px`;
  box.style.top = `${TOP + row * map.tall}px`;
  box.style.width = `${map.wide}px`;
  box.style.height = `${map.tall}px`;
}

// The rings: one around the chosen head, one where the arrow keys are.
function place(map) {
  const head = chosen.head;
  const row = head ? map.stack.sites.indexOf(head.site) : -1;
  map.ring.hidden = row < 0;
  if (row >= 0) put(map.ring, map, row, head.place);
  put(map.cursor, map, map.at.row, map.at.column);
}

function headAt(map, row, column) {
  const site = map.stack.sites[row];
  return site === undefined ? undefined : BY_SITE[site][column];
}

function under(map, event) {
  const box = map.area.getBoundingClientRect();
  const row = Math.floor((event.clientY - box.top - TOP) / map.tall);
  const column = Math.floor((event.clientX - box.left) / map.wide);
  return { row, column, head: row < 0 || column < 0 ? undefined : headAt(map, row, column) };
}

function listen(map) {
  map.area.addEventListener("click", (event) => {
    const { row, column, head } = under(map, event);
    if (!head) return;
    map.at = { row, column };
    choose(head);
  });
  map.area.addEventListener("pointermove", (event) => {
    const { head } = under(map, event);
    if (head && event.pointerType === "mouse") showTip(head, event.clientX, event.clientY);
    else hideTip();
  });
  map.area.addEventListener("pointerleave", hideTip);
  map.area.addEventListener("focus", () => {
    map.cursor.hidden = !map.area.matches(":focus-visible");
    if (chosen.head && map.stack.sites.includes(chosen.head.site)) aim(map, chosen.head);
    place(map);
  });
  map.area.addEventListener("blur", () => {
    map.cursor.hidden = true;
    hideTip();
  });
  map.area.addEventListener("keydown", (event) => press(map, event));
}

function aim(map, head) {
  map.at = { row: map.stack.sites.indexOf(head.site), column: head.place };
}

function press(map, event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const last = { row: map.stack.sites.length - 1, column: map.stack.heads - 1 };
  const to = { ...map.at };
  if (event.key === "ArrowLeft") to.column -= 1;
  else if (event.key === "ArrowRight") to.column += 1;
  else if (event.key === "ArrowUp") to.row -= 1;
  else if (event.key === "ArrowDown") to.row += 1;
  else if (event.key === "Home") to.column = 0;
  else if (event.key === "End") to.column = last.column;
  else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    const head = headAt(map, map.at.row, map.at.column);
    if (head) choose(head);
    return;
  } else return;
  event.preventDefault();
  map.at = {
    row: Math.min(Math.max(to.row, 0), last.row),
    column: Math.min(Math.max(to.column, 0), last.column),
  };
  map.cursor.hidden = false;
  place(map);
  map.cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  const head = headAt(map, map.at.row, map.at.column);
  if (head) announce(summary(head));
}

function summary(head) {
  const broken = isBroken(head) ? text("heads.said_broken") : "";
  const many = alarmsOf(head).length;
  const alarms = many ? text("heads.said_alarms", { n: many }) : "";
  return text("heads.said", { head: spoken(head), title: titleOf(quantity()), value: withUnit(valueOf(head), quantity()), broken, alarms });
}

function showTip(head, x, y) {
  const value = withUnit(valueOf(head), quantity());
  const lines = [element("b", spoken(head)), element("span", text("heads.value", { title: quantity().title, value }))];
  if (roleOf(head)) lines.push(element("span", roleOf(head)));
  if (isBroken(head)) lines.push(element("span", text("heads.broken")));
  for (const alarm of alarmsOf(head).slice(0, 3)) lines.push(element("span", cut(say(alarm.text), 120), "said"));
  showLines(lines, x, y);
}

function showLines(lines, x, y) {
  const tip = byId("tip");
  tip.replaceChildren(...lines);
  tip.hidden = false;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(x + 14, room))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
}

function hideTip() {
  byId("tip").hidden = true;
}

// Another moment, or another quantity: cells take other colours where they are.
function paintMap(map) {
  const rows = map.stack.sites.map((site) => BY_SITE[site]);
  map.chart.setOption({ series: [cells(map, rows), marks(map, rows)] }, { replaceMerge: ["series"] });
}

function drawMaps() {
  for (const map of maps) drawMap(map);
}

function startMaps() {
  for (const host of document.querySelectorAll(".map")) maps.push(makeMap(host, DATA.stacks[Number(host.dataset.stack)]));
}
