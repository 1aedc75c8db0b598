// The loss of every step, above the heads and on their steps: its band, the alarms of the run, the moment that is shown.

function drawLoss() {
  const { loss } = DATA;
  byId("loss-box").hidden = !loss;
  if (!loss) return;
  const chart = chartOn("loss");
  const points = loss.steps.map((step, column) => [step, loss.mean[column]]);
  const known = points.filter(([, value]) => value !== null);
  const style = axisStyle();
  byId("loss").setAttribute("aria-label", known.length ? text("head.history_label", {
    title: text("loss.title"), first: known[0][0], last: known.at(-1)[0], start: known[0][1], end: known.at(-1)[1],
    low: known.reduce((a, [, b]) => Math.min(a, b), Infinity), high: known.reduce((a, [, b]) => Math.max(a, b), -Infinity),
  }) : text("head.no_row"));
  chart.off("click");
  chart.getZr().off("click");
  chart.getZr().on("click", (event) => goTo(chart.convertFromPixel({ xAxisIndex: 0 }, event.offsetX)));
  chart.setOption({
    ...still(),
    grid: { left: 48, right: 14, top: 22, bottom: 24 },
    tooltip: { trigger: "axis", confine: true, renderMode: "richText", formatter: ([{ value }]) => `${text("time.step", { step: value[0] })}\n${full(value[1] ?? null)}` },
    xAxis: { ...style, type: "value", min: Math.min(loss.steps[0], DATA.run.first), max: Math.max(loss.last, DATA.run.last), splitLine: { show: false }, splitNumber: 4 },
    yAxis: { ...style, type: "value", scale: true, splitNumber: 3, axisLine: { show: false }, axisLabel: { ...style.axisLabel, showMaxLabel: false, formatter: (value) => short(value) } },
    series: [
      {
        type: "line", symbol: known.length < 40 ? "circle" : "none", symbolSize: 4, data: points, z: 4,
        lineStyle: { color: theme("--accent"), width: 1.8 }, itemStyle: { color: theme("--accent") },
        markLine: { silent: true, symbol: "none", animation: false, label: { show: false }, data: [...lossMarks(), ...resumedMarks(), momentMark(DATA.run.first)] },
      },
      ...(loss.each > 1 ? bandSeries({ least: columnsOf(loss.least), largest: columnsOf(loss.largest) }, loss.steps) : []),
    ],
  }, true);
}

function columnsOf(values) {
  return { at: (column) => values[column] };
}

// Alarms of the loss as whole lines, those of heads that are warnings or worse as thin ones; each step once.
function lossMarks() {
  const began = new Map();
  for (const alarm of DATA.alarms) {
    const own = alarm.site === null;
    if (own || alarm.level !== "notice") began.set(`${alarm.since} ${alarm.level}`, { ...alarm, own: own || began.get(`${alarm.since} ${alarm.level}`)?.own });
  }
  return [...began.values()].map((alarm) => ({ xAxis: alarm.since, lineStyle: { color: theme(LEVEL_COLOURS[alarm.level]), type: "solid", width: alarm.own ? 2 : 1, opacity: alarm.own ? 0.9 : 0.35 } }));
}
