// Variance of q.k / d^e for every head size d.

const variance = (d, exponent, T = 1) => d ** (1 - 2 * exponent) / (T * T);
const exponentOf = (divisor) => DATA.exponents[DATA.divisors.indexOf(divisor)];
const headSizes = Array.from({ length: 41 }, (_, i) => 2 ** (i / 4));

function scaledRows(at) {
  const spread = Math.sqrt(variance(at.d, exponentOf(at.divisor), at.T));
  return DATA.rows.map((row) => row.map((score) => score * spread));
}

const EXPERIMENT = {
  controls: [slider("d", SIZES_OF_HEADS, 64), choice("divisor", DATA.divisors, "sqrt(d)"), slider("T", TEMPERATURES, 1)],
  tries: [
    { d: 1024, divisor: "1", T: 1 },
    { d: 1024, divisor: "sqrt(d)", T: 1 },
    { d: 1024, divisor: "d", T: 1 },
    { d: 64, divisor: "1", T: 8 },
  ],
  numbers(at) {
    const spread = Math.sqrt(variance(at.d, exponentOf(at.divisor), at.T));
    const weights = scaledRows(at).map((row) => softmax(row));
    return {
      variance: spread * spread,
      spread,
      range: 2 * spread,
      largest: mean(weights.map(largest)),
      tokens: mean(weights.map(effectiveTokens)),
      share: mean(scaledRows(at).map((row) => entropy(row))) / Math.log(DATA.rows[0].length),
    };
  },
  verdict: (numbers) => (numbers.largest > 0.5 ? "sharp" : numbers.share > 0.99 ? "flat" : "fine"),
  charts: [
    {
      key: "variance", x: "d", log: [true, true],
      curves: (at) => DATA.divisors.map((divisor) => ({
        name: divisor, chosen: divisor === at.divisor,
        points: headSizes.map((d) => [d, variance(d, exponentOf(divisor), at.T)]),
      })),
    },
    { key: "weights", bars: (at) => sorted(softmax(scaledRows(at)[0])) },
  ],
};
