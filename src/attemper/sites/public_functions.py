"""Attention functions that no function mode sees: FlexAttention, torch's varlen attention, flash_attn, xformers.

While somebody looks, every module that holds such a function under a name holds a wrapper that tells the observers
and then calls it. They are all put back afterwards. A reference that is kept elsewhere (a closure, a class attribute,
a compiled function) is not seen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor, nn

from attemper.functional.call import Options, Packing
from attemper.sites.observer import AttentionCall, UnsupportedCallError, current, tell, told
from attemper.sites.tap import in_backward

Reader = Callable[..., AttentionCall]


_lock = threading.RLock()
_depth = 0
_replaced: list[tuple[Any, str, Any]] = []


@contextmanager
def seen() -> Iterator[None]:
    """Tells the current observers of calls of these functions; nested and concurrent looks share one replacement."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            _replace()
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                while _replaced:
                    holder, name, function = _replaced.pop()
                    setattr(holder, name, function)


def _replace() -> None:
    wrappers = {}
    for home, name, reader in _FUNCTIONS:
        function = getattr(sys.modules.get(home), name, None)
        if function is not None:
            wrappers[id(function)] = _telling(function, reader)
    for holder, name in _holders(frozenset(wrappers), tuple(map(id, sys.modules.values()))):
        function = vars(holder)[name]
        if id(function) in wrappers:
            _replaced.append((holder, name, function))
            setattr(holder, name, wrappers[id(function)])


@lru_cache(maxsize=1)
def _holders(functions: frozenset[int], _: tuple[int, ...]) -> tuple[tuple[Any, str], ...]:
    """Which modules hold these functions, under which names. Looked for again only when modules have come or gone."""
    found = []
    for holder in list(sys.modules.values()):
        names = getattr(holder, "__dict__", None)
        if isinstance(names, dict):
            found += [(holder, name) for name, value in list(names.items()) if id(value) in functions]
    return tuple(found)


def _telling(function: Callable[..., Any], reader: Reader) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not current() or in_backward():
            return function(*args, **kwargs)
        with told():
            result = function(*args, **kwargs)
        tell(reader, args, kwargs)
        return result

    return wrapper


def _flex(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None,
    **_: Any,
) -> AttentionCall:  # fmt: skip
    mask = None
    if score_mod is not None:
        raise UnsupportedCallError(module, "its FlexAttention changes scores by a score_mod of its own")
    if block_mask is not None:
        from torch.nn.attention.flex_attention import create_mask

        batch, heads = block_mask.shape[:2]
        mask = create_mask(block_mask.mask_mod, batch, heads, query.shape[2], key.shape[2], device=query.device)
    return AttentionCall(query, key, mask, Options(scale=scale, enable_gqa=enable_gqa))


def _packed(query: Tensor, key: Tensor, cu_q: Tensor, cu_k: Tensor, options: Options) -> AttentionCall:
    views = [part.transpose(0, 1)[None] for part in (query, key)]
    return AttentionCall(views[0], views[1], None, options, Packing(cu_q, cu_k))


def _torch_varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int,
    max_k: int, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    seqused_k: Any = None, block_table: Any = None, **_: Any,
) -> AttentionCall:  # fmt: skip
    if seqused_k is not None or block_table is not None or cu_seq_k is None:
        raise UnsupportedCallError(module, "its varlen attention reads a paged cache")
    options = Options(
        scale=scale, window_size=window_size, causal_alignment="bottom-right",
        enable_gqa=enable_gqa or query.shape[1] != key.shape[1],
    )  # fmt: skip
    return _packed(query, key, cu_seq_q, cu_seq_k, options)


def _flash_options(
    module: nn.Module, query: Tensor, key: Tensor, softmax_scale: float | None, causal: bool, window_size: tuple[int,
    int],
    softcap: float, alibi_slopes: Any,
) -> Options:  # fmt: skip
    if alibi_slopes is not None:
        raise UnsupportedCallError(module, "its flash attention adds ALiBi slopes")
    return Options(
        scale=softmax_scale, is_causal=causal, causal_alignment="bottom-right", window_size=window_size,
        softcap=softcap or None, enable_gqa=query.shape[-2] != key.shape[-2],
    )  # fmt: skip


def _flash(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    **_: Any,
) -> AttentionCall:  # fmt: skip
    """flash_attn_func: [B, tokens, heads, size]."""
    options = _flash_options(module, q, k, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return AttentionCall(q.transpose(1, 2), k.transpose(1, 2), None, options)


def _flash_varlen(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, block_table: Any = None,
    **_: Any,
) -> AttentionCall:  # fmt: skip
    """flash_attn_varlen_func: [total, heads, size]."""
    if block_table is not None:
        raise UnsupportedCallError(module, "its flash attention reads a paged cache")
    options = _flash_options(module, q, k, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _packed(q, k, cu_seqlens_q, cu_seqlens_k, options)


def _xformers(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
    scale: float | None = None, **_: Any,
) -> AttentionCall:  # fmt: skip
    """memory_efficient_attention: [B, tokens, heads, size], or [B, tokens, size] for one head."""
    if attn_bias is not None and not isinstance(attn_bias, Tensor):
        raise UnsupportedCallError(
            module, f"its xformers mask is a {type(attn_bias).__name__}; put attemper.tap beside it"
        )
    parts = [part[:, :, None] if part.dim() == 3 else part for part in (query, key)]
    if any(part.dim() != 4 for part in parts):
        raise UnsupportedCallError(module, "its xformers attention has grouped heads; put attemper.tap beside it")
    return AttentionCall(parts[0].transpose(1, 2), parts[1].transpose(1, 2), attn_bias, Options(scale=scale))


_FUNCTIONS: tuple[tuple[str, str, Reader], ...] = (
    ("torch.nn.attention.flex_attention", "flex_attention", _flex),
    ("torch.nn.attention.varlen", "varlen_attn", _torch_varlen),
    ("flash_attn.flash_attn_interface", "flash_attn_func", _flash),
    ("flash_attn.flash_attn_interface", "flash_attn_varlen_func", _flash_varlen),
    ("xformers.ops.fmha", "memory_efficient_attention", _xformers),
)
