"""Top-k and threshold: softmax over a part of the keys, the k largest scores or the weights of a least size.

With the support S of a row, d_j <= 0 the score relative to the row's maximum and e_j = exp(d_j)::

    w_j = e_j / sum_S e    on S, 0 elsewhere        ds_j = w_j (g_j - sum(w g))

    topk         S: the k largest scores; of equal ones at the border, those of lower index
    threshold    S: e_j >= min_weight sum e over all keys that the row sees, and every key at the maximum
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.backends.normalizers.simplex import Normalizer, gradient_by, on_rows


def _topk(scores: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
    """``number``: k."""
    k = int(number)
    return on_rows(scores, lambda below, rows, _: torch.softmax(torch.where(largest(rows, k), below, -math.inf), -1))


def largest(scores: Tensor, k: int) -> Tensor:
    """Whether each of ``scores`` [..., n] is among the k largest of its row; of equal ones, those of lower index.

    To be asked before anything is subtracted: beside a large maximum, two small scores may become one.
    """
    if k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    border = scores.topk(k, dim=-1, sorted=True).values[..., -1:]
    larger, tied = ~(scores <= border), scores == border  # a NaN stays, and shows
    return larger | (tied & (tied.cumsum(-1) <= k - larger.sum(-1, keepdim=True)))


def _threshold(scores: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
    """``number``: min_weight, the smallest weight that is kept."""

    def keep(below: Tensor, rows: Tensor, alpha: Tensor | None) -> Tensor:
        e = below.exp()
        # Of n equal keys each stays at a min_weight of 1/n, whatever the rounding of the sum.
        least = number * (1 - 4 * torch.finfo(e.dtype).eps) * e.sum(-1, keepdim=True)
        return torch.softmax(torch.where((e >= least) | (below == 0), below, -math.inf), -1)

    return on_rows(scores, keep)


_GRADIENT = gradient_by(lambda weights: weights)
TOPK = Normalizer(_topk, _GRADIENT, module="TopK(k)")
THRESHOLD = Normalizer(_threshold, _GRADIENT, module="Threshold(min_weight)")
