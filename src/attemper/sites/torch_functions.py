"""Attention as torch functions: ``F.scaled_dot_product_attention`` and ``nn.MultiheadAttention``'s function.

To read, a function mode lets every function run as it would and then reports its arguments to the observers; it also
follows a softmax by hand (``softmax_by_hand``). To act, another mode is entered inside the forward of one module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.call.attn_mask import alignment_of, hides, is_causal_bias, join_masks, sizes_of
from attemper.call.request import Options
from attemper.errors import InputError
from attemper.nn.attention import attend_padded
from attemper.nn.temperature import product_of
from attemper.sites import softmax_by_hand
from attemper.sites.actions import (
    Actions,
    ModelCall,
    actions_on,
    attend,
    normalizer_of,
    output_and_statistics,
    temperatures,
)
from attemper.sites.identity import DIFFERENCE, Origins, following
from attemper.sites.observation import (
    AttentionCall,
    Reader,
    UnsupportedCallError,
    as_autocast_rounds,
    as_given,
    beside,
    current,
    four_dimensional,
    heads_of,
    mask_like,
    refuse_shared_queries,
    report,
    tell,
)
from attemper.sites.tap import in_backward
from attemper.sites.tensor_axes import FeatureAxes, FunctionCall

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_MULTI_HEAD = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
_active: ContextVar[bool] = ContextVar("attemper_mode", default=False)


@contextmanager
def reading(_: nn.Module) -> Iterator[None]:
    """Reports attention by torch functions to the current observers; one mode serves all observers of a thread."""
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
"""Types of results that hold no numbers of a tensor: most functions that a mode sees are questions of this kind."""


class AttentionMode(TorchFunctionMode):
    """Lets every function run as it would, and then reports those that attend."""

    def __init__(self) -> None:
        super().__init__()
        self._axes = FeatureAxes()
        self.origins = Origins()
        self._by_hand = softmax_by_hand.ByHand(self._axes, self.origins)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            # Eager FlexAttention compiles a wrapper of its own: nothing of ours belongs into that graph.
            return func(*args, **kwargs)
        if func in _FUNCTIONS:
            return beside(func, args, kwargs, partial(self._report, func, args, kwargs))
        result = func(*args, **kwargs)
        try:
            if type(result) not in _PLAIN and current() and not in_backward():
                self._follow(FunctionCall(func, args, kwargs, result))
        except Exception as error:
            tell(error)
        return result

    def _report(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        names, reader = _FUNCTIONS[func]
        given = _by_name(names, args, kwargs)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            value, output = _value_and_output(func, given, result)
            report(_readable(reader, self._axes), (), given, value=value, output=output)

    def _follow(self, call: FunctionCall) -> None:
        """Reports a softmax by hand where its weights meet values, and modules whose calls are no map for each head."""
        with torch._C.DisableTorchFunction():
            try:
                self._axes.follow(call)
                self.origins.follow(call)
                subtracted = self.origins.lineage.follow(call)
                found = self._by_hand.follow(call)
            except Exception as error:  # whatever it is, it must not end a training run
                name = getattr(call.func, "__name__", call.func)
                reason, subtracted = f"its tensors could not be followed through {name} ({error})", frozenset()
                found = softmax_by_hand.HandAttention(None, reason, attends=False)
            withdrawn = dict.fromkeys(subtracted, DIFFERENCE)
            if found is not None:
                report(softmax_by_hand.read, (found,), {}, places=found.places)
                running = current()[0].context.module()
                if found.attends:
                    self.origins.lineage.mark(call.result, running)
                if found.attends and found.reason is not None:
                    # Another softmax of the module may be a part of the same attention.
                    withdrawn[running] = found.reason
            for module, reason in withdrawn.items():
                for observer in current():
                    observer.withdraw(module, reason)


def _value_and_output(func: Any, given: dict[str, Any], result: Any) -> tuple[Tensor | None, Tensor | None]:
    """Values and the output of a call, where they are [B, heads, tokens, size] as they stand."""
    value = given.get("value")
    if func is not F.scaled_dot_product_attention or not isinstance(value, Tensor) or not isinstance(result, Tensor):
        return None, None
    return (value, result) if value.dim() == result.dim() == 4 else (None, None)


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _readable(reader: Reader, axes: FeatureAxes) -> Reader:
    """The reader, for keys that are tokens: XCiT gives channels to the same function."""

    def read(module: nn.Module, **given: Any) -> AttentionCall:
        if any(part.dim() - 2 in axes.of(part).axes for part in (given["key"], given["value"])):
            raise UnsupportedCallError(module, softmax_by_hand.CHANNELS)
        return reader(module, **given)

    return read


def read_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, attn_mask: Tensor | None = None, **given: Any
) -> AttentionCall:
    """``F.scaled_dot_product_attention``'s arguments as a call; ``given``: those that are options."""
    if any(part.is_nested for part in (query, key)):
        raise UnsupportedCallError(
            module, "its queries and keys are nested tensors: pad them, or put attemper.tap beside it"
        )
    heads = heads_of(module)
    refuse_shared_queries(module, query, key)
    options = Options(**{name: given[name] for name in ("scale", "is_causal", "enable_gqa") if name in given})
    if not options.enable_gqa and query.shape[:-2] != key.shape[:-2]:
        # Leading axes broadcast before they are read as batch and heads.
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        query, key = (part.expand(*lead, *part.shape[-2:]) for part in (query, key))
    q, k = (four_dimensional(part, heads) for part in as_autocast_rounds(query, key))
    if is_causal_bias(attn_mask):
        return AttentionCall(q, k, None, _with_causal_bias(module, attn_mask, options, (q.shape[2], k.shape[2])))
    mask = None if attn_mask is None else mask_like(module, attn_mask, query, heads, key.shape[-2])
    return AttentionCall(q, k, mask, options)


def _with_causal_bias(module: nn.Module, bias: Tensor, options: Options, sizes: tuple[int, int]) -> Options:
    """A ``CausalBias`` as SDPA reads it: from the top left by the call's own sizes, else by its own."""
    queries, keys = sizes_of(bias)
    if alignment_of(bias) == "top-left" or queries == keys:
        return replace(options, is_causal=True)
    if (queries, keys) != sizes:
        raise UnsupportedCallError(
            module, f"its CausalBias was made for {queries} x {keys} (queries x keys), and the call has {sizes}"
        )
    return replace(options, is_causal=True, causal_alignment="bottom-right")


def read_multi_head(module: nn.Module, **given: Any) -> AttentionCall:
    """``F.multi_head_attention_forward``'s arguments as a call: queries and keys are projected anew."""
    if given["bias_k"] is not None or given["add_zero_attn"] or given.get("static_k") is not None:
        raise UnsupportedCallError(module, "it adds extra keys (add_bias_kv, add_zero_attn or static_k)")
    query, key, heads = given["query"], given["key"], given["num_heads"]
    q, k = _project(query, key, given)
    attn_mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    mask = None if attn_mask is None else _visible(attn_mask)
    if mask is not None:  # [Q, K] or [B * heads, Q, K]
        mask = mask[None, None] if mask.dim() == 2 else mask.view(q.shape[0], heads, *mask.shape[1:])
    tokens, same = None, _same_sequence(query, key)
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding[None]
        visible = _visible(padding)[:, None, None, :]
        mask = visible if mask is None else join_masks((mask, visible), q)
        tokens = ~hides(padding) if same else None
    options = Options(is_causal=given.get("is_causal", False) and attn_mask is None)
    return AttentionCall(q, k, mask, options, cross=not same, tokens=tokens)


def _project(query: Tensor, key: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Queries [B, H, Q, D] and keys [B, H, K, D] of sequences [Q, B, E] and [K, B, E], or without a batch."""
    weights: Any = (given.get("q_proj_weight"), given.get("k_proj_weight"))
    if given["in_proj_weight"] is not None and not given.get("use_separate_proj_weight"):
        weights = given["in_proj_weight"].chunk(3)[:2]
    biases = (None, None) if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)[:2]
    sequences = [part if part.dim() == 3 else part[:, None] for part in (query, key)]
    q, k = (
        F.linear(part, weight, bias).unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3)
        for part, weight, bias in zip(sequences, weights, biases, strict=True)
    )
    return q, k


def _same_sequence(query: Tensor, key: Tensor) -> bool:
    """Whether two tensors are one, or views of one that show the same."""
    if query is key:
        return True
    places = [(part.shape, part.stride(), part.storage_offset(), part.dtype) for part in (query, key)]
    return places[0] == places[1] and torch._C._is_alias_of(query, key)  # pyright: ignore[reportAttributeAccessIssue]


def _visible(mask: Tensor) -> Tensor:
    """A mask of nn.MultiheadAttention, in which True hides, as ours."""
    return ~mask if mask.dtype == torch.bool else mask


_FUNCTIONS: dict[Any, tuple[tuple[str, ...], Reader]] = {
    F.scaled_dot_product_attention: (_SDPA, read_sdpa),
    F.multi_head_attention_forward: (_MULTI_HEAD, read_multi_head),
}
"""Names of the arguments of each function, and how they are read."""


class FunctionActions(Actions):
    """Actions on a module whose own code calls an attention function of torch."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs the forward under a mode: inside the forward, because activation checkpointing calls it once more."""
        with ActingMode(module):
            return forward(*args, **kwargs)


class MultiHeadActions(FunctionActions):
    """Actions on ``nn.MultiheadAttention``."""

    def own_forward(self, module: nn.Module, args: tuple[Any, ...]) -> Callable[..., Any]:
        """The layer's forward, on padded tensors: only torch's fast path, which is off here, takes nested ones."""
        forward = super().own_forward(module, args)
        if any(getattr(part, "is_nested", False) for part in args):
            return partial(attend_padded, forward, batch_first=bool(module.batch_first))
        return forward


class ActingMode(TorchFunctionMode):
    """Meets the attention functions of torch inside one module's forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product(self.module, _by_name(_SDPA, args, kwargs))
        if func is F.multi_head_attention_forward:
            return _multi_head(self.module, _by_name(_MULTI_HEAD, args, kwargs))
        if func is Tensor.unflatten:
            # The method calls super(), which torch.compile cannot follow under a mode.
            func = torch.unflatten
        return func(*args, **kwargs)


@dataclass
class _ScaledDotProduct(ModelCall):
    """A call of ``F.scaled_dot_product_attention``."""

    shape: torch.Size
    """Of its query as the model gave it."""
    given: dict[str, Any]
    """Its other arguments, by name."""

    def read(self, query: Tensor) -> AttentionCall:
        return read_sdpa(self.module, as_given(query, self.shape, heads_of(self.module)), **self.given)

    def run(self, query: Tensor) -> Any:
        return F.scaled_dot_product_attention(as_given(query, self.shape, heads_of(self.module)), **self.given)

    def result_of(self, output: Tensor) -> Any:
        return output

    def map_output(self, function: Callable[[Tensor], Tensor], result: Any) -> Any:
        return function(result)


def _scaled_dot_product(module: nn.Module, given: dict[str, Any]) -> Tensor:
    query = given.pop("query")
    key, value = given["key"], given["value"]
    plain = query.dim() == 4 and key.dim() == 4 and value.dim() == 4 and key.shape[0] == query.shape[0]
    plain = plain and (given.get("enable_gqa", False) or query.shape[1] == key.shape[1] == value.shape[1])
    # Under autocast SDPA rounds and returns by rules of its own; another normalizer rounds as its call was read.
    ours = normalizer_of(module) is not None or not torch.is_autocast_enabled(query.device.type)
    rows = four_dimensional(query, heads_of(module))
    dropout = given.get("dropout_p", 0.0)
    return attend(_ScaledDotProduct(module, rows, value, dropout, plain and ours, query.shape, given))


def _multi_head(module: nn.Module, given: dict[str, Any]) -> Any:
    """``nn.MultiheadAttention``: the temperature of each head goes into the rows of the query projection."""
    actions = actions_on(module)
    actions.frame().met = True
    if actions.temperatures:
        given = _with_tempered_projection(module, given)
    result = F.multi_head_attention_forward(**given)
    for listener in [listener for listener in actions.listeners if listener.wants(module)]:
        call = read_multi_head(module, **given)
        stats = output_and_statistics(module, call, None, listener.stats)[1] if listener.stats else None
        result = (listener.receive(module, call, stats, result[0]), *result[1:])
    return result


def _with_tempered_projection(module: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    heads, size = given["num_heads"], given["embed_dim_to_check"]
    stand_in = given["query"].new_empty(1, heads, 1, 1)
    for part in temperatures(module):
        if part.follows("follows_input") or part.follows("follows_length"):
            raise InputError(
                f"{type(part).__name__} differs from query to query, and nn.MultiheadAttention takes one temperature "
                "per head: put attemper.nn.MultiheadAttention(..., temperature=...) in its place."
            )
    product = product_of(temperatures(module), stand_in, None, lambda: stand_in)
    assert product is not None
    factors = product.reciprocal().expand(1, heads, 1).reshape(heads, 1).expand(heads, size // heads).reshape(size)
    changed: dict[str, Any] = {}
    if given.get("use_separate_proj_weight"):
        weight = given["q_proj_weight"]
        changed["q_proj_weight"] = weight * factors[:, None].to(weight.dtype)
    else:
        weight = given["in_proj_weight"]
        changed["in_proj_weight"] = weight * _ones_after(factors, weight)[:, None]
    bias = given.get("in_proj_bias")
    if bias is not None:
        changed["in_proj_bias"] = bias * _ones_after(factors, bias)
    return given | changed


def _ones_after(factors: Tensor, like: Tensor) -> Tensor:
    """``factors`` for the query's third of packed features, and 1 for those of keys and values."""
    rest = factors.new_ones(like.shape[0] - len(factors))
    return torch.cat((factors, rest)).to(like.dtype)
