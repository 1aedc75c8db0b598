// The history of the chosen head: an ECharts line with its band, its alarms, and the moment that is shown.

const LEVEL_COLOURS = { critical: "--critical", warning: "--warning", notice: "--notice" };

function drawCourse(head) {
  const chart = chartOn("history");
  const course = courseOf(head, chosen.quantity);
  const band = bandOf(head, chosen.quantity);
  byId("history-band").hidden = !band;
  byId("history-title").textContent = text("head.history_of", { title: quantity().title });
  if (!course) return chart.clear();
  const steps = axisOf(head.site);
  const points = steps.map((step, column) => [step, course.at(column)]);
  const known = points.filter(([, value]) => value !== null);
  const style = axisStyle();
  labelCourse(known);
  chart.off("click");
  chart.getZr().off("click");
  chart.getZr().on("click", (event) => goTo(chart.convertFromPixel({ xAxisIndex: 0 }, event.offsetX)));
  return chart.setOption({
    ...still(),
    grid: { left: 48, right: 14, top: 22, bottom: 24 },
    tooltip: { trigger: "axis", confine: true, renderMode: "richText", formatter: ([{ value }]) => `${text("time.step", { step: value[0] })}\n${full(value[1] ?? null)}` },
    xAxis: { ...style, type: "value", min: steps[0], max: DATA.run.last, splitLine: { show: false }, splitNumber: 4 },
    yAxis: { ...style, type: "value", scale: true, max: ({ max }) => (quantity().high !== null && max > 0.8 * quantity().high ? quantity().high : null), splitNumber: 3, axisLine: { show: false }, axisLabel: { ...style.axisLabel, showMaxLabel: false, formatter: (value) => short(value) } },
    series: [
      {
        type: "line", symbol: known.length < 40 ? "circle" : "none", symbolSize: 4, connectNulls: true, data: points, z: 4,
        lineStyle: { color: theme("--accent"), width: 1.8 }, itemStyle: { color: theme("--accent") },
        markLine: { silent: true, symbol: "none", animation: false, label: { show: false }, data: [...courseMarks(head), momentMark(steps[0])] },
      },
      ...(band ? bandSeries(band, steps) : []),
    ],
  }, true);
}

function labelCourse(known) {
  const values = known.map(([, value]) => value);
  byId("history").setAttribute("aria-label", known.length ? text("head.history_label", {
    title: titleOf(quantity()), first: known[0][0], last: known.at(-1)[0], start: values[0], end: values.at(-1),
    low: values.reduce((a, b) => Math.min(a, b)), high: values.reduce((a, b) => Math.max(a, b)),
  }) : text("head.no_row"));
}

// The moment that is shown says so above its line; near an edge of the chart to the side that has room.
function momentMark(first) {
  const share = (stepNow() - first) / Math.max(1, DATA.run.last - first);
  const label = { show: true, position: "end", distance: 3, formatter: text("time.shown", { step: stepNow() }), color: theme("--ink"), fontSize: 11, align: share < 0.2 ? "left" : share > 0.8 ? "right" : "center" };
  return { xAxis: stepNow(), lineStyle: { color: theme("--ink"), type: "solid", width: 1.5 }, label };
}

function courseMarks(head) {
  const alarms = head.alarms.map((alarm) => ({ xAxis: alarm.since, lineStyle: { color: theme(LEVEL_COLOURS[alarm.level]), type: "solid", width: 1.5, opacity: 0.7 } }));
  return [...alarms, ...resumedMarks()];
}

function resumedMarks() {
  return DATA.run.resumed.map((step) => ({ xAxis: step, lineStyle: { color: theme("--mark"), type: "dashed", width: 1 } }));
}

// From the least to the largest: an invisible line, and what lies above it as an area.
function bandSeries(band, steps) {
  const line = (data, areaStyle) => ({
    type: "line", silent: true, symbol: "none", stack: "band", stackStrategy: "all", connectNulls: true, lineStyle: { opacity: 0 }, areaStyle, data,
  });
  const least = steps.map((step, column) => [step, band.least.at(column)]);
  const above = steps.map((step, column) => [step, band.largest.at(column) === null ? null : band.largest.at(column) - band.least.at(column)]);
  return [line(least, undefined), line(above, { color: theme("--accent"), opacity: 0.2 })];
}
