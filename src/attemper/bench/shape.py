"""The shape of an attention call that is timed: sizes, type, which keys a query sees, whether gradients are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attemper.errors import InputError

Tensors = tuple[Tensor, Tensor, Tensor]
"""Query, key and value."""


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
    window: int = 0
    """How many keys a causal query sees at most, its own the last; 0: all before it. PyTorch takes that as a mask."""

    def __str__(self) -> str:
        plain = (self.batch, self.heads, self.queries, self.size)
        every = (self.batch, self.heads, self.groups, self.queries, self.keys, self.size)
        return ",".join(map(str, plain if not self.grouped and self.queries == self.keys else every))

    @property
    def mode(self) -> str:
        """In words: forward or forward + backward, full, causal or a window."""
        seen = f"window of {self.window}" if self.window else "causal" if self.causal else "full"
        return f"{'forward + backward' if self.backward else 'forward'}, {seen}"

    @property
    def grouped(self) -> bool:
        """Whether query heads share key heads."""
        return self.groups != self.heads

    @property
    def options(self) -> dict[str, Any]:
        """Arguments that our attention and PyTorch's share, windows apart."""
        return {"is_causal": self.causal, "enable_gqa": self.grouped}

    def visible(self, queries: Tensor) -> Tensor:
        """[Q, K] bool: the keys that these queries see, by their numbers."""
        keys, queries = torch.arange(self.keys), queries[:, None]
        if not self.causal:
            return (keys >= 0).expand(len(queries), -1)
        return (keys <= queries) & (keys > queries - (self.window or self.keys))

    @property
    def flops(self) -> int:
        """Operations of the two products (backward: of its five as well) over visible pairs; a multiply-add is two."""
        pairs = self.queries * self.keys
        if self.causal:
            query = torch.arange(self.queries)
            first = (query - (self.window or self.queries) + 1).clamp(min=0)
            pairs = int((query.clamp(max=self.keys - 1) - first + 1).clamp(min=0).sum())
        return self.batch * self.heads * pairs * self.size * 2 * (7 if self.backward else 2)

    def tensors(self) -> Tensors:
        """Query, key and value of standard normal numbers."""
        generator, dtype = torch.Generator().manual_seed(0), getattr(torch, self.dtype)

        def normal(heads: int, tokens: int) -> Tensor:
            return torch.randn(self.batch, heads, tokens, self.size, generator=generator).to(dtype)

        return normal(self.heads, self.queries), normal(self.groups, self.keys), normal(self.groups, self.keys)

    @staticmethod
    def of(
        text: str, *, causal: bool = False, dtype: str = "float32", backward: bool = False, window: int = 0
    ) -> Shape:
        """A shape from ``"B,H,N,D"``, or ``"B,H,G,Q,K,D"`` with G key heads. With a window it is causal."""
        try:
            sizes = [int(part) for part in text.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) == 4:
            batch, heads, tokens, size = sizes
            sizes = [batch, heads, heads, tokens, tokens, size]
        if len(sizes) != 6 or min(sizes) < 1 or sizes[1] % sizes[2]:
            raise InputError(
                f"a shape must be B,H,N,D (batch, heads, tokens, head size) or B,H,G,Q,K,D (G key heads, a divisor of "
                f"H; Q queries, K keys), whole numbers above 0; got {text!r}. For example 1,8,2048,64."
            )
        return Shape(*sizes, causal=causal or window > 0, dtype=dtype, backward=backward, window=window)
