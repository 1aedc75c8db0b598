"""What is measured: the sizes of one attention call and how it is called."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.errors import InputError


@dataclass(frozen=True)
class Shape:
    """Queries [B, H, Q, D], keys and values [B, G, K, D]."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int
    causal: bool = False
    dtype: str = "float32"
    backward: bool = False
    """Whether gradients of query, key and value are computed as well, ours with the entropy's gradient."""

    def __str__(self) -> str:
        plain = (self.batch, self.heads, self.queries, self.size)
        every = (self.batch, self.heads, self.groups, self.queries, self.keys, self.size)
        parts = plain if self.groups == self.heads and self.queries == self.keys else every
        return ",".join(map(str, parts))

    @property
    def mode(self) -> str:
        """In words: forward or forward + backward, full or causal."""
        return f"{'forward + backward' if self.backward else 'forward'}, {'causal' if self.causal else 'full'}"

    @property
    def flops(self) -> int:
        """Of the two products (backward: of its five as well) over visible pairs; a multiply-add is two."""
        pairs = self.queries * self.keys
        if self.causal:
            seen = min(self.queries, self.keys)
            pairs = seen * (seen + 1) // 2 + (self.queries - seen) * self.keys
        return self.batch * self.heads * pairs * self.size * 2 * (7 if self.backward else 2)

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of standard normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        kind = getattr(torch, self.dtype)
        sizes = ((self.heads, self.queries), (self.groups, self.keys), (self.groups, self.keys))
        query, key, value = (
            torch.randn(self.batch, heads, tokens, self.size, generator=generator).to(kind) for heads, tokens in sizes
        )
        return query, key, value


def parsed(text: str, *, causal: bool = False, dtype: str = "float32", backward: bool = False) -> Shape:
    """A shape from ``"B,H,N,D"``, or ``"B,H,G,Q,K,D"`` with G key heads.

    Raises:
        InputError: it is neither, a size is below 1, H is not a multiple of G, or causal with Q above K.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) == 4:
        batch, heads, tokens, size = sizes
        sizes = [batch, heads, heads, tokens, tokens, size]
    if len(sizes) != 6 or min(sizes) < 1 or sizes[1] % sizes[2]:
        raise InputError(
            f"a shape must be B,H,N,D (batch, heads, tokens, head size) or B,H,G,Q,K,D (G key heads, a divisor of H; "
            f"Q queries, K keys), whole numbers above 0; got {text!r}. For example 1,8,2048,64."
        )
    batch, heads, groups, queries, keys, size = sizes
    return Shape(batch, heads, groups, queries, keys, size, causal, dtype, backward)
