r"""Weights of whole rows of scores, for the maps that are found on a row: in plain PyTorch, along the last dimension.

``d`` are scores relative to their row's maximum, at most 0, far below 0 (or -inf) where hidden; a row of hidden keys
alone is for the caller. With e = alpha - 1 and pi the largest weight, in [1/n, 1], entmax is::

    w = [pi^e + e d]_+^(1/e)        sum w = 1        (sparsemax: e = 1; entmax15: e = 1/2; softmax: the limit e -> 0)

Sum w grows with pi, and for e <= 1 it is convex (dw/dpi = (w/pi)^(1-e) grows with pi): Newton's iteration from pi = 1
falls to the root and never crosses it. For e > 1 the slope has no bound, and a bracket is halved.

Source: Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models" (entmax); Martins and Astudillo 2016
(sparsemax); the iteration on pi is ours (docs/design/0008).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_STEP = 1e-6
"""Below this alpha counts as 1: the weights differ from softmax's by less than a float32 rounding."""
ITERATIONS = 100
"""More than any row needs: reaching it is a failure, not an answer."""
ENOUGH = 1e-15
"""Relative steps below this are roundings."""


def found(d: Tensor, normalizer: str, number: float, alpha: Tensor | None) -> Tensor:
    """What a map finds on each row, [..., 1]: the largest weight (entmax), the k-th largest d and how many of its ties
    belong to the k (packed by :func:`weights`), log Z of all visible keys (threshold), 0 (sigmoid).

    Args:
        d: [..., n], relative to the row's maximum.
        normalizer: a name of ``ROW_NORMALIZERS``.
        number: k of "topk".
        alpha: of "entmax", broadcastable to [..., 1].
    """
    match normalizer:
        case "sigmoid":
            return d.new_zeros((*d.shape[:-1], 1))
        case "threshold":
            return torch.exp(d).sum(-1, keepdim=True).log()
        case "topk":
            kept = min(max(int(number), 1), max(d.shape[-1], 1))
            return d.topk(kept, dim=-1).values[..., -1:]
        case _:
            return largest_weight(d, steps(normalizer, alpha, d))


def steps(normalizer: str, alpha: Tensor | None, like: Tensor) -> Tensor:
    """e = alpha - 1 of a map of the entmax family, broadcastable to rows."""
    fixed = {"sparsemax": 1.0, "entmax15": 0.5}.get(normalizer)
    if fixed is not None:
        return like.new_full((1,) * like.dim(), fixed)
    assert alpha is not None
    return alpha.to(like.dtype) - 1


def largest_weight(d: Tensor, e: Tensor) -> Tensor:
    """pi of entmax, [..., 1]; in float64, since few numbers decide about whole rows."""
    d, e = d.double(), e.double().expand(*d.shape[:-1], 1)
    pi = torch.ones_like(e)
    low = torch.full_like(e, 1.0 / max(d.shape[-1], 1))
    high = pi
    for _ in range(ITERATIONS):
        w = entmax_weights(d, pi, e)
        excess = w.sum(-1, keepdim=True) - 1
        # dw/dpi = (w / pi)^(1 - e); what is not in the support has none. For e > 1 it has no bound: halves, there.
        slope = torch.where(w > 0, (w / pi).log() * (1 - e).clamp(min=0.0), -torch.inf).exp().sum(-1, keepdim=True)
        low, high = torch.where(excess < 0, pi, low), torch.where(excess < 0, high, pi)
        after = torch.where(e > 1, (low + high) / 2, pi - excess / slope)
        # Newton's steps fall, until they are below a rounding.
        still = torch.where(e > 1, high - low, pi - after) > ENOUGH * pi
        if not still.any():
            return pi
        pi = torch.where(still, after, pi)
    raise AssertionError("entmax: the iteration on the largest weight did not end")


def entmax_weights(d: Tensor, pi: Tensor, e: Tensor) -> Tensor:
    """[pi^e + e d]_+^(1/e) as pi [1 - t]_+^(1/e), t = -e d pi^-e, in the type of ``d``; e = 0: pi exp(d).

    So no digit is lost where e is small, and nothing vanishes where pi^e is no number any more.
    """
    limit = e.abs() < SMALLEST_STEP
    e = torch.where(limit, 1.0, e)
    t = -e * d * torch.exp((-e * pi.log()).clamp(max=_LARGEST[d.dtype]))
    inside = t < 1
    power = torch.exp(torch.log1p(-torch.where(inside, t, 0.0)) / e)
    return pi * torch.where(limit, torch.exp(d), torch.where(inside, power, 0.0))


_LARGEST = {torch.float32: 80.0, torch.float64: 700.0}
"""Logarithms of which the exponential is a number."""


def weights(d: Tensor, x: Tensor, normalizer: str, number: float, per_head: Tensor | None, maximum: Tensor) -> Tensor:
    """The weights of rows, [..., n], from what :func:`found` found.

    Args:
        d: [..., n], relative to the row's maximum.
        x: [..., 1], of ``found``.
        normalizer: a name of ``ROW_NORMALIZERS``.
        number: k of "topk", the smallest weight of "threshold".
        per_head: alpha of "entmax", bias of "sigmoid"; broadcastable to [..., 1].
        maximum: [..., 1], what was subtracted from the scores, finite.
    """
    tiny = torch.finfo(d.dtype).tiny
    match normalizer:
        case "sigmoid":
            assert per_head is not None
            return torch.sigmoid(d + (maximum + per_head.to(d.dtype)))
        case "sparsemax":
            w = (x + d).clamp_(min=0.0)
            return w / w.sum(-1, keepdim=True).clamp(min=tiny)
        case "entmax15":
            w = (x.sqrt() + d / 2).clamp_(min=0.0).square()
            return w / w.sum(-1, keepdim=True).clamp(min=tiny)
        case "threshold":
            # A weight of exactly 1/n of n equal keys stays at min_weight = 1/n: compared as a quotient, not by logs.
            total = x.exp()
            return _over(d, (torch.exp(d) >= number * total * (1 - 4 * torch.finfo(d.dtype).eps)) | (d == 0))
        case "topk":
            above, tied = d > x, d == x
            room = number - above.sum(-1, keepdim=True)
            return _over(d, above | (tied & (tied.cumsum(-1) <= room)))
        case _:
            e = steps(normalizer, per_head, d)
            w = entmax_weights(d, x.to(d.dtype), e)
            return w / w.sum(-1, keepdim=True).clamp(min=tiny)


def _over(d: Tensor, support: Tensor) -> Tensor:
    """Softmax over the support."""
    w = torch.where(support, torch.exp(d), 0.0)
    return w / w.sum(-1, keepdim=True).clamp(min=torch.finfo(d.dtype).tiny)


def score_gradient(w: Tensor, g: Tensor, normalizer: str, per_head: Tensor | None) -> Tensor:
    """The gradient of scores [..., n] from that of weights."""
    match normalizer:
        case "sigmoid":
            return w * (1 - w) * g
        case "threshold" | "topk":
            return w * (g - (w * g).sum(-1, keepdim=True))
        case _:
            r = _slopes(w, steps(normalizer, per_head, w))
            return r * (
                g - (r * g).sum(-1, keepdim=True) / r.sum(-1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
            )


def _slopes(w: Tensor, e: Tensor) -> Tensor:
    """r = w^(1 - e) on the support. For alpha > 2 it grows without limit where w falls to 0: held below overflow."""
    power = (torch.where(w > 0, w, 1.0).log() * (1 - e)).clamp(max=60.0)
    return torch.where(w > 0, power.exp(), 0.0)


def alpha_gradient(w: Tensor, g: Tensor, alpha: Tensor) -> Tensor:
    """The gradient of alpha of each row, [..., 1]: sum g dw/dalpha (docs/design/0008)."""
    e = steps("entmax", alpha, w)
    y = torch.where(w > 0, w, 1.0).log()
    b = y * y * _phi(-e * y)
    total = _slopes(w, e).sum(-1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
    mean = (w * b).sum(-1, keepdim=True)
    entropy = -(w * y).sum(-1, keepdim=True)
    return (g * w / total * (mean - b - e * (y * mean + b * entropy))).sum(-1, keepdim=True)


def _phi(x: Tensor) -> Tensor:
    """(exp(x) - 1 - x) / x^2 for x >= 0."""
    series = torch.full_like(x, 1 / math.factorial(_TERMS + 1))
    for power in range(_TERMS, 1, -1):
        series = series * x + 1 / math.factorial(power)
    safe = torch.where(x < _SMALL, 1.0, x).clamp(max=80.0)
    return torch.where(x < _SMALL, series, (torch.expm1(safe) - safe) / (safe * safe))


_SMALL, _TERMS = 0.5, 14
"""Where the series is taken, and how many terms leave less than a float64 rounding there."""
