// The formulas of the lab's Python functions, in float64 as there. Rows are arrays of numbers.

const sum = (row) => row.reduce((total, value) => total + value, 0);
const mean = (row) => sum(row) / row.length;
const largest = (row) => row.reduce((a, b) => Math.max(a, b), -Infinity);

function median(row) {
  const ordered = [...row].sort((a, b) => a - b);
  return ordered[Math.floor((ordered.length - 1) / 2)]; // the lower of two in the middle, as torch's
}

// softmax(scores / T), relative to the largest score: no exponential overflows.
function softmax(scores, T = 1) {
  const top = largest(scores);
  const powers = scores.map((score) => Math.exp((score - top) / T));
  const total = sum(powers);
  return powers.map((power) => power / total);
}

// Nats, in one pass from the scores: log Z - sum p z. No logarithm of a weight that is 0.
function entropy(scores, T = 1) {
  const top = largest(scores);
  const logits = scores.map((score) => (score - top) / T);
  const powers = logits.map(Math.exp);
  const total = sum(powers);
  return Math.log(total) - sum(powers.map((power, i) => power * logits[i])) / total;
}

const entropyOf = (weights) => -sum(weights.map((p) => (p > 0 ? p * Math.log(p) : 0)));
const effectiveTokens = (weights) => 1 / sum(weights.map((p) => p * p));

function gini(weights) {
  const n = weights.length;
  return sum([...weights].sort((a, b) => a - b).map((p, i) => p * (2 * (i + 1) - n - 1))) / n;
}

// dH/dT of softmax(y / T + b): Cov_p(s, x) / T with x = y / T and s = x + b.
function entropySlope(scores, T, bias = null) {
  const x = scores.map((score) => score / T);
  const s = bias ? x.map((value, i) => value + bias[i]) : x;
  const p = softmax(s);
  const [centreS, centreX] = [s, x].map((row) => sum(row.map((value, i) => p[i] * value)));
  return sum(p.map((weight, i) => weight * (s[i] - centreS) * (x[i] - centreX))) / T;
}

// Norm of J = diag(p) - p p^T, entry by entry, with 1 - p as the sum of the others: it keeps its digits near one-hot.
function frobenius(p) {
  let total = 0;
  for (let i = 0; i < p.length; i++) {
    let others = 0;
    for (let j = 0; j < p.length; j++) if (j !== i) others += p[j];
    total += (p[i] * others) ** 2;
    for (let j = 0; j < p.length; j++) if (j !== i) total += (p[i] * p[j]) ** 2;
  }
  return Math.sqrt(total);
}

// Largest eigenvalue of J, its spectral norm: the root of sum p / (p - x) between the two largest weights, where the sum
// only rises. Halved on a logarithmic scale, for weights that are nearly 0.
function spectral(p) {
  const [first, second] = [...p].sort((a, b) => b - a);
  if (second === 0 || first === second) return second === 0 ? 0 : first;
  let [low, high] = [second, first];
  for (let turn = 0; turn < 100; turn++) {
    const middle = Math.sqrt(low) * Math.sqrt(high);
    if (middle <= low || middle >= high) break;
    if (sum(p.map((weight) => weight / (weight - middle))) < 0) low = middle;
    else high = middle;
  }
  return high;
}

// Gradient of the larger of two weights to its score: p (1 - p), exact and as torch.softmax rounds it in float32.
function gapGradient(gap) {
  const small = Math.exp(-gap) / (1 + Math.exp(-gap));
  return small * (1 - small);
}

function gapGradientFloat32(gap) {
  const power = Math.fround(Math.exp(-gap));
  const weight = Math.fround(1 / Math.fround(1 + power));
  return Math.fround(weight * Math.fround(1 - weight));
}
