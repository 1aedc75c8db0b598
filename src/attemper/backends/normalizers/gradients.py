r"""Gradients of the maps, from their weights alone. Plain PyTorch: they can be differentiated again.

With r_j = w_j^(2 - alpha) on the support (1 for sparsemax, w for a softmax over a part of the keys)::

    dz_j = r_j (g_j - sum(r g) / sum r)

For alpha, with a = alpha - 1, rt = r / sum r, l_j = log w_j and h_j = -w_j l_j::

    dw_j / dalpha = (w_j - rt_j) / a^2 + (h_j - rt_j sum h) / a  =  rt_j sum_k c_k - c_j
    c_j = (w_j^(1-a) - w_j (1 - a l_j)) / a^2 = w_j l_j^2 psi(-a l_j)     psi(x) = (e^x - 1 - x) / x^2

The first form divides digits that have cancelled by a^2; in the second every term is positive, down to a = 0, where
psi is 1/2. Above a = 1 it could overflow, and the first has nothing left to cancel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SERIES = tuple(1 / math.factorial(k + 2) for k in range(14))
"""psi(x) = sum x^k / (k + 2)!: for x below 0.5 exact in float64."""

_NEAR = 0.5


def slope(weights: Tensor, grad: Tensor, kind: str, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """Gradient of the scores, [..., n].

    Above alpha = 2, r grows without limit where a weight falls to 0. It is held at the root of the largest number; the
    key that has the largest gives what the others take, so that no digit cancels.

    Args:
        weights: [..., n], what the map gave.
        grad: [..., n], the gradient of the weights.
        kind: as for the map.
        number: alpha of "entmax".
        alpha: [...], alpha of each row instead of ``number``.
    """
    support = ~(weights == 0)  # a NaN stays, and shows
    w = torch.where(support, weights, 1.0)
    if kind == "entmax":
        power = 2 - number if alpha is None else (2 - alpha.to(w.dtype))[..., None]
        return _of_entmax(power * w.log(), grad, support)
    g = _relative(weights, grad, support)
    r = torch.ones_like(w) if kind == "sparsemax" else w.sqrt() if kind == "entmax15" else w
    r = torch.where(support, r, 0.0)
    total = r.sum(-1, keepdim=True)
    return r * (g - (r * g).sum(-1, keepdim=True) / torch.where(total == 0, 1.0, total))


def _of_entmax(log_r: Tensor, grad: Tensor, support: Tensor) -> Tensor:
    """r (g - sum(r g) / sum r) from log r: that of the largest r is minus the sum of the others."""
    if log_r.shape[-1] == 0:
        return grad
    ranks = torch.where(support, log_r, -math.inf)
    largest = torch.zeros_like(support).scatter(-1, ranks.detach().argmax(-1, keepdim=True), True)
    g = _relative(ranks, grad, support)
    mean = (_shares(log_r, support) * g).sum(-1, keepdim=True)
    r = log_r.clamp(max=math.log(torch.finfo(log_r.dtype).max) / 2).exp()
    others = torch.where(support & ~largest, r * (g - mean), 0.0)
    return torch.where(support & largest, -others.sum(-1, keepdim=True), others)


def slope_of_alpha(weights: Tensor, grad: Tensor, alpha: Tensor) -> Tensor:
    """Gradient of alpha, [...]."""
    if weights.shape[-1] == 0:
        return torch.zeros_like(alpha)
    moved, support = _by_alpha(weights, alpha)
    return (moved * _relative(weights, grad, support)).sum(-1).to(alpha.dtype)


def by_alpha(weights: Tensor, alpha: Tensor) -> Tensor:
    """dw_j / dalpha, [..., n]."""
    return _by_alpha(weights, alpha)[0] if weights.shape[-1] else weights


def _by_alpha(weights: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """dw_j / dalpha, and where a key has weight."""
    support = ~(weights == 0)
    w = torch.where(support, weights, 1.0)
    log_w = w.log()
    a = (alpha.to(w.dtype) - 1)[..., None]
    share = _shares((1 - a) * log_w, support)
    small = a <= 1
    c = torch.where(support & small, _curvature(w, log_w, torch.where(small, a, 1.0)), 0.0)
    near = share * c.sum(-1, keepdim=True) - c
    wide = torch.where(small, 2.0, a)
    h = torch.where(support, -w * log_w, 0.0)
    far = (torch.where(support, w, 0.0) - share) / wide**2 + (h - share * h.sum(-1, keepdim=True)) / wide
    return torch.where(small, near, far), support


def _curvature(w: Tensor, log_w: Tensor, a: Tensor) -> Tensor:
    """c_j for 0 <= a <= 1."""
    x = -a * log_w
    close = x < _NEAR
    series = torch.zeros_like(x)
    for coefficient in reversed(_SERIES):
        series = series * torch.where(close, x, 0.0) + coefficient
    divisor = torch.where(close, 1.0, a)
    return torch.where(close, w * log_w**2 * series, (w.pow(1 - a) - w * (1 + x)) / divisor**2)


def _shares(logarithm: Tensor, support: Tensor) -> Tensor:
    """exp(logarithm) over the support, of sum 1; 0 where the support is empty."""
    if logarithm.shape[-1] == 0:
        return logarithm
    hidden = torch.where(support, logarithm, -math.inf)
    top = hidden.detach().amax(-1, keepdim=True)
    e = torch.where(support, torch.exp(logarithm - torch.where(top == -math.inf, 0.0, top)), 0.0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1.0, total)


def _relative(ranks: Tensor, grad: Tensor, support: Tensor) -> Tensor:
    """The gradient relative to that of the key of the highest rank, 0 outside the support.

    Constants cancel; without this one, the gradient of a key that has nearly all of the row's r would be a difference
    of rounded ones.
    """
    if ranks.shape[-1] == 0:
        return grad
    top = grad.gather(-1, ranks.detach().argmax(-1, keepdim=True))
    return torch.where(support, grad - top, 0.0)
