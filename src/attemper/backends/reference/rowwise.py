"""Softmax's alternatives on dense scores, as the specification: float64, plain PyTorch, differentiable twice.

Definitions: docs/design/0008. A threshold is found by bisection, without a graph; two steps of Newton's iteration from
there put it on the graph with its first and second derivatives, and change nothing else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def weights(s: Tensor, visible: Tensor, normalizer: str, number: float, per_head: Tensor | None) -> Tensor:
    """The weights [B, H, Q, K] of scores ``s``; 0 where hidden, NaN on a row with a visible score that is not finite.

    Args:
        s: float64, -inf where hidden.
        number: k, or the smallest weight.
        per_head: [H], bias of "sigmoid" or alpha of "entmax".
    """
    if s.shape[-1] == 0:
        return torch.zeros_like(s)
    bad = (visible & ~torch.isfinite(s)).any(-1, keepdim=True)
    seen = visible & ~bad
    per_head = None if per_head is None else per_head.double()[:, None, None]
    finite = torch.where(seen, s, 0.0)
    if normalizer == "sigmoid":
        assert per_head is not None
        w = torch.where(seen, torch.sigmoid(finite + per_head), 0.0)
    else:
        d = finite - torch.where(seen, finite, -math.inf).amax(-1, keepdim=True).clamp(min=-1e308).detach()
        w = _on_simplex(d, seen, normalizer, number, per_head)
    return torch.where(bad & visible, math.nan, w)


def _on_simplex(d: Tensor, seen: Tensor, normalizer: str, number: float, alpha: Tensor | None) -> Tensor:
    if normalizer == "topk":
        order = torch.sort(torch.where(seen, d, -math.inf), dim=-1, descending=True, stable=True).indices
        rank = order.argsort(-1)
        return _softmax(d, seen & (rank < number))
    if normalizer == "threshold":
        p = _softmax(d, seen).detach()
        return _softmax(d, seen & ((p >= number * (1 - 1e-12)) | (d == 0)))
    fixed = {"sparsemax": 2.0, "entmax15": 1.5}.get(normalizer)
    alpha = d.new_full((1, 1, 1), fixed) if fixed else alpha
    assert alpha is not None
    softmax = alpha == 1
    e = torch.where(softmax, 1.0, alpha - 1)
    return torch.where(softmax, _near_softmax(d, seen, alpha), _entmax(d, seen, e))


def _softmax(d: Tensor, support: Tensor) -> Tensor:
    e = torch.where(support, torch.exp(torch.where(support, d, 0.0)), 0.0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total > 0, total, 1.0)


def _near_softmax(d: Tensor, seen: Tensor, alpha: Tensor) -> Tensor:
    """Softmax, with what it moves by as alpha leaves 1: dp/dalpha = p (sum p y^2 - y^2) / 2, y = log p."""
    p = _softmax(d, seen)
    y = torch.where(p > 0, p, 1.0).log()
    return p * (1 + (alpha - 1) * ((p * y * y).sum(-1, keepdim=True) - y * y) / 2)


def _entmax(d: Tensor, seen: Tensor, e: Tensor) -> Tensor:
    """[pi^e + e d]_+^(1/e) with sum 1 over the keys that are seen, pi the largest weight: pi [1 - t]_+^(1/e)."""

    # What does not depend on pi, once for all steps. Where pi^-e is no number and the product is one: by logarithms.
    below = torch.where(seen, d, 0.0)
    lower, steep = below < 0, -e * below
    logs = (e * torch.where(lower, -below, 1.0)).log()

    def weights_at(pi: Tensor) -> Tensor:
        growth = -e * pi.log()
        t = steep * torch.exp(growth.clamp(max=_LARGEST))
        t = torch.where((growth > _LARGEST) & lower, torch.exp((logs + growth).clamp(max=1.0)), t)
        inside = seen & (t < 1)
        return torch.where(inside, pi * torch.exp(torch.log1p(-torch.where(inside, t, 0.0)) / e), 0.0)

    low = 1.0 / seen.sum(-1, keepdim=True).clamp(min=1).double()
    with torch.no_grad():
        low, high = (1 - 1e-9) * low, torch.ones_like(low)
        for _ in range(60):
            middle = (low + high) / 2
            enough = weights_at(middle).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    pi = high
    for _ in range(2):
        w = weights_at(pi)
        # dw/dpi = (w / pi)^(1 - e) on the support
        ratio = torch.where(w > 0, w / pi, 1.0)
        derivative = torch.where(w > 0, (ratio.log() * (1 - e)).exp(), 0.0).sum(-1, keepdim=True)
        pi = pi - (w.sum(-1, keepdim=True) - 1) / torch.where(derivative > 0, derivative, 1.0)
        # For its derivatives only: where this one has no bound (alpha > 2) a step from here may leave the support.
        pi = high + (pi - pi.detach())
    return weights_at(pi)


_LARGEST = 690.0
"""A logarithm whose exponential is a number."""
