"""Softmax on dense scores, written as the specification: float64, one line for each definition.

Slow and n x n in memory on purpose. The tests hold every backend against independent loops and against this.
All of it is plain PyTorch, so gradients and second derivatives come from autograd.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scores(
    query: Tensor, key: Tensor, multiplier: Tensor, bias: Tensor | None, visible: Tensor, softcap: float | None
) -> Tensor:
    """``s = softcap(multiplier * q.k) + bias`` [B, H, Q, K] in float64; -inf where a key is not visible."""
    heads = query.shape[1]
    key = key.double().repeat_interleave(heads // max(key.shape[1], 1), dim=1)
    raw = torch.einsum("bhqd,bhkd->bhqk", query.double(), key)
    return of_products(raw, multiplier, bias, visible, softcap)


def of_products(raw: Tensor, multiplier: Tensor, bias: Tensor | None, visible: Tensor, softcap: float | None) -> Tensor:
    """``scores`` of q.k [B, H, Q, K] in float64."""
    # A key that is not visible may hold NaN or inf: it must not reach a statistic.
    x = torch.where(visible, raw * multiplier.double()[..., None], 0.0)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    if bias is not None:
        x = x + torch.where(visible, bias.double(), 0.0)
    return torch.where(visible, x, -math.inf)


def weights(s: Tensor, visible: Tensor) -> Tensor:
    """``p = softmax(s)`` over the visible keys; a row that sees nothing is all 0."""
    seen = visible.any(-1, keepdim=True)
    s = torch.where(seen, s, 0.0)
    # Neither torch.softmax nor torch.logsumexp: PyTorch does not differentiate their tangents.
    e = torch.exp(s - maximum(s)[..., None])
    return torch.where(visible, e / e.sum(-1, keepdim=True), 0.0)


def maximum(s: Tensor) -> Tensor:
    """The largest score of each row, off the graph; -inf where there are no keys."""
    return s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)


def log_sum(s: Tensor, top: Tensor) -> Tensor:
    """``log sum exp(s - top)`` over the keys, with its gradient along ``s`` alone."""
    return torch.exp(s - top[..., None]).sum(-1).log()


def visible_keys(
    shape: tuple[int, int, int, int],
    mask: Tensor | None,
    left: float,
    right: float,
    positions: Tensor,
    documents: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Which keys a row can see, [B, H, Q, K]: mask and window and document, all at once.

    ``positions`` [Q]: the key on each row's diagonal. ``documents``: the number of the document of each query and
    each key; positions and keys then count within the document.
    """
    _, _, rows, keys = shape
    place = torch.arange(keys, device=positions.device)
    seen = torch.ones((rows, keys), dtype=torch.bool, device=positions.device)
    if documents is not None:
        of_query, of_key = documents
        seen = of_query[:, None] == of_key
        starts = torch.searchsorted(of_key, of_key)
        place = place - starts
    if right < math.inf:
        seen = seen & (place <= positions[:, None] + right)
    if left < math.inf:
        seen = seen & (place >= positions[:, None] - left)
    seen = seen.expand(shape)
    if mask is None:
        return seen
    return seen & (mask if mask.dtype == torch.bool else ~(mask <= torch.finfo(mask.dtype).min / 2))


def share(s: Tensor, visible: Tensor, sink: Tensor | None) -> Tensor:
    """Weight that a sink [H] leaves to the keys, [B, H, Q]; 1 without one, 0 where a row sees nothing."""
    if sink is None:
        return torch.ones(s.shape[:-1], dtype=torch.float64, device=s.device)
    seen = visible.any(-1)
    s = torch.where(seen[..., None], s, 0.0)
    lse = maximum(s) + log_sum(s, maximum(s))
    return torch.where(seen, torch.sigmoid(lse - sink.double()[:, None]), 0.0)
