"""From the options that a user gives to a checked call: the problem of a backend, and what its result shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from attemper.backends import table
from attemper.backends.contract import UNBOUNDED, Problem
from attemper.call import transforms
from attemper.call.attn_mask import check_mask, shows, without_causal_bias
from attemper.call.normalizer import Normalization, normalization, rowwise_of
from attemper.call.packing import Packing
from attemper.call.spans import Spans, span_keys
from attemper.call.temperature import row_multiplier
from attemper.checks import MOST, index_of, one_of, positive_number, refuse_nested, whole_number
from attemper.errors import InputError
from attemper.statistics import rowwise_names, state_columns

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16, torch.float32)
"""What autocast rounds: not float64."""
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}


@dataclass(eq=False)  # not frozen: that would triple the time to make one
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
    spans: Spans | None = None
    dropout_p: float = 0.0
    enable_gqa: bool = False
    backend: str = "auto"


class ScoreKeywords(TypedDict, total=False):
    """Those of ``Options`` that decide what a score is; :func:`attemper.attention` explains them."""

    temperature: float | Tensor
    causal_alignment: str
    window_size: tuple[int, int]
    softcap: float | None
    sink_logits: Tensor | None


class Keywords(ScoreKeywords, total=False):
    """Those of ``Options`` that are keywords of every public function with statistics."""

    normalizer: object
    stats: str | Iterable[str]
    first_tokens: int
    spans: Spans | None
    backend: str


Function = TypeVar("Function", bound=Callable[..., Any])


def shows_keywords(kind: type = Keywords, **defaults: Any) -> Callable[[Function], Function]:
    """Lets ``help()`` and ``inspect.signature`` show each keyword of ``kind`` instead of ``**options``.

    Its default is that of ``Options``, or stands in ``defaults``.
    """

    def mark(function: Function) -> Function:
        own = [one for one in signature(function).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        keywords = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=(vars(Options) | defaults)[name], annotation=annotation)
            for name, annotation in Options.__annotations__.items()
            if name in kind.__annotations__
        ]
        parameters = sorted([*own, *keywords], key=lambda one: one.kind)
        function.__signature__ = signature(function).replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return mark


def options_of(where: str, keywords: ScoreKeywords, *, kind: type = Keywords, **others: Any) -> Options:
    """The options of a public function that takes ``kind`` of keywords."""
    for name in keywords:
        if name not in kind.__annotations__:
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}")
    return Options(**others, **keywords)


@dataclass(frozen=True)
class Request:
    """A checked call: the problem that a backend solves, and what its result is to show."""

    problem: Problem
    asked: tuple[str, ...]
    names: tuple[str, ...]
    """What was asked, and what is always kept with it."""
    normalizer: str
    """The name that was given; ``problem.normalizer`` is softmax also with a sink or a scale."""
    population: int
    """All query rows of each sequence, of which the problem may hold some."""
    rows: Tensor | None = None
    """[R] int: which of them are measured; None for all."""

    def with_problem(self, **changes: Any) -> Request:
        return replace(self, problem=replace(self.problem, **changes))


def request_of(
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    options: Options,
    packing: Packing | None = None,
) -> Request:
    """Checks a call and brings it to one form. ``where`` is the public function, for messages.

    Raises:
        InputError: an argument has no meaning; the message says which, what was expected and what came.
        BackendError: the named backend cannot do this.
    """
    given = {"query": query, "key": key, "value": value, "attn_mask": mask, "sink_logits": options.sink_logits}
    refuse_nested(where, given | {"temperature": options.temperature})
    query, key, value = autocast_together(query, key, value)
    _check_tensors(where, query, key, value, options.enable_gqa)
    mask, options = without_causal_bias(where, mask, options, query, key.shape[2])
    chosen = normalization(where, options.normalizer)
    structure = _structure(where, options, packing)
    asked, names = chosen.statistics(where, options.stats)
    if "self_weight" in names and not knows_own_keys(options, query, key):
        raise InputError(
            f"{where}(stats=...): self_weight needs each query's own key, and queries over keys ({query.shape[2]} over "
            f"{key.shape[2]}) without causality or a window do not say where they stand. With a key-value "
            'cache pass causal_alignment="bottom-right" (they are the last); in cross attention leave it out.'
        )
    mask = None if mask is None else check_mask(where, mask, query, (*query.shape[:3], key.shape[2]))
    first_tokens, softcap = whole_number(f"{where}(first_tokens=...)", options.first_tokens), options.softcap
    if softcap is not None:
        softcap = positive_number(f"{where}(softcap=...)", softcap, "softcap(x) = c tanh(x / c); None turns it off.")
    features = _features(options, mask, names, structure) | ({"normalizer"} if chosen.rowwise else set())
    multiplier = row_multiplier(where, query, options.scale, options.temperature)
    chosen.check_temperature(where, options.temperature)
    size = max(query.shape[3], 0 if value is None else value.shape[3])
    given = table.Inputs(_NAMES[query.dtype], query.device.type, size, chosen.kernel)
    problem = Problem(
        query,
        key,
        value,
        mask,
        multiplier,
        backend=table.resolve(options.backend, features, given).name,
        **structure,
        softcap=softcap or 0.0,
        first_tokens=first_tokens,
        **_state(mask, asked, names, options.first_tokens, chosen.rowwise),
        span_keys=span_keys(where, options.spans, key, "span_mass" in names),
        **_parameters(where, query, options, chosen),
        dropout_p=_dropout(where, options.dropout_p),
    )
    if (scaled := chosen.multiplier(where, problem)) is not multiplier:
        problem = replace(problem, multiplier=scaled)
    return Request(problem, asked, names, chosen.name, query.shape[2])


def knows_own_keys(options: Options, query: Tensor, key: Tensor) -> bool:
    """Whether a call says which key is each query's own: as many queries as keys, or a rule with a diagonal."""
    rule = options.is_causal or options.causal_alignment == "bottom-right" or tuple(options.window_size) != (-1, -1)
    return rule or query.shape[2] == key.shape[2]


def names_of_call(stats: tuple[str, ...], options: Options, query: Tensor, key: Tensor) -> tuple[str, ...]:
    """Those of ``stats``, names of a reading, that a call has, whatever its normalizer and wherever its queries are."""
    names = rowwise_names(stats) if rowwise_of(options.normalizer) else stats
    missing = set() if knows_own_keys(options, query, key) else {"self_weight"}
    missing |= {"span_mass"} if options.spans is None else set()
    return tuple(name for name in names if name not in missing)


def _structure(where: str, options: Options, packing: Packing | None) -> dict[str, Any]:
    """Which keys a place sees without a mask, as ``Problem`` has it."""
    alignment = one_of(f"{where}(causal_alignment=...)", options.causal_alignment, ("top-left", "bottom-right"))
    left, right = (UNBOUNDED if side == -1 else side for side in check_window(where, options.window_size))
    return {
        "left": left,
        "right": min(right, 0) if options.is_causal else right,
        "bottom_right": alignment == "bottom-right",
        "cu_seqlens_q": None if packing is None else packing.cu_seqlens_q,
        "cu_seqlens_k": None if packing is None else packing.cu_seqlens_k,
    }


def _state(
    mask: Tensor | None, asked: tuple[str, ...], names: tuple[str, ...], first_tokens: int, rowwise: bool
) -> dict[str, Any]:
    """What a backend leaves for these statistics, as ``Problem`` has it."""
    return {
        "first_keys": _first_keys(mask, first_tokens) if "first_token_mass" in names else None,
        "columns": state_columns(names, rowwise=rowwise),
        "key_mass": "key_mass" in names,
        "maximum_gradient": "max_weight" in asked or "max_logit" in asked,
    }


def _parameters(where: str, query: Tensor, options: Options, chosen: Normalization) -> dict[str, Any]:
    """The normalizer with what it takes, as ``Problem`` has it."""
    parameter = chosen.parameter(where, query) if chosen.rowwise else None
    return {
        "normalizer": chosen.kernel,
        "number": chosen.number,
        "sink": chosen.sink(where, query, _sink(where, query, options.sink_logits)),
        "per_head": None if parameter is None else parameter.contiguous(),
    }


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
    check_types(where, tensors)
    batch, _, _, size = query.shape
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
    check_groups(where, tensors, enable_gqa)


def check_types(where: str, tensors: Mapping[str, Tensor]) -> None:
    """``InputError`` unless every tensor has one of ``DTYPES``, and the type and device of the first."""
    given, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"{where}({name}=...) must be float16, bfloat16, float32 or float64, got {tensor.dtype}.")
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise InputError(
                f"{where}: {given} is {first.dtype} on {first.device} but {name} is {tensor.dtype} on {tensor.device}. "
                "Bring them to one type and device."
            )


def check_groups(where: str, tensors: Mapping[str, Tensor], enable_gqa: bool) -> None:
    """``InputError`` unless the heads of the first tensor can share those of the second."""
    (query, heads), (key, groups) = [(name, tensor.shape[1]) for name, tensor in tensors.items()][:2]
    if heads != groups and (groups == 0 or heads % groups != 0):
        raise InputError(
            f"{where}: query heads ({heads}) cannot share key heads ({groups}): they must be a multiple of these."
        )
    if heads != groups and not enable_gqa:
        raise InputError(
            f"{where}: {query} has {heads} heads and {key} {groups}. If {heads // groups} query heads share each key "
            "head (grouped-query attention), pass enable_gqa=True."
        )


def check_window(where: str, window_size: Any) -> tuple[int, int]:
    try:
        left, right = map(index_of, window_size)
    except (TypeError, ValueError):
        left = right = None
    if left is None or right is None or not (-1 <= left <= MOST and -1 <= right <= MOST):
        raise InputError(
            f"{where}(window_size=...) must be (left, right): two ints of keys on each side, -1 for no limit; got "
            f"{window_size!r}."
        )
    return left, right


def _sink(where: str, query: Tensor, sink: Tensor | None) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor) or sink.shape != (query.shape[1],) or not sink.dtype.is_floating_point:
        came = list(sink.shape) if isinstance(sink, Tensor) else type(sink).__name__
        raise InputError(
            f"{where}(sink_logits=...) must be a floating tensor [heads] = [{query.shape[1]}], got {came}."
        )
    return sink


def _dropout(where: str, dropout_p: float) -> float:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p <= 1:
        raise InputError(f"{where}(dropout_p=...) must be a probability from 0 to 1, got {dropout_p!r}.")
    return float(dropout_p)


def _first_keys(mask: Tensor | None, first_tokens: int) -> Tensor | None:
    """The first tokens [B|1, K]: a key that no query of the sequence may see under the mask is padding, not a token."""
    if mask is None:
        return None
    return first_true(shows(mask).detach().any(dim=2).any(dim=1), first_tokens)


def first_true(tokens: Tensor, count: int) -> Tensor:
    """The first ``count`` True places of each row of ``tokens`` [B, K]."""
    return tokens & (tokens.cumsum(-1) <= count)


def _features(
    options: Options, mask: Tensor | None, names: tuple[str, ...], structure: dict[str, Any]
) -> frozenset[str]:
    left, right = structure["left"], structure["right"]
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
        "varlen": structure["cu_seqlens_q"] is not None,
        "second_pass": "gini" in names or "key_mass" in names,
        "score_variance": "score_variance" in names,
        "self_weight": "self_weight" in names,
        "span_mass": "span_mass" in names,
    }
    return frozenset(feature for feature, needed in asked.items() if needed)
