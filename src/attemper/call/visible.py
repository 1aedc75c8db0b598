"""How many keys each query sees, from the masks alone."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.backends.contract import UNBOUNDED, Problem


def visible_keys(query: Tensor, keys: int, mask: Tensor | None, causal: bool, offset: int = 0) -> Tensor:
    """[B or 1, H or 1, Q] int64, of attention with this mask (bool: True = visible; floating: added) and causality.

    Args:
        query: [B, H, Q, D].
        keys: K.
        mask: broadcastable to [B, H, Q, K], four dimensions, or None.
        causal: keys up to the query's own place.
        offset: the place of the first query among the keys.
    """
    places = torch.arange(query.shape[2], device=query.device) + offset
    if mask is None and not causal:
        return torch.full((1, 1, query.shape[2]), keys, device=query.device)
    return visible_between(mask, keys, None, (places + 1).clamp(0, keys)[None] if causal else None)


def structured_visible_keys(problem: Problem) -> Tensor:
    """``visible_keys`` under windows, either alignment and packed documents."""
    queries, keys, device = problem.query.shape[2], problem.key.shape[2], problem.query.device
    mask = problem.mask
    places = torch.arange(queries, device=device)
    length: int | Tensor = keys
    if problem.cu_seqlens_q is not None and problem.cu_seqlens_k is not None:
        starts_q, starts_k = (starts.to(device, torch.int64) for starts in (problem.cu_seqlens_q, problem.cu_seqlens_k))
        document = torch.searchsorted(starts_q, places, right=True) - 1
        length = starts_k.diff()[document]
        places = places - starts_q[document]
        if problem.bottom_right:
            places = places + (starts_k.diff() - starts_q.diff())[document]
    else:
        places = places + problem.offset
    if problem.left >= UNBOUNDED and problem.right >= UNBOUNDED and not problem.packed:
        if mask is None:
            return torch.full((1, 1, queries), keys, device=device)
        return visible_between(mask, keys, None, None)
    end = torch.as_tensor(length, device=device).expand(queries)
    zero = torch.zeros_like(end)
    low = (places - problem.left).clamp(zero, end) if problem.left < UNBOUNDED else zero
    high = (places + problem.right + 1).clamp(zero, end) if problem.right < UNBOUNDED else end
    low = low.expand(queries)[None]
    return visible_between(mask, keys, low, torch.maximum(low, high))


def visible_between(mask: Tensor | None, keys: int, low: Tensor | None, high: Tensor | None) -> Tensor:
    """[B, H, Q], each dimension full or 1: keys that a mask shows from ``low`` up to before ``high``, [B|1, Q]; None
    for the first and the last. Without a mask all of them; there is a ``high`` then.
    """
    if mask is None:
        assert high is not None
        return (high if low is None else high - low)[:, None]
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask.expand(*mask.shape[:3], keys)
    if high is None:
        return torch.cat([_visible(part).sum(-1) for part in mask.split(_ROWS, 2)], 2)
    if mask.shape[2] == 1:
        counts = torch.nn.functional.pad(_visible(mask)[:, :, 0].cumsum(-1), (1, 0))
        counts = counts.expand(max(len(counts), len(high)), *counts.shape[1:])
        ends = (
            end[:, None].expand(*counts.shape[:2], end.shape[1]) for end in ((high,) if low is None else (high, low))
        )
        last, *first = (counts.gather(2, end) for end in ends)
        return last - first[0] if first else last
    # Row by row there is no n x n tensor of counts, only blocks of marks.
    places = torch.arange(keys, device=mask.device)
    found = []
    for start in range(0, max(mask.shape[2], 1), _ROWS):
        rows = slice(start, start + _ROWS)
        band = places < high[:, None, rows, None]
        if low is not None:
            band &= places >= low[:, None, rows, None]
        found.append((_visible(mask[:, :, rows]) & band).sum(-1))
    return torch.cat(found, 2)


_ROWS = 256
"""Rows of a block."""


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
