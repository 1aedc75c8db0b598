"""Attention that a model computes itself: a softmax is followed to the product in which its weights meet values.

The softmax's scores are read, so the reading is right only if the weights that meet the values are the softmax's own.
Allowed in between are views, changes of type, dropout, and factors that are the same for all keys of a row (a head
mask, p / sum p). Whatever else changes the weights makes the site skipped by name. So does a product that sums over
another axis than the softmax's, and a softmax over features instead of tokens (``tensor_axes``).

Not seen: weights that are normalised without a softmax (exp and a division), and weights that are multiplied with
values element by element and then summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from attemper.call.request import Options
from attemper.sites.identity import FACTOR, Origins, Places
from attemper.sites.observation import AttentionCall, UnsupportedCallError, four_dimensional, heads_of
from attemper.sites.tensor_axes import (
    CONVERSIONS,
    PRODUCTS,
    RESHAPES,
    VIEWS,
    FeatureAxes,
    Features,
    FunctionCall,
    Product,
    functions,
    is_weight,
    marked_axes,
    product,
)

ROUTER = (
    "its softmax runs over the outputs of a linear layer (a router's experts, classes), not over tokens; if these are "
    "keys, put attemper.tap beside it"
)
CHANNELS = (
    "its softmax runs over channels, not over tokens: what it weighs are features, as in cross-covariance attention"
)
FACTORED = (
    "its softmax runs over tokens once for each output of a linear layer, without queries, as in factorised (linear) "
    "attention; if these outputs are queries, put attemper.tap beside it"
)
LEARNED = (
    "what its softmax weighs are parameters of the model, not tokens; if these are keys, put attemper.tap beside it"
)
MIXED = (
    "its softmax runs over parameters of the model (a learned mix, of layers say), not over scores of queries and "
    "keys; if it is attention, put attemper.tap beside it"
)
OTHER_AXIS = "the product with its values sums over another axis than its softmax"
OVERWRITTEN = (
    "its scores are overwritten before they could be read, or its weights after the softmax; put attemper.tap beside it"
)
RANDOM = "its weights are not a softmax of its scores ({}); put attemper.tap beside it"
CHANGED = "its weights are changed between the softmax and the values ({}); put attemper.tap beside it"

_SOFTMAX = functions("softmax") | {F.softmax, torch.special.softmax}
_LOG_SOFTMAX = functions("log_softmax") | {F.log_softmax, torch.special.log_softmax}
_OTHER_SOFTMAX = {F.gumbel_softmax, F.softmin}
_ANY_SOFTMAX = _SOFTMAX | _LOG_SOFTMAX | _OTHER_SOFTMAX
_EXP = functions("exp") | {Tensor.exp_}
_SAME = {
    *(F.dropout, torch.dropout, torch.dropout_),
    *functions("clone", "nan_to_num", "nan_to_num_"),
    *CONVERSIONS,
    *attrgetter("detach", "requires_grad_", "__pos__")(Tensor),
}
"""What leaves weights what they are: a change of type or place, dropout, zeros for rows without a key."""
_FACTORS = PRODUCTS | {Tensor.mul_, Tensor.__imul__, Tensor.div_, Tensor.__itruediv__}
_FILLS = functions("masked_fill") | {Tensor.masked_fill_}
_NO_CHANGE = {F.linear, F.embedding, F.embedding_bag}
"""Functions whose result is not weights any more, even if it happens to have their shape."""
_PARTS = {torch.cat, torch.concat, torch.concatenate, F.pad}
"""Functions after which weights are still weights, of other keys."""


@dataclass
class _Softmax:
    """One softmax, which is reported or skipped at most once."""

    scores: Tensor | None
    version: int | None
    learned: bool = False
    """Whether its scores are a parameter, or a view of one."""
    over_features: str | None = None
    """Why it is no attention, where it runs over features: whatever becomes of its weights then."""
    done: bool = False
    overwritten: bool = False
    """Whether a part of its weights was written to: without version counters (inference) nothing else tells."""
    places: Places = frozenset()
    """Memory of the queries and keys that its scores are the product of."""


@dataclass(frozen=True)
class _Weights:
    """A tensor of weights, and how to read it."""

    softmax: _Softmax
    scores: Tensor
    """The softmax's scores with the axes that the weights have now."""
    unfolded: Tensor | None
    """Scores before their leading axes were merged, as long as nothing but merging happened."""
    key: int
    """Its axis of keys."""
    version: int | None
    logarithm: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class HandAttention:
    """A softmax that has met its values: scores [..., Q, K], or the reason why they cannot be read."""

    scores: Tensor | None
    reason: str | None = None
    attends: bool = True
    """False: what it weighs are no tokens. Attention with a ``reason`` may be a part of what its module attends."""
    places: Places = frozenset()
    """Memory of its queries and keys."""


class ByHand:
    """Follows every softmax of a forward pass."""

    def __init__(self, axes: FeatureAxes, origins: Origins) -> None:
        self._weights = WeakTensorKeyDictionary()
        self._axes, self._origins = axes, origins

    def follow(self, call: FunctionCall) -> HandAttention | None:
        """Notes a call that has run; returns what was found if this was where weights met values."""
        if call.func in _ANY_SOFTMAX:
            self._begin(call)
            return None
        if not self._weights:
            return None
        weights = next((part for part in call.tensors() if part in self._weights), None)
        if weights is None:
            return None
        known = self._weights[weights]
        found = product(call)
        if found is not None and len(found.operands) > 1:
            return self._meet(weights, known, found)
        for tensor, trace in _pass_on(call, weights, known):
            self._weights[tensor] = trace
            if tensor is weights and trace.reason is not None:
                trace.softmax.overwritten = True
        return None

    def _begin(self, call: FunctionCall) -> None:
        func, args, kwargs, result = call
        scores = call.first()
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if func is F.gumbel_softmax:
            dim = kwargs.get("dim", args[4] if len(args) > 4 else -1)
        if not isinstance(scores, Tensor) or not isinstance(dim, int) or scores.dim() < 2:
            return
        reason = RANDOM.format(func.__name__) if func in _OTHER_SOFTMAX else None
        if result.data_ptr() == scores.data_ptr():
            reason = OVERWRITTEN
        over_features = _over_features(self._axes.of(scores), dim % scores.dim(), scores.shape[dim])
        learned, places, scores = is_weight(scores), self._origins.of_scores(scores), scores.detach()
        # Without a version counter nothing would show that scores were overwritten.
        scores = scores.clone() if scores.is_inference() else scores
        key = dim % scores.dim()
        softmax = _Softmax(scores, _version(scores), learned, over_features, places=places)
        self._weights[result] = _Weights(
            softmax, scores, scores, key, _version(result), logarithm=func in _LOG_SOFTMAX, reason=reason
        )

    def _meet(self, weights: Tensor, known: _Weights, found: Product) -> HandAttention | None:
        """What the product of weights with something else says."""
        softmax = known.softmax
        if softmax.done or known.logarithm:
            return None
        softmax.done = True
        place = next(place for place, operand in enumerate(found.operands) if operand is weights)
        known = _with_single_key(known, found, place)
        others = [self._weights[operand] for operand, _ in _others(found, place) if operand in self._weights]
        factor = any(other.softmax.over_features is None for other in others)
        changed = FACTOR if factor else None if softmax.learned else known.reason
        reason = softmax.over_features or changed or self._refusal(weights, known, found, place)
        changed_scores = softmax.scores is None or _version(softmax.scores) != softmax.version
        if reason is None and (_version(weights) != known.version or softmax.overwritten or changed_scores):
            reason = OVERWRITTEN
        softmax.scores = None
        if reason is not None:
            return HandAttention(None, reason, attends=reason == changed, places=softmax.places)
        return HandAttention(_order(_scores_of(known, weights), known, found, place), places=softmax.places)

    def _refusal(self, weights: Tensor, known: _Weights, found: Product, place: int) -> str | None:
        """Why this product is not attention over tokens."""
        names = found.names[place]
        key = names[known.key]
        rows = [axis for axis, name in enumerate(names) if name in _queries(found, place)]
        if key in found.out or any(names[axis] not in found.out for axis in rows):
            return OTHER_AXIS
        if known.softmax.learned:
            return MIXED
        features = self._axes.of(weights)
        if reason := _over_features(features, known.key, weights.shape[known.key]):
            return reason
        if features.direct and any(axis in features.axes for axis in rows):
            return FACTORED
        for operand, letters in _others(found, place):
            if key in letters and letters.index(key) in self._axes.of(operand).axes:
                return CHANNELS
            if key in letters and is_weight(operand):
                return LEARNED
        return None


def _over_features(features: Features, key: int, keys: int) -> str | None:
    """Why a softmax over the axis ``key`` is no attention; None where it is not known to run over features.

    A layer's single output is an axis of length 1, which no change of shape can follow.
    """
    lost = keys == 1 and features.direct and not features.axes
    if key not in features.axes and not lost:
        return None
    return ROUTER if features.direct else CHANNELS


def read(module: nn.Module, found: HandAttention) -> AttentionCall:
    """Scores that a model has computed itself: as a bias on products that are all 0."""
    if found.scores is None:
        raise UnsupportedCallError(module, found.reason or CHANGED)
    grid = four_dimensional(found.scores, heads_of(module))
    batch, heads, queries, keys = grid.shape
    zero = torch.zeros((), dtype=grid.dtype, device=grid.device)
    query, key = zero.expand(batch, heads, queries, 1), zero.expand(batch, heads, keys, 1)
    return AttentionCall(query, key, grid, Options(scale=1.0))


def _pass_on(call: FunctionCall, weights: Tensor, known: _Weights) -> list[tuple[Tensor, _Weights]]:
    """What becomes of weights in a function that is no product: each tensor that still holds them."""
    func, result = call.func, call.result
    if func is Tensor.__setitem__ and call.args[0] is weights:
        return [(weights, replace(known, reason=CHANGED.format("an assignment")))]
    if func in RESHAPES or func in VIEWS:
        return list(_views(call, known))
    if not isinstance(result, Tensor) or (func in _NO_CHANGE and known.key == weights.dim() - 1):
        return []
    if not result.is_floating_point() or (result.shape != weights.shape and func not in _PARTS):
        return []
    here = replace(known, version=_version(result))
    if known.logarithm and func in _EXP:
        return [(result, replace(here, logarithm=False))]
    if func in _SAME or _one_factor_per_row(call, weights, known):
        return [(result, here)]
    return [(result, replace(here, reason=known.reason or CHANGED.format(_name(func))))]


def _views(call: FunctionCall, known: _Weights) -> Iterator[tuple[Tensor, _Weights]]:
    """Views of weights, each with its scores; skipped by name where a view holds only a part of them."""
    first: Tensor = call.first()
    results = [call.result] if isinstance(call.result, Tensor) else list(call.result)
    marks = marked_axes(call, frozenset((known.key,)))
    for part, marked in zip(results, marks, strict=True):
        only = next(iter(marked)) if len(marked) == 1 else None
        key = only if first.shape[known.key] > 1 else _length_one(part, known.key)
        whole = part.numel() == first.numel() and key is not None and part.shape[key] == first.shape[known.key]
        if known.reason is not None or not whole:
            reason = known.reason or CHANGED.format(_name(call.func))
            yield part, replace(known, key=key or 0, version=_version(part), reason=reason)
            continue
        assert key is not None
        if call.func in RESHAPES:
            scores = known.scores.reshape(part.shape)
            merged = part.dim() < known.scores.dim() and part.shape[-2:] == known.scores.shape[-2:]
            unfolded = known.unfolded if merged else None
        else:
            scores = call.func(known.scores, *call.args[1:], **call.options())
            unfolded = None
        yield part, replace(known, scores=scores, unfolded=unfolded, key=key, version=_version(part))


def _name(func: Any) -> str:
    return getattr(func, "__name__", "a function").strip("_")


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _length_one(after: Tensor, key: int) -> int | None:
    """Where an axis of a single key has gone: such an axis leaves no trace, and any of length 1 reads the same."""
    if key < after.dim() and after.shape[key] == 1:
        return key
    return next((axis for axis in reversed(range(after.dim())) if after.shape[axis] == 1), None)


def _with_single_key(known: _Weights, found: Product, place: int) -> _Weights:
    """A single key cannot be followed, and need not: the axis of length 1 that is summed over is as good."""
    sizes, names = found.operands[place].shape, found.names[place]
    if sizes[known.key] > 1:
        return known
    summed = [axis for axis, name in enumerate(names) if sizes[axis] == 1 and name not in found.out]
    return replace(known, key=summed[-1]) if summed else known


def _one_factor_per_row(call: FunctionCall, weights: Tensor, known: _Weights) -> bool:
    """Whether this multiplies each row as a whole, which changes the row's output and not its distribution."""
    func, args, kwargs, _ = call
    if func in _FILLS:
        mask, value = (*args[1:], *(kwargs[name] for name in ("mask", "value") if name in kwargs))[:2]
        return args[:1] == (weights,) and value == 0 and _same_for_all_keys(mask, weights, known.key)
    if func not in _FACTORS or kwargs.get("rounding_mode") is not None:
        return False
    given = (*args, *(kwargs[name] for name in ("input", "other") if name in kwargs))[:2]
    if "div" in func.__name__ and given[0] is not weights:
        return False
    other = given[1] if given[0] is weights else given[0]
    return other is not weights and _same_for_all_keys(other, weights, known.key)


def _same_for_all_keys(factor: Any, weights: Tensor, key: int) -> bool:
    if not isinstance(factor, Tensor):
        return True
    axis = key - weights.dim() + factor.dim()
    return axis < 0 or factor.shape[axis] == 1


def _others(found: Product, place: int) -> list[tuple[Tensor, tuple[str, ...]]]:
    pairs = zip(found.operands, found.names, strict=True)
    return [pair for other, pair in enumerate(pairs) if other != place]


def _queries(found: Product, place: int) -> list[str]:
    """Names of the weights' axes that tell queries: what no other operand has. A matrix product names its own."""
    names = found.names[place]
    if "sum" in names:
        return [name for name in names if name in ("row", "column")]
    shared = {name for _, letters in _others(found, place) for name in letters}
    return [name for name in names if name not in shared]


def _scores_of(known: _Weights, weights: Tensor) -> Tensor:
    """Scores in which masks of a half-precision model are -inf: its lowest number is none of float32's."""
    scores = known.scores if known.unfolded is None else known.unfolded
    scores = scores if scores.is_floating_point() else scores.to(weights.dtype)
    if torch.finfo(weights.dtype).min <= torch.finfo(scores.dtype).min / 2:
        return scores
    return scores.masked_fill(scores <= torch.finfo(weights.dtype).min / 2, -torch.inf)


def _order(scores: Tensor, known: _Weights, found: Product, place: int) -> Tensor:
    """Scores as [..., Q, K]; a product of 4-D weights with values as [B, H, Q, K]."""
    names = found.names[place]
    if scores.dim() != len(names) or "sum" in names:
        # A matrix product has its keys last, or before the queries where the weights stand on the right.
        flipped = known.key != len(names) - 1
        scores = scores.transpose(-2, -1) if flipped and len(names) > 1 else scores
        return scores if len(names) > 1 else scores[None]
    queries = _queries(found, place)
    shared = [name for name in names if name not in queries and name != names[known.key]]
    # Batch before heads: so the output has them, also where the weights are "hnij" (MSA Transformer).
    shared.sort(key=lambda name: found.out.index(name) if name in found.out else len(found.out))
    # Values without heads are shared by all heads: "bhqk,bkd->bhqd".
    lead = shared if len(shared) > 1 else shared + queries[:-1]
    rows = queries if len(shared) > 1 else queries[-1:]
    grid = scores.permute([names.index(name) for name in (*lead, *rows, names[known.key])])
    if len(rows) == 1:
        return grid
    return grid.flatten(len(lead), -2) if rows else grid.unsqueeze(-2)
