"""Softmax over a part of the keys: the k largest scores, or the weights of a least size."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def topk(below: Tensor, scores: Tensor, k: int) -> Tensor:
    """``below`` [rows, n]: ``scores`` relative to the maximum of their row, -inf where hidden, one of them 0."""
    return torch.softmax(torch.where(largest(scores, k), below, -math.inf), -1)


def largest(scores: Tensor, k: int) -> Tensor:
    """Whether each of ``scores`` [..., n] is among the k largest of its row; of equal ones, those of lower index.

    To be asked before anything is subtracted: beside a large maximum, two small scores may become one.
    """
    if k >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    border = scores.topk(k, dim=-1, sorted=True).values[..., -1:]
    larger, tied = ~(scores <= border), scores == border  # a NaN stays, and shows
    return larger | (tied & (tied.cumsum(-1) <= k - larger.sum(-1, keepdim=True)))


def threshold(below: Tensor, min_weight: float) -> Tensor:
    """``below`` as for :func:`topk`, with the keys of a softmax weight of at least ``min_weight``."""
    e = below.exp()
    # Of n equal keys each stays at a min_weight of 1/n, whatever the rounding of the sum.
    least = min_weight * (1 - 4 * torch.finfo(e.dtype).eps) * e.sum(-1, keepdim=True)
    kept = (e >= least) | (below == 0)
    return torch.softmax(torch.where(kept, below, -math.inf), -1)
