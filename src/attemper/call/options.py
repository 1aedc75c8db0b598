"""From the user's arguments to a checked call: the plan of an attention, apart from its execution."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attemper.backends import table
from attemper.call import transforms
from attemper.call.formulas import divided
from attemper.call.masks import checked_mask, without_causal_bias
from attemper.call.normalizer import Normalization, normalization, per_head
from attemper.call.operator import ROW_NORMALIZERS, UNBOUNDED
from attemper.call.visible import Structure, structured_visible_keys
from attemper.checks import one_of, positive_number, refuse_nested
from attemper.errors import InputError
from attemper.statistics import asked_names, with_kept

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16, torch.float32)
"""What autocast rounds: not float64."""
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
_SMALLEST = 1e-30
"""Temperatures below this may overflow the multiplier."""
TEMPERATURE_ADVICE = (
    "Temperature divides the scores: below 1 sharpens, above 1 flattens. For one-hot attention use a small "
    "temperature such as 0.01; float('inf') gives uniform attention."
)


@dataclass(frozen=True)
class Packing:
    """Documents that stand one after another: where each starts, [documents + 1], int."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor


@dataclass(frozen=True)
class Options:
    """Everything but tensors of the sequence, as the caller gave it."""

    scale: float | None = None
    temperature: float | Tensor = 1.0
    normalizer: object = "softmax"
    is_causal: bool = False
    causal_alignment: str = "top-left"
    window_size: tuple[int, int] = (-1, -1)
    softcap: float | None = None
    sink_logits: Tensor | None = None
    stats: str | Iterable[str] = ()
    first_tokens: int = 1
    dropout_p: float = 0.0
    enable_gqa: bool = False
    backend: str = "auto"


@dataclass(frozen=True)
class Call:
    """A checked call. Tensors are views of what the caller passed."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    mask: Tensor | None
    """4-D, every dimension full or 1; bool or floating."""
    multiplier: Tensor
    """scale / T, 3-D."""
    sink: Tensor | None
    left: int
    right: int
    bottom_right: bool
    softcap: float | None
    dropout_p: float
    asked: tuple[str, ...]
    names: tuple[str, ...]
    """What was asked, and what is always kept with it."""
    first_tokens: int
    first_keys: Tensor | None
    positions: Tensor | None
    """The key on each measured row's diagonal; None for the rows' own places."""
    rows: Tensor | None
    """Which rows are measured: picked already where they have ``positions``, else for the kernel to pick; None for all.
    """
    packing: Packing | None
    backend: str
    normalizer: str = "softmax"
    """"softmax", or a map that is computed on whole rows."""
    kind: str = "softmax"
    """What was given: also what softmax's kernel computes with a sink or a scale."""
    number: float = 0.0
    per_head: Tensor | None = None
    """[H], bias of "sigmoid" or alpha of "entmax"."""


def checked_backend(name: str, device: str | None) -> None:
    """Refuses a backend that no call on ``device`` can have; None where the device is not known."""
    table.checked(name, device)


def planned(
    where: str, query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor | None, options: Options,
    packing: Packing | None = None,
) -> Call:  # fmt: skip
    """Checks a call and brings it to one form. ``where`` is the public function, for messages.

    Raises:
        InputError: an argument has no meaning; the message says which, what was expected and what came.
        BackendError: the named backend cannot do this.
    """
    given = {"query": query, "key": key, "value": value, "attn_mask": mask, "sink_logits": options.sink_logits}
    refuse_nested(where, given | {"temperature": options.temperature})
    query, key, value = autocast_together(query, key, value)
    _check_tensors(where, query, key, value, options.enable_gqa)
    shape = (*query.shape[:3], key.shape[2])
    mask, options = without_causal_bias(where, mask, options, query, shape[3])
    chosen = normalization(where, options.normalizer)
    whole_rows = chosen.kind in ROW_NORMALIZERS
    alignment = one_of(f"{where}(causal_alignment=...)", options.causal_alignment, ("top-left", "bottom-right"))
    left, right = _window(where, options)
    asked = asked_names(where, options.stats, rowwise=chosen.kind if whole_rows else None)
    names = asked if whole_rows else with_kept(asked)
    mask = None if mask is None else checked_mask(where, mask, query, shape)
    if not isinstance(options.first_tokens, int) or options.first_tokens < 1:
        raise InputError(f"{where}(first_tokens=...) must be an int of at least 1, got {options.first_tokens!r}.")
    softcap = options.softcap
    if softcap is not None:
        softcap = positive_number(f"{where}(softcap=...)", softcap, "softcap(x) = c tanh(x / c); None turns it off.")
    features = _features(options, mask, names, packing, left, right)
    if whole_rows:
        features |= {"normalizer"}
    multiplier = _multiplier(where, query, options)
    if chosen.kind == "topk" and not isinstance(options.temperature, Tensor) and options.temperature == math.inf:
        raise InputError(
            f"{where}(temperature=inf) makes all scores equal, so that top-k would take the first keys, not the "
            "largest. Use a large number such as 1e6, which keeps their order."
        )
    bottom_right = alignment == "bottom-right"
    if chosen.kind == "scalable_softmax":
        offsets = None if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
        counts = structured_visible_keys(query, shape[3], mask, Structure(left, right, bottom_right, offsets))
        multiplier = _scaled(where, multiplier, chosen, counts, query)
    backend = table.resolve(options.backend, features, _given(query, value))
    return Call(
        query=query,
        key=key,
        value=value,
        mask=mask,
        multiplier=multiplier,
        sink=_joined_sink(where, query, options.sink_logits, chosen),
        left=left,
        right=right,
        bottom_right=bottom_right,
        softcap=softcap,
        dropout_p=_dropout(where, options.dropout_p),
        asked=asked,
        names=names,
        first_tokens=options.first_tokens,
        first_keys=_first_keys(mask, options.first_tokens) if "first_token_mass" in names else None,
        positions=None,
        rows=None,
        packing=packing,
        backend=backend.name,
        normalizer=chosen.kind if whole_rows else "softmax",
        kind=chosen.kind,
        number=chosen.number,
        per_head=_parameter(where, query, chosen) if whole_rows else None,
    )


def autocast_together(query: Any, key: Any, value: Any = None) -> tuple[Any, Any, Any]:
    """Tensors of several types in the one that autocast computes attention in, where it is on, as SDPA takes them.

    Tensors of one type stay as they are: what autocast did not round is computed with all its digits.
    """
    given = [part for part in (query, key, value) if isinstance(part, Tensor)]
    if len({part.dtype for part in given}) < 2:
        return query, key, value
    kind = given[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)
    query, key, value = (
        part.to(dtype) if isinstance(part, Tensor) and part.dtype in _NARROW else part for part in (query, key, value)
    )
    return query, key, value


def _check_tensors(where: str, query: Tensor, key: Tensor, value: Tensor | None, enable_gqa: bool) -> None:
    tensors = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{where}({name}=...) must be a tensor, got {type(tensor).__name__}.")
        if tensor.dim() != 4:
            raise InputError(
                f"{where}({name}=...) must have 4 dimensions [batch, heads, tokens, size], got {list(tensor.shape)}. "
                "Add the missing ones with unsqueeze, e.g. query[None, None] for one head of one sequence."
            )
        if tensor.dtype not in DTYPES:
            raise InputError(f"{where}({name}=...) must be float16, bfloat16, float32 or float64, got {tensor.dtype}.")
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise InputError(
                f"{where}: query is {query.dtype} on {query.device} but {name} is {tensor.dtype} on {tensor.device}. "
                "Bring them to one type and device."
            )
    batch, heads, _, size = query.shape
    if key.shape[0] != batch or key.shape[3] != size:
        raise InputError(
            f"{where}: key must be [{batch}, heads, keys, {size}] to match query {list(query.shape)}, got "
            f"{list(key.shape)}."
        )
    if value is not None and value.shape[:3] != key.shape[:3]:
        raise InputError(
            f"{where}: value must be [{', '.join(map(str, key.shape[:3]))}, size] to match key, got "
            f"{list(value.shape)}."
        )
    groups = key.shape[1]
    if heads != groups and (groups == 0 or heads % groups != 0):
        raise InputError(
            f"{where}: {heads} query heads cannot share {groups} key heads: the first must be a multiple of the second."
        )
    if heads != groups and not enable_gqa:
        raise InputError(
            f"{where}: query has {heads} heads and key {groups}. If {heads // groups} query heads share each key head "
            "(grouped-query attention), pass enable_gqa=True."
        )


def checked_window(where: str, window_size: Any) -> tuple[int, int]:
    """``window_size`` as two ints.

    Raises:
        InputError: it is anything else, or a side is below -1.
    """
    try:
        left, right = window_size
    except (TypeError, ValueError):
        left = right = None
    if not all(isinstance(side, int) and not isinstance(side, bool) and side >= -1 for side in (left, right)):
        raise InputError(
            f"{where}(window_size=...) must be (left, right): two ints of keys on each side, -1 for no limit; got "
            f"{window_size!r}."
        )
    assert isinstance(left, int)
    assert isinstance(right, int)
    return left, right


def _window(where: str, options: Options) -> tuple[int, int]:
    left, right = checked_window(where, options.window_size)
    left, right = (UNBOUNDED if side == -1 else side for side in (left, right))
    return left, min(right, 0) if options.is_causal else right


def _multiplier(where: str, query: Tensor, options: Options) -> Tensor:
    """scale / T as a 3-D tensor, float32 at least."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = options.scale
    if scale is None:
        scale = 1.0 / math.sqrt(max(query.shape[3], 1))
    elif isinstance(scale, bool) or not isinstance(scale, int | float | torch.SymFloat) or not abs(scale) < math.inf:
        raise InputError(f"{where}(scale=...) must be a finite number or None for 1/sqrt(head size), got {scale!r}.")
    temperature = options.temperature
    if isinstance(temperature, Tensor):
        return divided(scale, _temperature(where, temperature, query).to(dtype))
    number = positive_number(f"{where}(temperature=...)", temperature, TEMPERATURE_ADVICE, infinite=True)
    multiplier = scale / number
    if number < _SMALLEST and abs(multiplier) > torch.finfo(dtype).max:
        raise InputError(
            f"{where}(temperature=...) is {number}: scale / temperature overflows {dtype}. Use 1e-30 or more."
        )
    return torch.full((1, 1, 1), multiplier, dtype=dtype, device=query.device)


def _temperature(where: str, temperature: Tensor, query: Tensor) -> Tensor:
    shape = query.shape[:3]
    if not temperature.dtype.is_floating_point:
        raise InputError(f"{where}(temperature=...) must be a floating tensor, got {temperature.dtype}.")
    if temperature.dim() == 1:
        raise InputError(
            f"{where}(temperature=...) has one dimension, {list(temperature.shape)}: it would act on queries, not "
            "on heads. For one temperature per head pass temperature[:, None] ([H, 1]); per query, "
            "temperature[None, None, :]."
        )
    fits = temperature.dim() <= 3 and all(
        size in (1, full) for size, full in zip(temperature.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise InputError(
            f"{where}(temperature=...) must broadcast to [batch, heads, queries] = {list(shape)}, got "
            f"{list(temperature.shape)}."
        )
    return temperature.reshape((1,) * (3 - temperature.dim()) + tuple(temperature.shape))


def _sink(where: str, query: Tensor, sink: Tensor | None) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor) or sink.shape != (query.shape[1],) or not sink.dtype.is_floating_point:
        came = list(sink.shape) if isinstance(sink, Tensor) else type(sink).__name__
        raise InputError(
            f"{where}(sink_logits=...) must be a floating tensor [heads] = [{query.shape[1]}], got {came}."
        )
    return sink


def _joined_sink(where: str, query: Tensor, sink: Tensor | None, chosen: Normalization) -> Tensor | None:
    """The logit that takes weight and gives no value: of ``sink_logits``, of the normalizer, or of both together."""
    own = _sink(where, query, sink)
    if own is not None and chosen.kind in ROW_NORMALIZERS:
        raise InputError(
            f"{where}(sink_logits=...) is a logit of softmax; normalizer={chosen.kind!r} has no sink. Leave it out; "
            "a model that brings one (gpt-oss) takes softmax's own maps only: softmax_plus_one, Sink, scalable_softmax."
        )
    if chosen.kind == "softmax_plus_one":
        given = query.new_zeros(query.shape[1], dtype=torch.promote_types(query.dtype, torch.float32))
    elif chosen.kind == "sink":
        assert chosen.per_head is not None
        given = per_head(where, "the sink's logit", chosen.per_head, query)
    else:
        return own
    return given if own is None else torch.logaddexp(own.to(given.dtype), given)


def _parameter(where: str, query: Tensor, chosen: Normalization) -> Tensor | None:
    """What a map of whole rows has per head, [H]."""
    if chosen.per_head is None:
        return None
    return per_head(where, "alpha" if chosen.kind == "entmax" else "bias", chosen.per_head, query).contiguous()


def _scaled(where: str, multiplier: Tensor, chosen: Normalization, counts: Tensor, query: Tensor) -> Tensor:
    """Scalable softmax is a row multiplier: s log n, n the visible keys of the row."""
    assert chosen.per_head is not None
    s = per_head(where, "s", chosen.per_head, query)
    return multiplier * (s[:, None] * counts.clamp(min=1).to(s.dtype).log()).to(multiplier.dtype)


def _dropout(where: str, dropout_p: float) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float) or not 0 <= dropout_p <= 1:
        raise InputError(f"{where}(dropout_p=...) must be a probability from 0 to 1, got {dropout_p!r}.")
    return float(dropout_p)


def _first_keys(mask: Tensor | None, first_tokens: int) -> Tensor | None:
    """The first tokens [B|1, K]: a key that no query of the sequence may see under the mask is padding, not a token."""
    if mask is None:
        return None
    visible = mask if mask.dtype == torch.bool else ~(mask <= torch.finfo(mask.dtype).min / 2)
    return first_true(visible.detach().any(dim=2).any(dim=1), first_tokens)


def first_true(tokens: Tensor, count: int) -> Tensor:
    """The first ``count`` True places of each row of ``tokens`` [B, K]."""
    return tokens & (tokens.cumsum(-1) <= count)


def _given(query: Tensor, value: Tensor | None) -> table.Given:
    size = max(query.shape[3], 0 if value is None else value.shape[3])
    return table.Given(_NAMES[query.dtype], query.device.type, size)


def _features(
    options: Options, mask: Tensor | None, names: tuple[str, ...], packing: Packing | None, left: int, right: int
) -> frozenset[str]:
    asked = {
        "second_derivative": transforms.second_derivative(),
        "derivative_in_graph": transforms.derivative_in_graph(),
        "mask": mask is not None and mask.dtype == torch.bool,
        "bias": mask is not None and mask.dtype != torch.bool,
        "causal": options.is_causal,
        "window": left < UNBOUNDED or 0 < right < UNBOUNDED,
        "gqa": options.enable_gqa,
        "softcap": options.softcap is not None,
        "sink": options.sink_logits is not None,
        "dropout": options.dropout_p > 0,
        "temperature": isinstance(options.temperature, Tensor),
        "varlen": packing is not None,
        "second_pass": "gini" in names or "key_mass" in names,
        "score_variance": "score_variance" in names,
    }
    return frozenset(feature for feature, needed in asked.items() if needed)
