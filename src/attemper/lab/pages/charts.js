// Charts as SVG, drawn at the size of their box: curves over a control's value with a mark where it stands, and bars.

const HEIGHT = 250;
const ROOM = { left: 58, right: 14, top: 12, bottom: 40 };

function scale(values, log, from, to) {
  const known = values.filter((value) => value !== null && Number.isFinite(value));
  let [low, high] = [Math.min(...known), Math.max(...known)];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 1, high + 1];
  if (!log && low > 0 && low < high / 2) low = 0;
  const place = log ? Math.log10 : (value) => value;
  const span = place(high) - place(low);
  const at = (value) => from + ((place(value) - place(low)) / span) * (to - from);
  at.back = (pixel) => {
    const value = place(low) + ((pixel - from) / (to - from)) * span;
    return log ? 10 ** value : value;
  };
  at.ticks = log ? powers(low, high) : rounds(low, high);
  return at;
}

// Powers of ten, thinned to six at most; 1, 2, 5 where they would be fewer than two.
function powers(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const step = Math.max(1, Math.ceil((last - first + 1) / 6));
  const found = [];
  for (let power = first; power <= last; power += step) found.push(Number(`1e${power}`));
  return found.length > 1 ? found : [1, 2, 5, 10, 20, 50].map((n) => n * 10 ** (first - 1)).filter((n) => n >= low && n <= high);
}

function rounds(low, high) {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(Number((place * step).toPrecision(12)));
  return found;
}

const tick = (value) => (Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-2) ? exponential(value) : String(value));

function axes(svg, x, y, width, names) {
  const bottom = HEIGHT - ROOM.bottom;
  for (const value of y.ticks) {
    svg.append(make("line", { class: "grid", x1: ROOM.left, x2: width - ROOM.right, y1: y(value), y2: y(value) }));
    svg.append(make("text", { x: ROOM.left - 7, y: y(value) + 4, "text-anchor": "end" }, tick(value)));
  }
  for (const value of x ? x.ticks : []) {
    svg.append(make("line", { class: "tick", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 4 }));
    svg.append(make("text", { x: x(value), y: bottom + 17, "text-anchor": "middle" }, tick(value)));
  }
  svg.append(make("line", { class: "axis", x1: ROOM.left, x2: width - ROOM.right, y1: bottom, y2: bottom }));
  svg.append(make("text", { class: "name", x: width - ROOM.right, y: HEIGHT - 6, "text-anchor": "end" }, names.x));
}

function line(points, x, y) {
  let drawn = "", pen = false;
  for (const [left, value] of points) {
    if (value === null || !Number.isFinite(value)) { pen = false; continue; }
    drawn += `${pen ? "L" : "M"}${x(left).toFixed(2)} ${y(value).toFixed(2)}`;
    pen = true;
  }
  return drawn;
}

function drawCurves(chart, host) {
  const width = host.clientWidth, curves = chart.curves(at), [logX, logY] = chart.log;
  const x = scale(curves.flatMap((curve) => curve.points.map((point) => point[0])), logX, ROOM.left, width - ROOM.right);
  const y = scale(curves.flatMap((curve) => curve.points.map((point) => point[1])), logY, HEIGHT - ROOM.bottom, ROOM.top);
  const svg = start(chart, host, width);
  axes(svg, x, y, width, { x: text(`chart.${chart.key}.x`) });
  curves.forEach((curve, i) => svg.append(make("path", { class: `curve c${i} ${curve.chosen ? "chosen" : "other"}`, d: line(curve.points, x, y) })));
  const value = typeof chart.x === "string" ? at[chart.x] : chart.x(at);
  const place = Math.min(Math.max(x(value), ROOM.left), width - ROOM.right);
  svg.append(make("line", { class: "mark", x1: place, x2: place, y1: ROOM.top, y2: HEIGHT - ROOM.bottom }));
  curves.forEach((curve, i) => {
    const near = curve.points.reduce((a, b) => (Math.abs(x(b[0]) - place) < Math.abs(x(a[0]) - place) ? b : a));
    if (curve.chosen && near[1] !== null && Math.abs(x(near[0]) - place) < 3) {
      svg.append(make("circle", { class: `dot c${i}`, cx: place, cy: y(near[1]), r: 4.5 }));
    }
  });
  if (typeof chart.x === "string") follow(svg, host, x, chart.x);
  legend(host, chart, curves);
  return curves;
}

// Pressed or dragged in a chart, the control that it is drawn over follows.
function follow(svg, host, x, key) {
  svg.classList.add("handle");
  svg.addEventListener("pointerdown", (event) => {
    dragged = (moved) => set({ [key]: x.back(moved.clientX - host.getBoundingClientRect().left) });
    dragged(event);
  });
}
let dragged = null;
addEventListener("pointermove", (event) => dragged && dragged(event));
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => (dragged = null));

function drawBars(chart, host) {
  const width = host.clientWidth, weights = chart.bars(at);
  const top = [0.2, 0.5, 1].find((most) => most >= largest(weights)) || 1;
  const y = scale([0, top], false, HEIGHT - ROOM.bottom, ROOM.top);
  const svg = start(chart, host, width);
  axes(svg, null, y, width, { x: text(`chart.${chart.key}.x`) });
  const wide = (width - ROOM.left - ROOM.right) / weights.length;
  weights.forEach((weight, i) => svg.append(make("rect", {
    class: "bar", x: ROOM.left + (i + 0.12) * wide, width: wide * 0.76, y: y(weight), height: Math.max(0.75, y(0) - y(weight)),
  })));
  const even = y(1 / weights.length);
  svg.append(make("line", { class: "even", x1: ROOM.left, x2: width - ROOM.right, y1: even, y2: even }));
  legend(host, chart, []);
  return [{ name: "weights", points: weights.map((weight, i) => [i + 1, weight]) }];
}

function start(chart, host, width) {
  const svg = make("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": text(`chart.${chart.key}`) });
  host.replaceChildren(svg);
  return svg;
}

function legend(host, chart, curves) {
  host.nextElementSibling.replaceChildren(...curves.map((curve, i) => {
    const sample = make("svg", { width: 26, height: 10, "aria-hidden": "true" }, make("path", { class: `curve c${i} chosen`, d: "M0 5H26" }));
    return make("li", { class: curve.chosen ? "chosen" : "" }, sample, make("span", {}, curveName(chart, curve)));
  }));
}

const curveName = (chart, curve) => optionText(`chart.${chart.key}`, curve.name);

// The same numbers as a table: for those who hear the page, and for a test.
function fillTable(table, chart, curves) {
  const rows = curves[0].points.map(([x], i) => make("tr", {}, ...[x, ...curves.map((curve) => curve.points[i][1])].map((value) => (
    make("td", {}, value === null ? "–" : make("data", { value: String(value) }, shown(value)))))));
  const heads = [text(`chart.${chart.key}.x`), ...curves.map((curve) => curveName(chart, curve))];
  table.replaceChildren(make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, ...rows));
}
