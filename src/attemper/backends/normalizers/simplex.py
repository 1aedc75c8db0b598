r"""The record of every normalizer (``Normalizer``), and what those share whose weights sum to 1.

These share hidden keys, empty rows, and the gradient of the scores. With r_j = w_j^(2 - alpha) on the support
(1 for sparsemax, w for a softmax over a part of the keys)::

    ds_j = r_j (g_j - sum(r g) / sum r)

Plain PyTorch, from the weights alone: a gradient can be differentiated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 2**18
"""Scores of a block of rows on a CPU: the passes over it stay in cache, and so does what they need besides."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What a normalizer takes besides scores."""

    parameter: str | None = None
    """Its parameter per head, as messages call it; None for none."""
    default: float | None = None
    """The parameter where the name alone is given."""
    module: str | None = None
    """The object of ``attemper.nn`` that says more than the name; None if there is no more to say."""
    mergeable: bool = False
    """Whether results over two parts of the keys determine that over all."""

    @property
    def by_name(self) -> bool:
        """Whether the name alone says enough."""
        return self.module is None or self.default is not None


@dataclass(frozen=True)
class Normalizer(Signature):
    """One way from the scores of a row to its weights."""

    weights: Callable[[Tensor, float, Tensor | None], Tensor]
    """(scores [rows, n] with -inf where hidden, number, per_head [rows]) to weights [rows, n]: 0 for a row that sees
    nothing, NaN for one with a visible score that is not finite.
    """
    gradient: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    """(weights [..., n], their gradient [..., n], number, per_head [...]) to the gradient of the scores [..., n]."""
    per_head_gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """(weights, their gradient, that of the scores, per_head) to the gradient of per_head, [...]."""
    wide: Callable[[Tensor, Tensor | None], bool] | None = None
    """(weights, per_head): whether terms of the gradient may be far larger than their sum, which then needs float64."""


def on_rows(
    scores: Tensor, found: Callable[[Tensor, Tensor, Tensor | None], Tensor], alpha: Tensor | None = None
) -> Tensor:
    """The weights of every row, block of rows by block of rows on a CPU.

    ``found``: the weights of rows with a finite maximum, from scores relative to it, the scores, and their alpha.
    """
    rows, n = scores.shape
    if scores.device.type != "cpu" or scores.numel() <= _BLOCK:
        return _on_block(scores, found, alpha)
    result = torch.empty_like(scores, memory_format=torch.contiguous_format)
    step = max(1, _BLOCK // n)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        result[part] = _on_block(scores[part], found, None if alpha is None else alpha[part])
    return result


def _on_block(scores: Tensor, found: Callable[[Tensor, Tensor, Tensor | None], Tensor], alpha: Tensor | None) -> Tensor:
    if scores.numel() == 0:
        return torch.zeros_like(scores, memory_format=torch.contiguous_format)
    below, good = below_maximum(scores)
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    return torch.where(good[:, None], found(below, scores, alpha), torch.where(unseen, 0.0, math.nan))


def below_maximum(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores relative to the maximum of their row, and which rows have a finite one; the others are all 0."""
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((scores.shape[0], 1), -math.inf)
    good = top.isfinite()
    return torch.where(good, scores - top, 0.0), good[:, 0]


def gradient_by(r: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, float, Tensor | None], Tensor]:
    """The gradient of the scores, for a normalizer whose r follows from its weights on the support."""

    def gradient(weights: Tensor, grad: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
        support = ~(weights == 0)  # a NaN stays, and shows
        g = relative(weights, grad, support)
        own = torch.where(support, r(torch.where(support, weights, 1.0)), 0.0)
        total = own.sum(-1, keepdim=True)
        return own * (g - (own * g).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total))

    return gradient


def shares(logarithm: Tensor, support: Tensor) -> Tensor:
    """exp(logarithm) over the support, of sum 1; 0 where the support is empty."""
    if logarithm.shape[-1] == 0:
        return logarithm
    hidden = torch.where(support, logarithm, -math.inf)
    top = hidden.detach().amax(-1, keepdim=True)
    e = torch.where(support, torch.exp(logarithm - torch.where(top == -math.inf, 0.0, top)), 0.0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1.0, total)


def relative(ranks: Tensor, grad: Tensor, support: Tensor) -> Tensor:
    """The gradient relative to that of the key of the highest rank, 0 outside the support.

    Constants cancel; without this one, the gradient of a key that has nearly all of the row's r would be a difference
    of rounded ones.
    """
    if ranks.shape[-1] == 0:
        return grad
    top = grad.gather(-1, ranks.detach().argmax(-1, keepdim=True))
    return torch.where(support, grad - top, 0.0)
