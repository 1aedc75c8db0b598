"""Attention as torch functions: SDPA, nn.MultiheadAttention's, and softmax by hand, seen by a function mode as they
run.

The mode changes nothing: every function runs as it would, and then its arguments are told to the observers. A softmax
over the last of three dimensions or more is attention only if its whole result meets a product with values; a
router's does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from attemper.functional.call import Options
from attemper.sites.observer import AttentionCall, UnsupportedCallError, current, tell, told
from attemper.sites.shapes import four_dimensional, heads_of, mask_like
from attemper.sites.tap import in_backward

_active: ContextVar[bool] = ContextVar("attemper_mode", default=False)


@contextmanager
def seen() -> Iterator[None]:
    """Tells the current observers of attention by torch functions; one mode serves all observers of a thread."""
    if _active.get():
        yield
        return
    _active.set(True)
    try:
        with _AttentionMode():
            yield
    finally:
        _active.set(False)


class _AttentionMode(TorchFunctionMode):
    """Lets every function run as it would, and then tells the observers of those that attend."""

    def __init__(self) -> None:
        super().__init__()
        self._softmaxed = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            # Eager FlexAttention compiles a wrapper of its own: nothing of ours belongs into that graph.
            return func(*args, **kwargs)
        reader = _READERS.get(func)
        if reader is not None and current() and not in_backward():
            with told():
                result = func(*args, **kwargs)
            self._tell(reader, args, kwargs)
            return result
        result = func(*args, **kwargs)
        if current() and not in_backward():
            self._follow(func, args, kwargs, result)
        return result

    def _tell(self, reader: Callable[..., AttentionCall], args: Any, kwargs: Any) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            tell(reader, args, kwargs)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keeps track of softmax results until one meets a product: then its scores were attention scores."""
        if func in _SOFTMAX:
            scores = args[0] if args else kwargs.get("input")
            if isinstance(scores, Tensor) and scores.dim() >= 3 and _last(func, args, kwargs, scores.dim()):
                self._softmaxed[result] = scores.detach()
            return
        if not self._softmaxed:
            return
        first = args[0] if args else None
        if func in _PASSING:
            if isinstance(first, Tensor) and first in self._softmaxed and isinstance(result, Tensor):
                scores = self._softmaxed[first]
                if result.shape == scores.shape:
                    self._softmaxed[result] = scores
                elif result.numel() == scores.numel() and result.shape[-1:] == scores.shape[-1:]:
                    self._softmaxed[result] = scores.reshape(result.shape)
        elif func in _PRODUCTS:
            for operand in (*args, *kwargs.values()):
                if isinstance(operand, Tensor) and operand in self._softmaxed:
                    self._tell(_by_hand, (self._softmaxed.pop(operand),), {})


def _last(func: Any, args: Any, kwargs: Any, dimensions: int) -> bool:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim in (-1, dimensions - 1)


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> AttentionCall:  # fmt: skip
    heads = heads_of(module)
    q, k = four_dimensional(query, heads), four_dimensional(key, heads)
    batch = max(q.shape[0], k.shape[0])
    q, k = (part.expand(batch, *part.shape[1:]) for part in (q, k))
    if not enable_gqa and k.shape[1] != q.shape[1]:
        groups = max(q.shape[1], k.shape[1])
        q, k = (part.expand(batch, groups, *part.shape[2:]) for part in (q, k))
    mask = None if attn_mask is None else mask_like(module, attn_mask, query, heads, key.shape[-2])
    return AttentionCall(q, k, mask, Options(scale=scale, is_causal=is_causal, enable_gqa=enable_gqa))


def _multi_head(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None,
    add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None, static_k: Tensor | None = None, static_v: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> AttentionCall:  # fmt: skip
    if bias_k is not None or add_zero_attn or static_k is not None:
        raise UnsupportedCallError(module, "it adds keys of its own (add_bias_kv, add_zero_attn or static_k)")
    if in_proj_weight is not None and not use_separate_proj_weight:
        q_proj_weight, k_proj_weight, _ = in_proj_weight.chunk(3)
    assert q_proj_weight is not None
    assert k_proj_weight is not None
    biases = (None, None) if in_proj_bias is None else in_proj_bias.chunk(3)[:2]
    sequences = [part if part.dim() == 3 else part[:, None] for part in (query, key)]
    q, k = (
        F.linear(part, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for part, weight, bias in zip(sequences, (q_proj_weight, k_proj_weight), biases, strict=True)
    )
    mask = _visible(attn_mask, q.shape[0], num_heads)
    padding = key_padding_mask
    tokens = None
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        visible = ~padding if padding.dtype == torch.bool else padding
        mask = _both(mask, visible[:, None, None, :])
        if query is key and padding.dtype == torch.bool:
            tokens = visible
    return AttentionCall(
        q, k, mask, Options(is_causal=is_causal and attn_mask is None), cross=query is not key, tokens=tokens
    )


def _visible(mask: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """nn.MultiheadAttention's attn_mask, in which True hides, as ours: [Q, K] or [B * heads, Q, K] to 4-D."""
    if mask is None:
        return None
    mask = ~mask if mask.dtype == torch.bool else mask
    return mask[None, None] if mask.dim() == 2 else mask.view(batch, heads, *mask.shape[1:])


def _both(one: Tensor | None, two: Tensor) -> Tensor:
    """Two masks as one: both bool, or as one that is added."""
    if one is None:
        return two
    if one.dtype == torch.bool and two.dtype == torch.bool:
        return one & two
    parts = [torch.where(part, 0.0, -torch.inf) if part.dtype == torch.bool else part for part in (one, two)]
    return parts[0] + parts[1]


def _by_hand(module: nn.Module, scores: Tensor) -> AttentionCall:
    """Scores that a model has computed itself: as a bias on products that are all 0."""
    grid = four_dimensional(scores, heads_of(module))
    batch, heads, queries, keys = grid.shape
    zero = torch.zeros((), dtype=grid.dtype, device=grid.device)
    query, key = zero.expand(batch, heads, queries, 1), zero.expand(batch, heads, keys, 1)
    return AttentionCall(query, key, grid, Options(scale=1.0))


_READERS: dict[Any, Callable[..., AttentionCall]] = {
    F.scaled_dot_product_attention: _sdpa,
    F.multi_head_attention_forward: _multi_head,
}
_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_PASSING = {
    F.dropout, torch.dropout, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16,
    Tensor.double, Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.flatten, Tensor.unflatten, torch.reshape,
    torch.flatten, Tensor.clone, Tensor.mul, torch.mul, Tensor.__mul__, Tensor.expand, Tensor.squeeze, Tensor.unsqueeze,
}  # fmt: skip
"""What may stand between the softmax and the product: dropout, a change of type or of shape, a head mask."""
_PRODUCTS = {
    torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm,
    Tensor.__rmatmul__,
}  # fmt: skip
