// What large scores do to a softmax, and to the gradient that passes it.

const spreadOf = (at) => Math.sqrt(at.d) / (at.divisor === "1" ? 1 : Math.sqrt(at.d)) / at.T;
const atSpread = (spread) => DATA.rows.map((row) => softmax(row, 1 / spread));

const normCurves = once(() => {
  const [first, last] = DATA.spreads;
  const spreads = Array.from({ length: 41 }, (_, i) => first * (last / first) ** (i / 40));
  const norms = spreads.map((spread) => [spread, atSpread(spread)]);
  const curve = (name, of) => ({ name, chosen: true, points: norms.map(([spread, rows]) => [spread, of(rows)]) });
  return [
    curve("frobenius", (rows) => mean(rows.map(frobenius))),
    curve("spectral", (rows) => mean(rows.map(spectral))),
    curve("median", (rows) => median(rows.map(spectral))),
  ];
});

const gapCurves = once(() => {
  const gaps = Array.from({ length: 31 }, (_, gap) => gap);
  return [
    { name: "exact", chosen: true, points: gaps.map((gap) => [gap, gapGradient(gap)]) },
    // Exactly 0 has no place on a logarithmic axis: the curve ends there.
    { name: "float32", chosen: true, points: gaps.map((gap) => [gap, gapGradientFloat32(gap) || null]) },
  ];
});

const EXPERIMENT = {
  controls: [
    slider("d", SIZES_OF_HEADS, 64), choice("divisor", ["1", "sqrt(d)"], "1"), slider("T", TEMPERATURES, 1),
    slider("gap", Array.from({ length: 61 }, (_, i) => i / 2), 10),
  ],
  tries: [
    { d: 64, divisor: "1", T: 1 },
    { d: 1024, divisor: "1", T: 1 },
    { d: 1024, divisor: "sqrt(d)", T: 1 },
    { gap: 18 },
  ],
  numbers(at) {
    const rows = atSpread(spreadOf(at));
    return {
      spread: spreadOf(at),
      largest: mean(rows.map(largest)),
      entropy: mean(DATA.rows.map((row) => entropy(row, 1 / spreadOf(at)))),
      norm: median(rows.map(spectral)),
      exact: gapGradient(at.gap),
      float32: gapGradientFloat32(at.gap),
    };
  },
  verdict: (numbers) => (numbers.norm < 0.02 ? (numbers.largest > 0.5 ? "sharp" : "flat") : "fine"),
  charts: [
    { key: "norms", x: spreadOf, log: [true, true], curves: normCurves },
    { key: "weights", bars: (at) => sorted(softmax(DATA.rows[0], 1 / spreadOf(at))) },
    { key: "gap", x: "gap", log: [false, true], curves: gapCurves },
  ],
};
