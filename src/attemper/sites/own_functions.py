"""Calls of our own ``attention`` and ``varlen_attention``, as layers of ``attemper.nn`` and users' code make them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attemper.call.masks import without_causal_bias
from attemper.call.options import Options
from attemper.call.packing import Packing
from attemper.sites.observation import AttentionCall

_READ = (
    "temperature", "normalizer", "causal_alignment", "window_size", "softcap", "sink_logits", "first_tokens", "backend",
)  # fmt: skip
"""Options that the scores and weights follow from; dropout and statistics are the caller's affair."""


def attention(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, **given: Any,
) -> AttentionCall:  # fmt: skip
    """Reads ``attemper.attention``."""
    options = _options(is_causal, scale, enable_gqa, given)
    return AttentionCall(query, key, *without_causal_bias("attention", attn_mask, options, query, key.shape[2]))


def varlen_attention(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, **given: Any,
) -> AttentionCall:  # fmt: skip
    """Reads ``attemper.varlen_attention``."""
    views = [part.transpose(0, 1)[None] for part in (query, key)]
    options = _options(is_causal, scale, enable_gqa, given)
    return AttentionCall(views[0], views[1], None, options, Packing(cu_seqlens_q, cu_seqlens_k))


def _options(is_causal: bool, scale: float | None, enable_gqa: bool, given: dict[str, Any]) -> Options:
    kept = {name: given[name] for name in _READ if name in given}
    return Options(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, **kept)
