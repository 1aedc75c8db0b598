"""The ways to compute one call that are timed against each other. Each is a function without arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.bench.shape import Shape
from attemper.functional import attention

Way = Callable[[], object]
LARGEST_EAGER = 1 << 31
"""Bytes of an n x n tensor beyond which eager attention is left out."""


def ours(shape: Shape, tensors: tuple[Tensor, ...], stats: tuple[str, ...] | str, backend: str) -> Way:
    """``attemper.attention``; with ``shape.backward`` the gradients of the output's and the entropies' sum too."""
    query, key, value = _leaves(shape, tensors)
    above = torch.ones_like(query)
    grouped = shape.groups != shape.heads

    def call() -> object:
        result = attention(query, key, value, is_causal=shape.causal, enable_gqa=grouped, stats=stats, backend=backend)
        if not shape.backward:
            # A statistic is computed when it is read: all are.
            return result.output, None if result.stats is None else [result.stats[name] for name in result.stats]
        outputs, above_outputs = [result.output], [above]
        if result.stats is not None:
            outputs.append(result.stats.entropy)
            above_outputs.append(torch.ones_like(result.stats.entropy))
        return torch.autograd.grad(outputs, (query, key, value), above_outputs)

    return call


def sdpa(shape: Shape, tensors: tuple[Tensor, ...]) -> Way:
    """``F.scaled_dot_product_attention``, with its gradients if wanted."""
    query, key, value = _leaves(shape, tensors)
    above = torch.ones_like(query)
    grouped = shape.groups != shape.heads

    def call() -> object:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal, enable_gqa=grouped)
        return torch.autograd.grad(output, (query, key, value), above) if shape.backward else output

    return call


def sdpa_packed_heads(shape: Shape, tensors: tuple[Tensor, ...]) -> Way:
    """SDPA for one query: the query heads that share a key head as more queries of it."""
    query, key, value = tensors
    packed = query.reshape(shape.batch, shape.groups, shape.heads // shape.groups, shape.size)
    return lambda: F.scaled_dot_product_attention(packed, key, value).reshape(query.shape)


def two_sdpa_calls(shape: Shape, tensors: tuple[Tensor, ...]) -> Way:
    """Entropy out of two stock calls, ``lse - scale q.(P k)``: output and lse of the first, P k of the second."""
    query, key, value = tensors
    scale = 1 / math.sqrt(shape.size)

    def call() -> tuple[Tensor, Tensor]:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, shape.causal)
        mean = F.scaled_dot_product_attention(query, key, key, is_causal=shape.causal)
        return output, lse - scale * (query * mean).sum(-1)

    return call


def eager_entropy(shape: Shape, tensors: tuple[Tensor, ...]) -> Way:
    """Attention and entropy as they are written by hand, with the weights in memory."""
    query, key, value = tensors
    scale = 1 / math.sqrt(shape.size)
    mask = query.new_full((shape.queries, shape.keys), -math.inf).triu(1) if shape.causal else None

    def call() -> tuple[Tensor, Tensor]:
        scores = torch.matmul(query * scale, key.transpose(-2, -1))
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        return torch.matmul(weights, value), -(weights * torch.log(weights + 1e-9)).sum(-1)

    return call


def others(shape: Shape, tensors: tuple[Tensor, ...]) -> dict[str, Way]:
    """Name -> the ways that ours is compared with, as far as they apply to the shape."""
    ways = {"sdpa": sdpa(shape, tensors)}
    plain = shape.groups == shape.heads and not shape.backward
    if shape.groups != shape.heads and shape.queries == 1 and not (shape.backward or shape.causal):
        ways["sdpa_packed_heads"] = sdpa_packed_heads(shape, tensors)
    if plain:
        ways["two_sdpa_calls"] = two_sdpa_calls(shape, tensors)
    if plain and 4 * shape.batch * shape.heads * shape.queries * shape.keys <= LARGEST_EAGER:
        ways["eager_entropy"] = eager_entropy(shape, tensors)
    return ways


def _leaves(shape: Shape, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.detach().requires_grad_(shape.backward) for tensor in tensors)
