"""Softmax's alternatives by loops over rows, from the definitions of docs/design/0008, with no code of attemper.

Numbers are numpy's ``longdouble``; a row is what is visible of it. Sparsemax and entmax15 sort,
entmax halves an interval.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tests.support.oracle import FLOAT, Array, Inputs, row_statistics

Weights = Callable[[Array], Array]
"""Scores [n] of the keys a row sees -> weights [n]."""


def softmax(s: Array) -> Array:
    e = np.exp(s - s.max())
    return e / e.sum()


def sparsemax(s: Array) -> Array:
    """Projection on the simplex, by sorting."""
    z = np.sort(s - s.max())[::-1]
    support = np.arange(1, len(z) + 1)
    size = support[1 + support * z > np.cumsum(z)].max()
    tau = (z[:size].sum() - 1) / size
    return np.maximum(s - s.max() - tau, 0)


def entmax15(s: Array) -> Array:
    """The threshold of the first k sorted scores solves k t^2 - 2 t sum + sum of squares = 1."""
    half = (s - s.max()) / 2
    ordered = np.sort(half)[::-1]
    k = np.arange(1, len(s) + 1)
    mean, spread = np.cumsum(ordered) / k, np.cumsum(ordered**2)
    root = np.maximum((1 - (spread - k * mean**2)) / k, 0)
    tau = mean - np.sqrt(root)
    return np.maximum(half - tau[int((tau <= ordered).sum()) - 1], 0) ** 2


def entmax(alpha: float) -> Weights:
    """[(alpha-1) s - tau]_+^(1/(alpha-1)), by bisection on the largest weight; alpha = 1 is softmax."""

    def weights(s: Array) -> Array:
        d = s - s.max()
        if alpha == 1:
            return softmax(s)
        e = FLOAT(alpha) - 1

        def at(largest: FLOAT) -> Array:
            # largest^e + e d, less 1: from -1 down the weight is 0
            base = np.expm1(e * np.log(largest)) + e * d
            return np.exp(np.log1p(np.maximum(base, -1)) / e)

        low, high = FLOAT(1) / (2 * len(s)), FLOAT(1)
        with np.errstate(divide="ignore"):
            while low < (middle := (low + high) / 2) < high:  # until no number is between
                low, high = (low, middle) if at(middle).sum() >= 1 else (middle, high)
            return at(high)

    return weights


def topk(k: int) -> Weights:
    """Softmax over the k largest; among equals the first."""

    def weights(s: Array) -> Array:
        kept, found = np.argsort(-s, kind="stable")[:k], np.zeros_like(s)
        found[kept] = softmax(s[kept])
        return found

    return weights


def threshold(least: float) -> Weights:
    """Softmax over the keys of at least this weight, and those at the maximum."""

    def weights(s: Array) -> Array:
        p = softmax(s)
        inside = (p >= least) | (s == s.max())
        return p * inside / p[inside].sum()

    return weights


def sigmoid(bias: float) -> Weights:
    return lambda s: 1 / (1 + np.exp(-(s + FLOAT(bias))))


def with_sink(sink: float) -> Weights:
    return lambda s: softmax(np.append(s, FLOAT(sink)))[:-1]


def scalable(factor: float) -> Weights:
    return lambda s: softmax(FLOAT(factor) * np.log(FLOAT(len(s))) * s)


def rows(weights: Weights, scores: torch.Tensor) -> torch.Tensor:
    """The weights of every row of ``scores`` [..., n], -inf hidden, as float64."""
    numbers = scores.double().numpy().astype(FLOAT)
    result = np.zeros_like(numbers)
    for place in np.ndindex(numbers.shape[:-1]):
        seen = numbers[place] != -np.inf
        if seen.any():
            result[place][seen] = weights(numbers[place][seen])
    return torch.from_numpy(result.astype(np.float64))


@dataclass
class Results:
    output: Array
    statistics: dict[str, Array]
    terms: float
    """The largest sum of magnitudes behind a score: what its rounding is relative to."""


NAMES = (
    "entropy", "normalized_entropy", "effective_tokens", "max_weight", "max_logit", "mean_logit", "logit_variance",
    "visible_keys", "mass", "first_token_mass", "support_size", "mean_distance", "gini",
    "score_variance", "self_weight", "span_mass",
)  # fmt: skip


def forward(call: Inputs, weights: list[Weights]) -> Results:
    """Output [B, H, Q, E], statistics [B, H, Q] and key_mass [B, H, K]; ``weights``: one per head."""
    batch, heads, rows = call.query.shape[:3]
    assert call.value is not None
    output = np.zeros((batch, heads, rows, call.value.shape[3]), FLOAT)
    found = {name: np.zeros((batch, heads, rows), FLOAT) for name in NAMES}
    key_mass, terms = np.zeros((batch, heads, call.key.shape[2]), FLOAT), 0.0
    for b, h, i in np.ndindex(batch, heads, rows):
        row = call.row(b, h, i)
        if row.n:
            terms = max(terms, float(row.terms.max()), float(np.abs(row.scores).max()))
            w = weights[h](row.scores)
            vars(row).update(share=w.sum(), p=w / w.sum())  # in the place of softmax's
            key_mass[b, h, row.places] += row.p
            output[b, h, i] = w @ call.values(b, h, row)
        values = row_statistics(row)
        if row.n:
            values["support_size"] = FLOAT((row.p > np.finfo(np.float64).tiny).sum())
        for name in NAMES:
            found[name][b, h, i] = values[name]
    return Results(output, found | {"key_mass": key_mass}, terms)
