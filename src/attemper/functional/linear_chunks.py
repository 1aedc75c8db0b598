"""Weighted sums over keys where a weight is a product of features: all keys at once, or causal, in chunks.

    sums_i = sum over visible j of (phi(q_i) . phi(k_j)) [v_j, 1]

Shapes here: B batch, G key heads, r query heads of a key head, Q queries, K keys, F features, W = E + 1 (the values and
a 1, whose sum is the denominator).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.call import transforms

CHUNK = 64
"""Keys of a chunk: a token costs chunk x (F + W) inside its chunk and 2 F W outside."""


def over_all(q: Tensor, k: Tensor, v: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Every row sees every key.

    Args:
        q: [B, G, r, Q, F] features.
        k: [B, G, K, F] features.
        v: [B, G, K, W].
        before: [B, G, F, W], the sum of phi(k) v over keys that came earlier.

    Returns:
        The rows' sums [B, G, r, Q, W], and ``before`` with these keys added.
    """
    after = before + k.mT @ v
    return products(q, after), after


def causal(q: Tensor, k: Tensor, v: Tensor, before: Tensor, chunk: int | None) -> tuple[Tensor, Tensor]:
    """Row i sees the keys up to i; Q = K, at least 1. Else as :func:`over_all`.

    Inside a chunk the weights stand in memory, [chunk, chunk]; what came before it is one sum [F, W].
    """
    tokens, heads = k.shape[2], q.shape[2]
    chunk = min(chunk or CHUNK, tokens)
    q, k, v = (chunked(tensor, chunk) for tensor in (q, k, v))
    # [B, G, chunks, r chunk, F]: all rows that meet the keys of a chunk.
    q = q.transpose(2, 3).flatten(3, 4)
    sums = torch.cat((before[:, :, None], k.mT @ v), 2).cumsum(2)
    # Not times a mask: a NaN of the future would stay one.
    weights = (q @ k.mT).unflatten(3, (heads, chunk))
    # In place where nobody maps over it: torch.vmap has no rule for that.
    weights = (weights.tril() if transforms.active() else weights.tril_()).flatten(3, 4)
    found = (weights @ v + q @ sums[:, :, :-1]).unflatten(3, (heads, chunk))
    return found.transpose(2, 3).flatten(3, 4)[:, :, :, :tokens], sums[:, :, -1]


def products(q: Tensor, sums: Tensor) -> Tensor:
    """[B, G, r, Q, F] times [B, G, F, W], without a copy of the sums for each head."""
    return (q.flatten(2, 3) @ sums).unflatten(2, q.shape[2:4])


def chunked(tensor: Tensor, size: int, value: float = 0.0) -> Tensor:
    """[..., n, F] -> [..., chunks, size, F], the last chunk filled up with ``value``."""
    missing = -tensor.shape[-2] % size
    tensor = F.pad(tensor, (0, 0, 0, missing), value=value) if missing else tensor
    return tensor.unflatten(-2, (tensor.shape[-2] // size, size))
