// What entropy says of a row of weights, and what an eps in its logarithm costs.

// Weights p^(1 / T), divided by their sum: softmax(log p / T).
const sharpened = (weights, T) => softmax(weights.map((p) => (p > 0 ? Math.log(p) : -Infinity)), T);
const withEps = (weights, eps) => -sum(weights.map((p) => p * Math.log(p + eps)));
const lost = (n, eps) => Math.log1p(n * eps);
const COUNTS_OF_KEYS = Array.from({ length: 20 }, (_, i) => 2 ** (i + 1));

const EXPERIMENT = {
  controls: [
    choice("shape", Object.keys(DATA.shapes), "each half of the last"), slider("T", TEMPERATURES, 1),
    slider("n", COUNTS_OF_KEYS, 4096), slider("eps", [1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5], 1e-6),
  ],
  tries: [
    { shape: "all equal", T: 1 },
    { shape: "one key", T: 1 },
    { shape: "half on one, rest equal", T: 1 },
    { n: 131072, eps: 1e-5 },
  ],
  numbers(at) {
    const weights = sharpened(DATA.shapes[at.shape], at.T);
    const H = entropyOf(weights);
    return {
      entropy: H,
      bits: H / Math.LN2,
      keys: Math.exp(H),
      tokens: effectiveTokens(weights),
      largest: largest(weights),
      gini: gini(weights),
      with_eps: withEps(weights, at.eps),
      uniform: Math.log(at.n),
      lost: lost(at.n, at.eps),
    };
  },
  verdict: (numbers) => (numbers.lost > 0.1 ? "lost" : "fine"),
  charts: [
    { key: "weights", bars: (at) => sharpened(DATA.shapes[at.shape], at.T) },
    {
      key: "lost", x: "n", log: [true, true],
      curves: (at) => DATA.epsilons.map((eps) => ({
        name: `eps ${exponential(eps)}`, chosen: eps === at.eps,
        // Below 1e-10 float64 rounds what is left, and so the lab leaves it out.
        points: COUNTS_OF_KEYS.map((n) => [n, lost(n, eps) > 1e-10 ? lost(n, eps) : null]),
      })),
    },
    {
      key: "alarm", x: "n", log: [true, false],
      curves: () => [
        { name: "uniform", chosen: true, points: COUNTS_OF_KEYS.map((n) => [n, Math.log(n)]) },
        { name: "high", points: COUNTS_OF_KEYS.map((n) => [n, DATA.high]) },
        { name: "low", points: COUNTS_OF_KEYS.map((n) => [n, DATA.low]) },
      ],
    },
  ],
};
