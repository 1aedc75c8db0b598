// What temperature does to weights, to their entropy and to its slope.

const ROW_KINDS = {
  random: { rows: DATA.rows },
  tied: { rows: [DATA.tied] },
  biased: { rows: [DATA.biased], bias: DATA.bias },
};
const tempered = (row, T, bias) => row.map((score, i) => score / T + (bias ? bias[i] : 0));
const entropyAt = ({ rows, bias }, T) => mean(rows.map((row) => entropy(tempered(row, T, bias))));
const slopeAt = ({ rows, bias }, T) => mean(rows.map((row) => entropySlope(row, T, bias)));

const overTemperature = (of) => {
  const drawn = once(() => Object.entries(ROW_KINDS).map(([name, kind]) => ({
    name, points: TEMPERATURES.map((T) => [T, of(kind, T)]),
  })));
  return (at) => drawn().map((curve) => ({ ...curve, chosen: curve.name === at.row }));
};

const EXPERIMENT = {
  controls: [slider("T", TEMPERATURES, 1), choice("row", Object.keys(ROW_KINDS), "random")],
  tries: [
    { T: TEMPERATURES[0], row: "random" },
    { T: 4, row: "random" },
    { T: TEMPERATURES[0], row: "tied" },
    { T: 0.5, row: "biased" },
  ],
  numbers(at) {
    const kind = ROW_KINDS[at.row];
    const weights = kind.rows.map((row) => softmax(tempered(row, at.T, kind.bias)));
    return {
      entropy: entropyAt(kind, at.T),
      share: entropyAt(kind, at.T) / Math.log(kind.rows[0].length),
      tokens: mean(weights.map(effectiveTokens)),
      largest: mean(weights.map(largest)),
      slope: slopeAt(kind, at.T),
    };
  },
  verdict: (numbers) => (numbers.slope < -1e-9 ? "falling" : numbers.share < 0.5 ? "sharp" : numbers.share > 0.95 ? "flat" : "fine"),
  charts: [
    { key: "entropy", x: "T", log: [true, false], curves: overTemperature(entropyAt) },
    { key: "weights", bars: (at) => {
      const { rows, bias } = ROW_KINDS[at.row];
      const weights = softmax(tempered(rows[0], at.T, bias));
      return at.row === "random" ? sorted(weights) : weights;
    } },
    { key: "slope", x: "T", log: [true, false], curves: overTemperature(slopeAt) },
  ],
};
