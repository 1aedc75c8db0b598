"""Maps from rows of scores to weights, in PyTorch on any device: the support, the threshold, and the gradient.

``weights`` takes [rows, n] scores, -inf where hidden, and gives weights of the same shape and type: 0 for a row that
sees nothing, NaN for a row with a visible NaN or +inf. ``slope`` takes these weights and the gradient above them; its
formulas can be differentiated again. ``backends/native/normalize.py`` has the same two functions in C++.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.backends.normalizers.entmax import entmax
from attemper.backends.normalizers.gradients import by_alpha as by_alpha
from attemper.backends.normalizers.gradients import slope as slope
from attemper.backends.normalizers.gradients import slope_of_alpha as slope_of_alpha
from attemper.backends.normalizers.newton import entmax15, sparsemax
from attemper.backends.normalizers.truncated import threshold, topk

KINDS = ("sparsemax", "entmax15", "entmax", "topk", "threshold")

_BLOCK = 2**18
"""Scores of a block of rows on a CPU: the passes over it stay in cache, and so does what they need besides."""


def weights(scores: Tensor, kind: str, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """The weights of every row.

    Args:
        scores: [rows, n], float32 or float64.
        kind: one of ``KINDS``.
        number: k of "topk", min_weight of "threshold", alpha of "entmax".
        alpha: [rows], alpha of each row instead of ``number``.
    """
    assert kind in KINDS
    rows, n = scores.shape
    if scores.device.type != "cpu" or scores.numel() <= _BLOCK:
        return _weights(scores, kind, number, alpha)
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    step = max(1, _BLOCK // n)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        result[part] = _weights(scores[part], kind, number, None if alpha is None else alpha[part])
    return result


def iterations(scores: Tensor, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """How often "entmax" evaluated the sum of the weights of each row, [rows] int64."""
    below, good = _below(scores)
    return torch.where(good, entmax(below, number if alpha is None else alpha)[1], 0)


def _weights(scores: Tensor, kind: str, number: float, alpha: Tensor | None) -> Tensor:
    if scores.numel() == 0:
        return torch.zeros_like(scores, memory_format=torch.contiguous_format)
    below, good = _below(scores)
    match kind:
        case "sparsemax":
            found = sparsemax(below)
        case "entmax15":
            found = entmax15(below)
        case "topk":
            found = topk(below, scores, int(number))
        case "threshold":
            found = threshold(below, number)
        case _:
            found = entmax(below, number if alpha is None else alpha)[0]
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(good[:, None], found, torch.where(unseen, 0.0, math.nan))


def _below(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores relative to the maximum of their row, and which rows have a finite one; the others are all 0."""
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((scores.shape[0], 1), -math.inf)
    good = top.isfinite()
    return torch.where(good, scores - top, 0.0), good[:, 0]
