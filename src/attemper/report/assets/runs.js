// Several runs in one chart: lines by step or by tokens, each with its letter at its end, warnings as marks on them.

let COURSES = null; // of each run: statistic -> of each site [steps, mean, heads]
const shown = { axis: "step", statistic: 0, site: -1, head: -1, hidden: new Set() };

// Tokens up to a step, between the moments that are known; behind the last at the pace before.
function tokensAt(run, step) {
  const [steps, tokens] = run.tokens;
  let at = steps.findIndex((one) => one >= step);
  if (at === 0 || steps.length < 2) return tokens[0];
  if (at < 0) at = steps.length - 1;
  return tokens[at - 1] + ((step - steps[at - 1]) / (steps[at] - steps[at - 1])) * (tokens[at] - tokens[at - 1]);
}

function placeOf(run, step) {
  return shown.axis === "tokens" ? tokensAt(run, step) : step;
}

// The course of one head, of a site's mean or largest, or of that over the sites that were sampled at the same steps.
function courseOf(run) {
  const sites = COURSES[run][DATA.statistics[shown.statistic].key];
  if (!sites) return null;
  if (shown.site >= 0) {
    const site = sites[shown.site];
    const values = site && (shown.head >= 0 ? site[2][shown.head] : site[1]);
    return values ? site[0].map((step, at) => [step, values[at]]) : null;
  }
  const known = sites.map((site, at) => [site, DATA.sites[at][2]]).filter(([site]) => site);
  if (!known.length) return null;
  const steps = known.map(([site]) => site[0]).reduce((a, b) => (b.length > a.length ? b : a));
  const alike = known.filter(([site]) => site[0].length === steps.length);
  return steps.map((step, at) => {
    const there = alike.filter(([site]) => site[1][at] !== null);
    const heads = there.reduce((sum, [, many]) => sum + many, 0);
    if (DATA.statistics[shown.statistic].over === "largest") return [step, heads ? Math.max(...there.map(([site]) => site[1][at])) : null];
    return [step, heads ? there.reduce((sum, [site, many]) => sum + site[1][at] * many, 0) / heads : null];
  });
}

function valueNear(points, step) {
  return points.reduce((best, point) => (point[1] !== null && Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best), [Infinity, null])[1];
}

// Both charts have the same ends, of the runs that are shown.
function endsOf(all) {
  const steps = all.flatMap((courses) => courses.flatMap((points, at) => (points && !shown.hidden.has(at) ? [points[0][0], points.at(-1)[0]].map((step) => placeOf(DATA.runs[at], step)) : [])));
  return { min: Math.min(...steps), max: Math.max(...steps) };
}

function drawRuns(id, title, courses, ends) {
  const chart = chartOn(id);
  const style = axisStyle();
  const said = [];
  const series = DATA.runs.flatMap((run, at) => {
    const points = courses[at];
    if (!points || shown.hidden.has(at)) return [];
    const colour = theme(`--run-${run.letter}`);
    const known = points.filter(([, value]) => value !== null);
    if (known.length) said.push(text("runs.said", { run: run.letter, first: known[0][0], start: known[0][1], last: known.at(-1)[0], end: known.at(-1)[1] }));
    const marks = run.alarms.map(([step, level]) => ({ coord: [placeOf(run, step), valueNear(points, step)], itemStyle: { color: theme(LEVELS[level]), borderColor: colour, borderWidth: 1.5 } }));
    return [{
      type: "line", name: run.letter, data: points.map(([step, value]) => [placeOf(run, step), value]), symbol: known.length < 2 ? "circle" : "none", z: 4,
      lineStyle: { color: colour, width: 2, type: at < 4 ? "solid" : "dashed" }, itemStyle: { color: colour }, emphasis: { disabled: true },
      endLabel: { show: true, formatter: run.letter, color: colour, fontWeight: 700 }, labelLayout: { moveOverlap: "shiftY" },
      markPoint: { symbol: "triangle", symbolSize: 10, animation: false, silent: true, label: { show: false }, data: marks.filter(({ coord }) => coord[1] !== null) },
    }];
  });
  byId(id).setAttribute("aria-label", `${title}. ${said.join(" ")}`);
  chart.setOption({
    ...still(),
    grid: { left: 56, right: 30, top: 18, bottom: 30 },
    tooltip: { trigger: "axis", confine: true, renderMode: "richText", formatter: (all) => [text(`runs.at_${shown.axis}`, { n: Math.round(all[0].value[0]) }), ...all.map(({ seriesName, value }) => `${seriesName}: ${full(value[1] ?? null)}`)].join("\n") },
    xAxis: { ...style, type: "value", ...ends, splitLine: { show: false }, splitNumber: 5, axisLabel: { ...style.axisLabel, formatter: (value) => (value >= 1e6 ? `${full(value / 1e6)}M` : full(value)) } },
    yAxis: { ...style, type: "value", scale: true, splitNumber: 4, axisLine: { show: false }, axisLabel: { ...style.axisLabel, formatter: (value) => full(Number(value.toPrecision(3))) } },
    series,
  }, true);
}

const LEVELS = { critical: "--critical", warning: "--warning", notice: "--notice" };

function redrawAll() {
  applyTheme();
  if (!COURSES) return;
  fillChoices();
  const losses = DATA.runs.map(({ loss }) => loss && loss.steps.map((step, at) => [step, loss.mean[at]]));
  byId("loss-box").hidden = losses.every((one) => !one);
  const { title, unit, over } = DATA.statistics[shown.statistic];
  const site = shown.site < 0 ? text("runs.all") : siteName(shown.site);
  const place = shown.head < 0 ? text("runs.place", { site, over: text(`runs.over.${over}`) }) : site + text("runs.of_head", { head: shown.head });
  const named = text("head.alarm", { place: unit ? text("heads.named", { title, unit }) : title, said: place });
  byId("course-title").textContent = named;
  const courses = DATA.runs.map((_, at) => courseOf(at));
  const ends = endsOf([losses, courses]);
  if (!byId("loss-box").hidden) drawRuns("loss", text("loss.title"), losses, ends);
  drawRuns("course", named, courses, ends);
  const lacking = DATA.runs.filter((_, at) => !courses[at]).map(({ letter }) => letter);
  byId("lacking").textContent = lacking.length ? text("runs.lacking", { n: lacking.length, runs: lacking.join(text("list.names")) }) : "";
  byId("tokens-said").hidden = shown.axis !== "tokens";
  byId("tokens-said").textContent = text("runs.tokens_said");
  fillAlarms();
}

function fillAlarms() {
  const began = DATA.runs.flatMap((run, at) => (shown.hidden.has(at) ? [] : run.began.map((said) => [run.letter, said])));
  byId("alarms-of-runs").hidden = !began.length;
  byId("began").replaceChildren(...began.map(([letter, said]) => {
    const line = element("li");
    line.append(element("b", letter, `run-${letter}`), ` ${cut(say(said), 400)}`);
    return line;
  }));
}

function siteName(at) {
  const [name, mode] = DATA.sites[at];
  return mode ? `${name} (${mode})` : name;
}

function fillSelect(id, options, value) {
  byId(id).replaceChildren(...options.map(([key, title]) => {
    const made = element("option", title);
    made.value = key;
    return made;
  }));
  byId(id).value = String(value);
}

function fillChoices() {
  fillSelect("axis", [["step", text("runs.step")], ["tokens", text("runs.tokens")]], shown.axis);
  fillSelect("statistic", DATA.statistics.map(({ title }, at) => [at, say(title)]), shown.statistic);
  fillSelect("site", [[-1, text("runs.all")], ...DATA.sites.map((_, at) => [at, cut(siteName(at), 60)])], shown.site);
  const heads = shown.site < 0 || !DATA.single ? 0 : DATA.sites[shown.site][2];
  fillSelect("head", [[-1, text(`runs.over.${DATA.statistics[shown.statistic].over}`)], ...Array.from({ length: heads }, (_, head) => [head, String(head)])], shown.head);
  byId("head").disabled = !heads;
}

function toggle(button) {
  const at = Number(button.dataset.run);
  if (!shown.hidden.delete(at)) shown.hidden.add(at);
  button.setAttribute("aria-pressed", String(!shown.hidden.has(at)));
  redrawAll();
}

async function start() {
  startLanguage(redrawAll);
  startTheme(redrawAll);
  applyTheme();
  if (!window.DecompressionStream) return;
  COURSES = JSON.parse(new TextDecoder().decode(await unpack(DATA.packed, "deflate")));
  byId("charts").hidden = false;
  for (const button of document.querySelectorAll(".run")) button.addEventListener("click", () => toggle(button));
  for (const id of ["axis", "statistic", "site", "head"]) {
    byId(id).addEventListener("change", () => {
      shown[id] = id === "axis" ? byId(id).value : Number(byId(id).value);
      if (id === "site") shown.head = -1;
      redrawAll();
    });
  }
  window.addEventListener("resize", redrawAll);
  redrawAll();
  document.documentElement.dataset.ready = "true";
}
