"""Attention as torch functions: SDPA, nn.MultiheadAttention's, and softmax by hand, seen by a function mode as
they run.

The mode changes nothing: every function runs as it would, and then its arguments are told to the observers. How a
softmax by hand is followed to its values stands in ``by_hand``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.call.masks import alignment_of, is_causal_bias, sizes_of
from attemper.call.options import Options
from attemper.sites import softmax_by_hand
from attemper.sites.autocast import rounded
from attemper.sites.identity import Origins, following
from attemper.sites.observation import AttentionCall, UnsupportedCallError, current, guarded, tell, told
from attemper.sites.padding import hidden
from attemper.sites.shapes import four_dimensional, heads_of, mask_like
from attemper.sites.tap import in_backward
from attemper.sites.tensor_axes import FeatureAxes

_active: ContextVar[bool] = ContextVar("attemper_mode", default=False)


@contextmanager
def seen() -> Iterator[None]:
    """Tells the current observers of attention by torch functions; one mode serves all observers of a thread."""
    if _active.get():
        yield
        return
    _active.set(True)
    try:
        mode = AttentionMode()
        with following(mode.origins), mode:
            yield
    finally:
        _active.set(False)


_PLAIN = frozenset((torch.Size, torch.dtype, torch.device, torch.layout, bool, int, str))
"""Results that hold no numbers of a tensor: most functions that a mode sees are questions of this kind."""


class AttentionMode(TorchFunctionMode):
    """Lets every function run as it would, and then tells the observers of those that attend."""

    def __init__(self) -> None:
        super().__init__()
        self._axes = FeatureAxes()
        self.origins = Origins()
        self._by_hand = softmax_by_hand.ByHand(self._axes, self.origins)
        self._partly: set[int] = set()
        """Modules of which one softmax cannot be read: another one of theirs may be a part of the same attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            # Eager FlexAttention compiles a wrapper of its own: nothing of ours belongs into that graph.
            return func(*args, **kwargs)
        reader = _READERS.get(func)
        if reader is not None and current() and not in_backward():
            with told():
                result = func(*args, **kwargs)
            guarded(current(), self._tell, reader, args, kwargs)
            return result
        result = func(*args, **kwargs)
        if type(result) not in _PLAIN and current() and not in_backward():
            guarded(current(), self._follow, func, args, kwargs, result)
        return result

    def _tell(self, reader: Callable[..., AttentionCall], args: Any, kwargs: Any) -> None:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            tell(_of_tokens(_readable(reader), self._axes), args, kwargs)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Tells of a softmax by hand where its weights meet values."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                self._axes.follow(func, args, kwargs, result)
                self.origins.follow(func, args, kwargs, result)
                found = self._by_hand.follow(func, args, kwargs, result)
            except Exception as error:  # whatever it is, it must not end somebody's training run
                name = getattr(func, "__name__", func)
                found = softmax_by_hand.Found(None, f"its tensors could not be followed through {name} ({error})")
            if found is not None:
                tell(softmax_by_hand.read, (self._whole(found),), {}, places=found.places)

    def _whole(self, found: softmax_by_hand.Found) -> softmax_by_hand.Found:
        module = id(current()[0].running())
        if found.changed:
            self._partly.add(module)
        return (
            softmax_by_hand.Found(None, softmax_by_hand.PARTLY)
            if found.scores is not None and module in self._partly
            else found
        )


def _of_tokens(reader: Callable[..., AttentionCall], axes: FeatureAxes) -> Callable[..., AttentionCall]:
    """The reader, for keys that are tokens: XCiT gives channels to the same function."""

    def read(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> AttentionCall:
        if any(part.dim() - 2 in axes.of(part).axes for part in (key, value)):
            raise UnsupportedCallError(module, softmax_by_hand.CHANNELS)
        return reader(module, query, key, value, *args, **kwargs)

    return read


def _readable(reader: Callable[..., AttentionCall]) -> Callable[..., AttentionCall]:
    """The reader; arguments that torch took and that it cannot read make the site skipped."""

    def read(module: nn.Module, *args: Any, **kwargs: Any) -> AttentionCall:
        try:
            return reader(module, *args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, UnsupportedCallError):
                raise
            raise UnsupportedCallError(module, f"its arguments could not be read ({error})") from error

    return read


def read_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> AttentionCall:  # fmt: skip
    """``F.scaled_dot_product_attention``'s arguments as a call."""
    if any(part.is_nested for part in (query, key)):
        raise UnsupportedCallError(
            module, "its queries and keys are nested tensors: pad them, or put attemper.tap beside it"
        )
    heads = heads_of(module)
    if not enable_gqa:
        # Leading axes broadcast before they are read as batch and heads.
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        query, key = (part.expand(*lead, *part.shape[-2:]) for part in (query, key))
    q, k = (four_dimensional(part, heads) for part in rounded(query, key))
    options = Options(scale=scale, is_causal=is_causal, enable_gqa=enable_gqa)
    if is_causal_bias(attn_mask):
        return AttentionCall(q, k, None, _with_causal_bias(module, attn_mask, options, (q.shape[2], k.shape[2])))
    mask = None if attn_mask is None else mask_like(module, attn_mask, query, heads, key.shape[-2])
    return AttentionCall(q, k, mask, options)


def _with_causal_bias(module: nn.Module, bias: Tensor, options: Options, sizes: tuple[int, int]) -> Options:
    """A ``CausalBias`` as SDPA reads it: from the top left by the call's own sizes, else by those it was made for."""
    queries, keys = sizes_of(bias)
    if alignment_of(bias) == "top-left" or queries == keys:
        return replace(options, is_causal=True)
    if (queries, keys) != sizes:
        made = f"{queries} queries and {keys} keys"
        raise UnsupportedCallError(module, f"its CausalBias was made for {made}, and the call has {sizes}")
    return replace(options, is_causal=True, causal_alignment="bottom-right")


def read_multi_head(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None,
    add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None, static_k: Tensor | None = None, static_v: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,
) -> AttentionCall:  # fmt: skip
    """``F.multi_head_attention_forward``'s arguments as a call: queries and keys are projected anew."""
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
    tokens = None
    same = _same_sequence(query, key)
    if key_padding_mask is not None:
        padding = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None]
        visible = ~padding if padding.dtype == torch.bool else padding
        mask = _both(mask, visible[:, None, None, :])
        tokens = ~hidden(padding) if same else None
    return AttentionCall(q, k, mask, Options(is_causal=is_causal and attn_mask is None), cross=not same, tokens=tokens)


def _same_sequence(query: Tensor, key: Tensor) -> bool:
    """Whether two tensors are one, or views of one that show the same."""
    if query is key:
        return True
    places = [(part.shape, part.stride(), part.storage_offset(), part.dtype) for part in (query, key)]
    return places[0] == places[1] and torch._C._is_alias_of(query, key)  # pyright: ignore[reportAttributeAccessIssue]


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


_READERS: dict[Any, Callable[..., AttentionCall]] = {
    F.scaled_dot_product_attention: read_sdpa,
    F.multi_head_attention_forward: read_multi_head,
}
