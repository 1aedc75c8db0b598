"""Softmax's alternatives on dense scores, as the specification: float64, plain PyTorch, differentiable twice.

Definitions: docs/design/0008. A threshold is found by bisection, without a graph; two steps of Newton's iteration from
there put it on the graph with its first and second derivatives, and change nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def weights(s: Tensor, visible: Tensor, normalizer: str, number: float, per_head: Tensor | None) -> Tensor:
    """The weights [B, H, Q, K] of scores ``s``; 0 where hidden, NaN on a row with a visible score that is not finite.

    Args:
        s: [B, H, Q, K], float64, -inf where hidden.
        visible: [B, H, Q, K] bool.
        normalizer: "sigmoid", "sparsemax", "entmax15", "entmax", "topk" or "threshold".
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

    def weights_at(pi: Tensor) -> Tensor:
        below, growth = torch.where(seen, d, 0.0), -e * pi.log()
        t = -e * below * torch.exp(growth.clamp(max=_LARGEST))
        # pi^-e may be no number where the product is one: by logarithms there.
        logs = (e * torch.where(below < 0, -below, 1.0)).log() + growth
        t = torch.where((growth > _LARGEST) & (below < 0), torch.exp(logs.clamp(max=1.0)), t)
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
        slope = torch.where(w > 0, (ratio.log() * (1 - e)).exp(), 0.0).sum(-1, keepdim=True)
        pi = pi - (w.sum(-1, keepdim=True) - 1) / torch.where(slope > 0, slope, 1.0)
        # For its derivatives only: where the slope has no bound (alpha > 2) a step from here may leave the support.
        pi = high + (pi - pi.detach())
    return weights_at(pi)


_LARGEST = 690.0
"""A logarithm whose exponential is a number."""


def statistics(
    s: Tensor, visible: Tensor, w: Tensor, first: Tensor, distance: Tensor, smallest: float
) -> dict[str, Callable[[], Tensor]]:
    """Every row statistic [B, H, Q] (key_mass [B, H, K]) of weights ``w`` renormalised to sum 1.

    ``smallest``: a sum of weights below it is 0 in the precision of the call, and no statistic of weights is defined.
    """
    n = visible.sum(-1)
    bad = (visible & ~torch.isfinite(torch.where(visible, s, 0.0))).any(-1)
    total = w.sum(-1)
    none = ~(total >= smallest)
    p = torch.where(none[..., None], 0.0, w) / torch.where(none, 1.0, total)[..., None]
    finite = torch.where(visible & ~bad[..., None], s, 0.0)
    mean = (p * finite).sum(-1)

    def row(value: Tensor, empty: float = 0.0) -> Tensor:
        return torch.where(bad, math.nan, torch.where(n > 0, value, empty))

    def entropy() -> Tensor:
        return 0.0 - (p * torch.where(p > 0, p, 1.0).log()).sum(-1)

    def plain_variance() -> Tensor:
        """Of the visible scores, every one alike."""
        shift = finite - (finite.sum(-1) / n.clamp(min=1))[..., None]
        return torch.where(visible, shift, 0.0).square().sum(-1) / n.clamp(min=1)

    def sorted_gini() -> Tensor:
        rank = torch.arange(1, p.shape[-1] + 1, device=p.device) - (p.shape[-1] - n)[..., None]
        return (p.sort(-1).values * (2 * rank - n[..., None] - 1)).sum(-1) / n.clamp(min=1)

    def at_maximum(values: Tensor) -> Tensor:
        if s.shape[-1] == 0:
            return total
        return values.gather(-1, torch.where(visible, s, -math.inf).argmax(-1, keepdim=True)).squeeze(-1)

    squares = (p * p).sum(-1)
    return {
        "max_logit": lambda: row(at_maximum(finite), -math.inf),
        "entropy": lambda: row(entropy()),
        "normalized_entropy": lambda: row(torch.where(n > 1, entropy() / torch.where(n > 1, n, 2).double().log(), 0.0)),
        "effective_tokens": lambda: row(torch.where(none, 0.0, 1 / torch.where(none, 1.0, squares))),
        "max_weight": lambda: row(at_maximum(p)),
        "mean_logit": lambda: row(mean),
        "logit_variance": lambda: row((p * (finite - mean[..., None]) ** 2).sum(-1)),
        "visible_keys": lambda: n,
        "mass": lambda: row(torch.where(none, 0.0, total)),
        "first_token_mass": lambda: row((p * first).sum(-1)),
        "support_size": lambda: (p > 0).sum(-1),
        "gini": lambda: row(sorted_gini()),
        "score_variance": lambda: row(plain_variance()),
        "mean_distance": lambda: row((p * distance).sum(-1)),
        "key_mass": lambda: torch.where((n > 0)[..., None] & ~bad[..., None], p, 0.0).sum(-2),
    }


def output(w: Tensor, value: Tensor, dropout_p: float) -> Tensor:
    """``O = dropout(w) V`` [B, H, Q, E] in float64."""
    value = value.double().repeat_interleave(w.shape[1] // max(value.shape[1], 1), dim=1)
    return torch.nn.functional.dropout(w, dropout_p) @ value
