"""Attention layers with a temperature, a normalizer and statistics: a drop-in for torch's, and cross attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.call.attn_mask import ADVICE, alignment_of, causal_marks, is_causal_bias, is_plain, join_masks, sizes_of
from attemper.call.normalizer import normalization
from attemper.call.result import AttentionOutput, AttentionStats
from attemper.call.visible_keys import visible_keys
from attemper.checks import refuse_nested
from attemper.errors import InputError
from attemper.functional.attention import attention, dense_weights
from attemper.nn.normalizers import Normalizer
from attemper.nn.temperature import ACTIONS, ADDED, FixedTemperature, Temperature, product_of

TemperatureArgument = Temperature | float | Tensor | None


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with ``temperature=``, ``normalizer=`` and ``stats=``: the same arguments,
    parameters and result.

    A checkpoint of torch's module loads into it (with ``strict=False`` where a temperature or a normalizer is learned,
    which are the only new parameters). No n x n weights are held unless ``need_weights`` asks for them; those are the
    weights before dropout. A query that sees no key gives the output projection of 0, where torch's gives NaN.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype:
            as in ``torch.nn.MultiheadAttention``.
        temperature: a module of ``attemper.nn``, a number, a tensor [heads], or None for 1. One that is conditional on
            the input is given the query's input [B, Q, embed_dim].
        normalizer: a name or a module of ``attemper.nn``, as in :func:`attemper.attention`.
        stats: names of statistics to return, or "all".

    Raises:
        InputError: a temperature is not above 0, or a name is unknown.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *args: Any,
        temperature: TemperatureArgument = None,
        normalizer: str | Normalizer = "softmax",
        stats: str | Iterable[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        self.temperature = _module(temperature)
        self.normalizer = normalizer
        # torch's TransformerEncoderLayer computes plain softmax from the weights of its attention, without a call of
        # ours, unless something has a hook.
        self.register_forward_pre_hook(_no_fast_path)
        self.stats = _names("MultiheadAttention", stats, normalizer)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | AttentionStats | None]:
        """
        Args:
            query, key, value: [Q, B, E] and [K, B, E], batch first if the module is, or without B. Nested tensors, as
                ``nn.TransformerEncoder`` makes of padded batches, if all three are; the output is nested then.
            key_padding_mask: [B, K]; bool (True = hidden) or floating (added).
            need_weights: return the weights, [B, Q, K], or [B, H, Q, K] without ``average_attn_weights``. None: as
                torch, unless the module reports statistics.
            attn_mask: [Q, K] or [B H, Q, K]; bool (True = hidden) or floating (added); or torch's ``CausalBias``.
            is_causal: a query sees keys up to its own place; unlike torch's, no mask has to say so too.

        Returns:
            ``(output, weights)``, or ``(output, stats)`` if the module was made with ``stats=``.

        Raises:
            InputError: shapes that do not fit, or weights and statistics both asked for.
        """
        if need_weights and self.stats:
            raise InputError(
                "MultiheadAttention(stats=...) returns statistics where torch's returns weights: call it without "
                "need_weights, or make it without stats."
            )
        if query.is_nested or key.is_nested or value.is_nested:
            attend = partial(MultiheadAttention.forward, self)
            rest = (need_weights, attn_mask, average_attn_weights, is_causal)
            return attend_padded(attend, query, key, value, key_padding_mask, *rest, batch_first=self.batch_first)
        single = query.dim() == 2
        if single:
            query, key, value = (part[None] if self.batch_first else part[:, None] for part in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        if not self.batch_first:
            query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        weights = need_weights if need_weights is not None else not self.stats
        output, second = self._attend(query, key, value, key_padding_mask, attn_mask, is_causal, weights)
        if isinstance(second, Tensor):
            second = second.mean(1) if average_attn_weights else second
            second = second[0] if single else second
        if not self.batch_first:
            output = output.transpose(0, 1)
        return output.squeeze(0 if self.batch_first else 1) if single else output, second

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        mask: Tensor | None,
        causal: bool,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | AttentionStats | None]:
        q, k, v = self._project(query, key, value)
        mask, causal = _without_causal_bias(mask, causal, q, k.shape[2])
        joined = _join_masks(padding, mask, q, k.shape[2])
        k, v, joined = self._with_extra_keys(k, v, joined)
        if causal and k.shape[2] > key.shape[1]:
            # The keys that add_bias_kv and add_zero_attn append are seen by every query.
            joined, causal = _causal_before(joined, q, key.shape[1], k.shape[2]), False
        given = _arguments(self, q, k.shape[2], joined, causal, query)
        output, stats = _attend(self, q, k, v, given)
        return output, dense_weights(q, k, **given) if need_weights else stats

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[B, heads, tokens, size] each."""
        if self._qkv_same_embed_dim:
            parts = self.in_proj_weight.chunk(3)
        else:
            parts = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        found = []
        given = {"query": query, "key": key, "value": value}
        for (name, tensor), weight, bias in zip(given.items(), parts, biases, strict=True):
            if tensor.dim() != 3 or tensor.shape[-1] != weight.shape[1]:
                raise InputError(
                    f"MultiheadAttention({name}) must be {weight.shape[1]} long in its last of three dimensions "
                    f"(two without a batch), got {list(tensor.shape)} batch first."
                )
            found.append(F.linear(tensor, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        return found

    def _with_extra_keys(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The learned and the zero key that ``add_bias_kv`` and ``add_zero_attn`` append, which every query sees."""
        batch, before = k.shape[0], k.shape[2]
        if self.bias_k is not None and self.bias_v is not None:
            extra = [
                bias.to(k.dtype).view(1, self.num_heads, 1, -1).expand(batch, -1, -1, -1)
                for bias in (self.bias_k, self.bias_v)
            ]
            k, v = torch.cat((k, extra[0]), 2), torch.cat((v, extra[1]), 2)
        if self.add_zero_attn:
            k, v = (torch.cat((part, part.new_zeros(batch, self.num_heads, 1, part.shape[3])), 2) for part in (k, v))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[2] - before), value=mask.dtype == torch.bool)
        return k, v, mask


class CrossAttention(nn.Module):
    """Attention of one sequence to another, with a temperature and statistics.

    Args:
        dim: size of the queries' sequence, and of the output.
        context_dim: size of the other sequence; None for ``dim``.
        num_heads: must divide ``dim``.
        head_dim: size of a head; None for ``dim / num_heads``.
        temperature: a module of ``attemper.nn``, a number, a tensor [heads], or None for 1.
        normalizer: a name or a module of ``attemper.nn``, as in :func:`attemper.attention`.
        stats: names of statistics to return, or "all".
        dropout: of the weights, in training.
        bias: of the projections.

    Raises:
        InputError: heads that do not divide ``dim``, a temperature that is not above 0, or an unknown name.
    """

    def __init__(
        self,
        dim: int,
        context_dim: int | None = None,
        num_heads: int = 8,
        *,
        head_dim: int | None = None,
        temperature: TemperatureArgument = None,
        normalizer: str | Normalizer = "softmax",
        stats: str | Iterable[str] = (),
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            raise InputError(f"CrossAttention(dim={dim}, num_heads={num_heads}): the heads must divide dim.")
        size = num_heads * (head_dim or dim // num_heads)
        self.num_heads, self.dropout = num_heads, dropout
        self.q_proj = nn.Linear(dim, size, bias=bias)
        self.k_proj = nn.Linear(context_dim or dim, size, bias=bias)
        self.v_proj = nn.Linear(context_dim or dim, size, bias=bias)
        self.out_proj = nn.Linear(size, dim, bias=bias)
        self.temperature = _module(temperature)
        self.normalizer = normalizer
        self.stats = _names("CrossAttention", stats, normalizer)

    def forward(self, query: Tensor, context: Tensor, context_mask: Tensor | None = None) -> AttentionOutput:
        """
        Args:
            query: [B, Q, dim].
            context: [B, K, context_dim].
            context_mask: [B, K] bool, True for real tokens; or any ``attn_mask`` of :func:`attemper.attention`.

        Returns:
            ``AttentionOutput(output [B, Q, dim], stats)``; ``stats`` is None if none were asked for.

        Raises:
            InputError: shapes that do not fit.
        """
        refuse_nested("CrossAttention", {"query": query, "context": context, "context_mask": context_mask})
        for name, tensor, projection in (("query", query, self.q_proj), ("context", context, self.k_proj)):
            size = projection.in_features
            if tensor.dim() != 3 or tensor.shape[-1] != size:
                raise InputError(f"CrossAttention({name}) must be [batch, tokens, {size}], got {list(tensor.shape)}.")
        q, k, v = (
            projection(tensor).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection, tensor in ((self.q_proj, query), (self.k_proj, context), (self.v_proj, context))
        )
        mask = context_mask
        if is_causal_bias(mask):
            mask = _check_marks("CrossAttention(context_mask=...)", mask, q, k.shape[2])
        elif mask is not None and mask.dim() == 2:
            mask = mask[:, None, None]
        return AttentionOutput(*_attend(self, q, k, v, _arguments(self, q, k.shape[2], mask, False, query)))


Layer = MultiheadAttention | CrossAttention


def _module(given: TemperatureArgument) -> Temperature | None:
    return given if given is None or isinstance(given, Temperature) else FixedTemperature(given)


def _no_fast_path(*_: Any) -> None:
    """A hook that does nothing but be there."""


def _names(where: str, stats: str | Iterable[str], normalizer: str | Normalizer) -> tuple[str, ...]:
    """The statistics asked for, once it is known that this is a normalizer, and has them."""
    return normalization(where, normalizer).statistics(where, stats)[0]


def _arguments(
    layer: Layer, query: Tensor, keys: int, mask: Tensor | None, causal: bool, hidden: Tensor
) -> dict[str, Any]:
    """Mask, temperature and normalizer of a call of a layer: its own temperature times those that it was given later,
    and the normalizer that it was given later, or its own.
    """
    children = ((name, part) for name, part in layer.named_children() if isinstance(part, Temperature))
    own = [part for name, part in children if name == "temperature" or name.startswith(ADDED)]
    product = product_of(own, query, hidden, lambda: visible_keys(query, keys, mask, causal))
    actions = getattr(layer, ACTIONS, None)
    normalizer = (None if actions is None else actions.normalizer(layer)) or layer.normalizer
    temperature = 1.0 if product is None else product
    return {"attn_mask": mask, "is_causal": causal, "normalizer": normalizer, "temperature": temperature}


def _attend(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]
) -> tuple[Tensor, AttentionStats | None]:
    """The layer's output [B, Q, dim] and the statistics, with what acts on its attention."""
    dropout = layer.dropout if layer.training else 0.0
    actions = getattr(layer, ACTIONS, None)
    if actions is None:
        heads, stats = attention(q, k, v, dropout_p=dropout, stats=layer.stats, **given)
    else:
        heads, stats = actions.attend_layer(layer, q, k, v, dropout, given)
    return layer.out_proj(heads.transpose(1, 2).flatten(2)), stats


def _check_marks(where: str, bias: Tensor, query: Tensor, keys: int) -> Tensor:
    """A ``CausalBias`` made for these queries and keys as a mask, [1, 1, Q, K] bool, True = visible."""
    if sizes_of(bias) != (query.shape[2], keys):
        raise InputError(
            f"{where} is a CausalBias of {sizes_of(bias)} (queries, keys); the call has {(query.shape[2], keys)}."
        )
    return causal_marks(bias, query.device)[None, None]


def _without_causal_bias(mask: Tensor | None, causal: bool, query: Tensor, keys: int) -> tuple[Tensor | None, bool]:
    """torch's mask (True = hidden) and whether a query sees keys up to its own place."""
    if mask is None or not is_causal_bias(mask):
        return mask, causal
    marks = _check_marks("MultiheadAttention(attn_mask=...)", mask, query, keys)
    top_left = alignment_of(mask) == "top-left" or query.shape[2] == keys
    return (None, True) if top_left else (~marks[0, 0], causal)


def _join_masks(padding: Tensor | None, mask: Tensor | None, query: Tensor, keys: int) -> Tensor | None:
    """torch's two masks (True = hidden) as one (True = visible), broadcastable to [B, H, Q, K]."""
    batch, heads, queries, _ = query.shape
    parts = []
    for name, given in (("key_padding_mask", padding), ("attn_mask", mask)):
        if given is not None and not is_plain(given):
            raise InputError(
                f"MultiheadAttention({name}=...) is a {type(given).__name__}, a subclass of Tensor. {ADVICE}"
            )
    if padding is not None:
        if tuple(padding.shape) != (batch, keys):
            raise InputError(
                f"MultiheadAttention(key_padding_mask=...) must be {[batch, keys]}, got {list(padding.shape)}."
            )
        parts.append(padding[:, None, None])
    if mask is not None:
        shapes = {(queries, keys): (1, 1, queries, keys), (batch * heads, queries, keys): (batch, heads, queries, keys)}
        if tuple(mask.shape) not in shapes:
            raise InputError(
                f"MultiheadAttention(attn_mask=...) must be {[queries, keys]} or {[batch * heads, queries, keys]}, got "
                f"{list(mask.shape)}."
            )
        parts.append(mask.reshape(shapes[tuple(mask.shape)]))
    return join_masks([~part if part.dtype == torch.bool else part for part in parts], query)


def _causal_before(mask: Tensor | None, query: Tensor, causal_keys: int, keys: int) -> Tensor:
    """Causality over the first ``causal_keys`` keys as a mask; the rest is visible."""
    queries = query.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    seen[:, :causal_keys] = seen[:, :causal_keys].tril()
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -torch.inf)


def attend_padded(
    attend: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    *args: Any,
    batch_first: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """``attend(query, key, value, key_padding_mask, ...)`` of ``nn.MultiheadAttention``, for nested sequences.

    ``nn.TransformerEncoder`` makes them, in eval mode without gradients, of a batch with ``src_key_padding_mask``, for
    a fast path of torch that knows nothing of temperatures and normalizers.

    Args:
        query, key, value: [B, tokens of each, E]; all of them nested, batch first.

    Returns:
        ``(output, second)``: the output is nested as the queries are; weights and statistics have rows for padding too.
    """
    known = all(part.is_nested and part.layout is torch.strided for part in (query, key, value))
    if not known or key_padding_mask is not None or not batch_first:
        raise InputError(
            "MultiheadAttention takes nested tensors if query, key and value all are, batch first, in torch's strided "
            "layout and without a key_padding_mask. Pad them with torch.nested.to_padded_tensor and pass one."
        )
    query_lengths, key_lengths = lengths(query), lengths(key)
    # One tensor stays one: self attention is told from cross attention by it.
    dense = {id(part): torch.nested.to_padded_tensor(part, 0.0) for part in (query, key, value)}
    query, key, value = (dense[id(part)] for part in (query, key, value))
    places = torch.arange(key.shape[1], device=key.device)
    padding = places >= torch.tensor(key_lengths, device=key.device)[:, None]
    output, second = attend(query, key, value, padding, *args, **kwargs)
    parts = [row[:length] for row, length in zip(output, query_lengths, strict=True)]
    return torch.nested.as_nested_tensor(parts), second


def lengths(nested: Tensor) -> list[int]:
    """Tokens of each sequence."""
    return [part.shape[0] for part in nested.unbind()]
