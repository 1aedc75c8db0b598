"""flash_attn's two functions in plain PyTorch, by its documentation: what they compute, not how."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor


def lazy_import(flash_utils: Any) -> Any:
    """For ``flash_utils.lazy_import_flash_attention``, as if flash_attn were installed; newer releases ask for more."""
    process = flash_utils._lazy_define_process_function(flash_attn_varlen_func)
    functions = [flash_attn_func, flash_attn_varlen_func, flash_utils._pad_input, flash_utils._unpad_input]
    if "kvcache" not in inspect.getsource(flash_utils.lazy_import_flash_attention):
        return lambda *_: (functions, process)
    return lambda *_: ([*functions[:2], None, *functions[2:]], (process, process))


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, s_aux: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[B, tokens, heads, size]; fewer heads of keys than of queries are shared; aligned to the bottom right."""
    query, key, value = (part.transpose(1, 2) for part in (q, k, v))
    key, value = (part.repeat_interleave(q.shape[2] // k.shape[2], 1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_visible(q.shape[1], k.shape[1], causal, window_size), -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights.nan_to_num(0.0) @ value).transpose(1, 2)


def _visible(queries: int, keys: int, causal: bool, window: tuple[int, int]) -> Tensor:
    ahead = torch.arange(keys)[None, :] - torch.arange(queries)[:, None] - (keys - queries)
    left, right = window[0], 0 if causal else window[1]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        visible &= ahead >= -left
    if right >= 0:
        visible &= ahead <= right
    return visible


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[total, heads, size]: document after document."""
    documents = []
    for start_q, end_q, start_k, end_k in zip(
        cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), cu_seqlens_k.tolist(), cu_seqlens_k[1:].tolist(), strict=False
    ):
        parts = (q[start_q:end_q][None], k[start_k:end_k][None], v[start_k:end_k][None])
        documents.append(
            flash_attn_func(
                *parts, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
                s_aux=s_aux,
            )[0]
        )  # fmt: skip
    return torch.cat(documents)
