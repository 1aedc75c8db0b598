"""How many keys each query sees, from the masks alone."""

from __future__ import annotations

import torch
from torch import Tensor


def visible_keys(query: Tensor, keys: int, mask: Tensor | None, causal: bool, offset: int = 0) -> Tensor:
    """[B or 1, H or 1, Q] int64, of attention with this mask (bool: True = visible; floating: added) and causality.

    Args:
        query: [B, H, Q, D].
        keys: K.
        mask: broadcastable to [B, H, Q, K], four dimensions, or None.
        causal: keys up to the query's own place.
        offset: the place of the first query among the keys.
    """
    queries = query.shape[2]
    upto = (torch.arange(1, queries + 1, device=query.device) + offset).clamp(0, keys) if causal else None
    if mask is None:
        return (torch.full((queries,), keys, device=query.device) if upto is None else upto)[None, None]
    mask = mask[(None,) * (4 - mask.dim())]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    seen = seen.expand(*seen.shape[:3], keys)
    if upto is None:
        return seen.sum(-1)
    counts = torch.nn.functional.pad(seen.cumsum(-1), (1, 0))
    if counts.shape[2] == 1:
        return counts[:, :, 0, upto]
    return counts.gather(-1, upto[:, None].expand(*counts.shape[:3], 1))[..., 0]
