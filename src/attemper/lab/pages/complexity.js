// What attention costs over length: operations and bytes of one head's forward pass, counted.

const operations = (n, d) => ({ scores: 2 * n * n * d, softmax: DATA.per_score * n * n, mixture: 2 * n * n * d });
const bytesEager = (n, d) => DATA.bytes * (4 * n * d + 6 * n * n);
const bytesBlocked = (n, d) => DATA.bytes * (2 * n * d + 2 * n * d * Math.ceil(n / DATA.block));
const LENGTHS = Array.from({ length: 21 }, (_, i) => Math.round(128 * 2 ** (i / 2)));

const EXPERIMENT = {
  controls: [slider("tokens", LENGTHS, 2048), slider("d", SIZES_OF_HEADS, 64)],
  tries: [{ tokens: 512, d: 64 }, { tokens: 131072, d: 64 }, { tokens: 2048, d: 4 }, { tokens: 128, d: 1024 }],
  numbers(at) {
    const { scores, softmax: exponentials, mixture } = operations(at.tokens, at.d);
    const total = scores + exponentials + mixture;
    return {
      operations: total,
      share: exponentials / total,
      eager: bytesEager(at.tokens, at.d),
      blocked: bytesBlocked(at.tokens, at.d),
      ratio: bytesEager(at.tokens, at.d) / bytesBlocked(at.tokens, at.d),
    };
  },
  verdict: (numbers) => (numbers.ratio > 2 ? "blocked" : "fine"),
  charts: [
    {
      key: "bytes", x: "tokens", log: [true, true],
      curves: (at) => [
        { name: "eager", chosen: true, points: LENGTHS.map((n) => [n, bytesEager(n, at.d)]) },
        { name: "blocked", chosen: true, points: LENGTHS.map((n) => [n, bytesBlocked(n, at.d)]) },
      ],
    },
    {
      key: "operations", x: "tokens", log: [true, true],
      curves: (at) => [
        { name: "products", chosen: true, points: LENGTHS.map((n) => [n, 2 * operations(n, at.d).scores]) },
        { name: "softmax", chosen: true, points: LENGTHS.map((n) => [n, operations(n, at.d).softmax]) },
      ],
    },
  ],
};
