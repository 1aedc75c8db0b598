"""The normalizers, row by row from their definitions: by sorting and bisection, in numpy's longdouble.

A row is a one-dimensional array of finite visible scores. No code of attemper, and none of its ways: sparsemax and
entmax15 sort, entmax halves an interval for the threshold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

FLOAT = np.longdouble
Array = np.ndarray
Row = Callable[[Array], Array]


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max())
    return e / e.sum()


def sparsemax(z: Array) -> Array:
    """Held, Wolfe and Crowder: the largest k for which the k-th largest score is above the threshold of the first k."""
    ordered = np.sort(z)[::-1]
    k = np.arange(1, len(z) + 1)
    tau = (np.cumsum(ordered) - 1) / k
    return np.maximum(z - tau[ordered > tau][-1], 0)


def entmax15(z: Array) -> Array:
    """The threshold of the first k sorted scores solves k t^2 - 2 t sum + sum of squares = 1."""
    half = (z - z.max()) / 2
    ordered = np.sort(half)[::-1]
    k = np.arange(1, len(z) + 1)
    mean, spread = np.cumsum(ordered) / k, np.cumsum(ordered**2)
    root = np.maximum((1 - (spread - k * mean**2)) / k, 0)
    tau = mean - np.sqrt(root)
    support = int((tau <= ordered).sum())
    return np.maximum(half - tau[support - 1], 0) ** 2


def entmax(alpha: float) -> Row:
    a = FLOAT(alpha) - 1
    if a == 0:
        return softmax

    def weights(z: Array) -> Array:
        d = z - z.max()
        low, high = FLOAT(1) / len(z), FLOAT(1)
        for _ in range(140):
            largest = (low + high) / 2
            low, high = (largest, high) if _powers(d, largest, a).sum() < 1 else (low, largest)
        p = _powers(d, high, a)
        return p / p.sum()

    return weights


def _powers(d: Array, largest: FLOAT, a: FLOAT) -> Array:
    inside = a * d / largest**a
    with np.errstate(divide="ignore"):
        return largest * np.exp(np.log1p(np.maximum(inside, -1)) / a)


def topk(k: int) -> Row:
    def weights(z: Array) -> Array:
        kept = np.argsort(-z, kind="stable")[:k]
        w = np.zeros_like(z)
        w[kept] = softmax(z[kept])
        return w

    return weights


def threshold(least: float) -> Row:
    def weights(z: Array) -> Array:
        p = softmax(z)
        kept = (p >= least) | (p == p.max())
        return np.where(kept, p, 0) / p[kept].sum()

    return weights


def sigmoid(bias: float) -> Row:
    return lambda z: 1 / (1 + np.exp(-(z + FLOAT(bias))))


def with_sink(sink: float) -> Row:
    return lambda z: softmax(np.append(z, FLOAT(sink)))[:-1]


def scalable(s: float) -> Row:
    return lambda z: softmax(FLOAT(s) * np.log(FLOAT(len(z))) * z)


def rows(row: Row, scores: torch.Tensor) -> torch.Tensor:
    """The weights of every row of ``scores`` [..., n], -inf hidden, as float64."""
    numbers = scores.double().numpy().astype(FLOAT)
    result = np.zeros_like(numbers)
    for place in np.ndindex(numbers.shape[:-1]):
        seen = numbers[place] != -np.inf
        if seen.any():
            result[place][seen] = row(numbers[place][seen])
    return torch.from_numpy(result.astype(np.float64))
