// The three small charts of a head: all heads in a strip, its rows in a histogram, its entropy by visible keys.

const charts = {};

function chartOn(id) {
  const host = byId(id);
  if (!host) return null;
  if (!charts[id]) charts[id] = echarts.init(host, null, { renderer: "canvas" });
  charts[id].resize();
  return charts[id];
}

function axisStyle() {
  return {
    axisLine: { lineStyle: { color: theme("--mark") } },
    axisTick: { show: false },
    axisLabel: { color: theme("--muted"), fontSize: 11, hideOverlap: true },
    splitLine: { lineStyle: { color: theme("--line"), opacity: 0.6 } },
    nameTextStyle: { color: theme("--muted"), fontSize: 11 },
  };
}

// Dots of equal size that would cover each other move up and down in turn: a swarm whose height is the number of heads.
function swarm(heads, ends, columns) {
  const filled = new Map();
  return heads.map((head) => {
    const column = Math.round(shareOf(valueOf(head), ends) * columns);
    const many = filled.get(column) || 0;
    filled.set(column, many + 1);
    return { head, x: valueOf(head), y: many % 2 ? (many + 1) / 2 : -many / 2 };
  });
}

function drawStrip(head) {
  const chart = chartOn("strip");
  const known = HEADS.filter((other) => valueOf(other) !== null);
  const ends = range();
  const size = known.length <= 200 ? 7 : known.length <= 1500 ? 4 : 3;
  const points = swarm(known, ends, Math.max(10, Math.floor(chart.getWidth() / (size + 1))));
  const tallest = points.reduce((most, point) => Math.max(most, Math.abs(point.y)), 4) + 1;
  const style = axisStyle();
  const fill = (point) => css(viridis(shareOf(point.x, ends)));
  const mine = points.filter((point) => point.head === head);
  chart.off("click");
  chart.on("click", { seriesIndex: 0 }, (event) => choose(points[event.dataIndex].head, { stay: true }));
  chart.setOption({
    ...still(),
    grid: { left: 10, right: 14, top: 6, bottom: 24 },
    xAxis: { ...style, type: ends.logarithmic ? "log" : "value", min: ends.low, max: ends.high, splitLine: { show: false }, axisLabel: { ...style.axisLabel, formatter: tick } },
    yAxis: { type: "value", min: -tallest, max: tallest, show: false },
    series: [
      {
        type: "scatter", progressiveThreshold: Infinity, symbolSize: size, data: points.map(({ x, y }) => [x, y]), markLine: mineLine(mine),
        itemStyle: { color: ({ dataIndex }) => fill(points[dataIndex]), opacity: 1, borderColor: theme("--mark"), borderWidth: size < 7 ? 0.75 : 1 },
      },
      {
        type: "scatter", silent: true, symbolSize: 15, z: 5, data: mine.map(({ x, y }) => [x, y]),
        itemStyle: { color: ({ dataIndex }) => fill(mine[dataIndex]), opacity: 1, borderColor: theme("--ink"), borderWidth: 2.5 },
      },
    ],
  }, true);
}

function tick(value) {
  return full(Number(value.toPrecision(3)));
}

function mineLine(mine) {
  return {
    silent: true, symbol: "none", label: { show: false }, animation: false,
    lineStyle: { color: theme("--ink"), type: "solid", width: 1, opacity: 0.5 },
    data: mine.map((point) => ({ xAxis: point.x })),
  };
}

function drawHistogram(head) {
  const chart = chartOn("histogram");
  if (!chart) return;
  const [first = 0, ...counts] = head.histogram;
  const bins = Array.from({ length: 32 }, (_, bin) => counts[bin - first] || 0);
  const style = axisStyle();
  const most = Math.max(...bins);
  byId("histogram").setAttribute("aria-label", counts.length
    ? text("head.histogram_label", { low: first / 32, high: (first + counts.length) / 32, most: (bins.indexOf(most) + 0.5) / 32 })
    : text("head.no_row"));
  chart.setOption({
    ...still(),
    grid: { left: 44, right: 14, top: 8, bottom: 24 },
    xAxis: [
      { type: "category", data: bins.map((_, bin) => bin), show: false },
      { ...style, type: "value", min: 0, max: 1, interval: 0.25, position: "bottom", splitLine: { show: false } },
    ],
    yAxis: { ...style, type: "value", minInterval: 1, splitNumber: 2, axisLine: { show: false } },
    series: [{
      type: "bar", silent: true, barCategoryGap: "12%",
      itemStyle: { color: theme("--accent"), borderRadius: [2, 2, 0, 0] }, // both ends of viridis vanish on one of the grounds
      data: bins,
    }],
  }, true);
}

function bucketsOf(head) {
  const buckets = [];
  for (let at = 0; at < head.curve.length; at += 5) {
    const [from, to, rows, nats, normalized] = head.curve.slice(at, at + 5);
    buckets.push({ range: from === to ? `${from}` : `${from}–${to}`, rows, nats, normalized });
  }
  return buckets;
}

function drawCurve(head) {
  const chart = chartOn("curve");
  if (!chart) return;
  const buckets = bucketsOf(head);
  const style = axisStyle();
  byId("curve").setAttribute("aria-label", buckets.length
    ? buckets.map(({ range, nats, normalized }) => text("head.curve_point", { range, value: full(normalized), nats: full(nats) })).join("; ")
    : text("head.no_row"));
  chart.setOption({
    ...still(),
    grid: { left: 44, right: 22, top: 20, bottom: 38 },
    xAxis: { ...style, type: "category", data: buckets.map(({ range }) => range), name: text("head.curve_axis"), nameLocation: "middle", nameGap: 24 },
    yAxis: { ...style, type: "value", min: 0, max: 1, interval: 0.5, axisLine: { show: false } },
    series: [{
      type: "line", silent: true, symbol: "circle", symbolSize: 8, connectNulls: false,
      lineStyle: { color: theme("--accent"), width: 2 }, itemStyle: { color: theme("--accent") },
      label: { show: buckets.length <= 8, position: "top", formatter: ({ dataIndex }) => full(buckets[dataIndex].normalized), color: theme("--muted"), fontSize: 10.5 },
      labelLayout: { hideOverlap: true },
      data: buckets.map(({ normalized }) => normalized),
    }],
  }, true);
}
