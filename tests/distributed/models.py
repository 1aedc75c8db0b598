"""Small models that are spread over processes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import attemper


class Attention(nn.Module):
    """Causal attention with grouped queries; of split projections it has the heads of this rank, and names no number.

    ``tapped``: the name of a tap beside it.
    """

    def __init__(self, width: int, heads: int, key_heads: int, *, tapped: str = "") -> None:
        super().__init__()
        self.size, self.tapped = width // heads, tapped
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, key_heads * self.size)
        self.v_proj, self.o_proj = nn.Linear(width, key_heads * self.size), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.tapped:
            attemper.tap(query, key, is_causal=True, enable_gqa=True, name=self.tapped)
        visible = None if mask is None else mask[:, None, None, :]
        mixed = F.scaled_dot_product_attention(query, key, value, visible, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Parallel(nn.Module):
    """Attention over queries, keys and values that are DTensors; torch's CPU kernel has no rule for them."""

    def __init__(self, *, tapped: bool = False) -> None:
        super().__init__()
        self.tapped = tapped

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.tapped:
            attemper.tap(query, key, name="tap")
            return value
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value)
