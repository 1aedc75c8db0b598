"""``attemper.pattern``: the exact weights of one head, or of all, for one text, with its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from attemper.call.request import Request
from attemper.checks import did_you_mean, whole_number
from attemper.errors import InputError
from attemper.monitor.calls import CallNumber
from attemper.monitor.checked_model import check_batch, check_model, title, why_nothing
from attemper.monitor.collector import Collector
from attemper.monitor.exact_weights import head_groups, ids_of_call, naming, weights
from attemper.monitor.forward import observation, run
from attemper.monitor.head_roles import RoleReader, Scores
from attemper.monitor.options import Scope
from attemper.readings.labels import layer_of
from attemper.readings.roles import role_of
from attemper.results.pattern import Pattern, Patterns
from attemper.sites.padding import CallContext
from attemper.statistics import ONE_PASS
from attemper.text import count, first_of

MOST_LISTED = 20
"""Sites that an error lists."""


class PatternKeywords(TypedDict, total=False):
    """Those of :func:`pattern` beside ``head``."""

    site: str | None
    layer: int | None
    sequence: int | None
    call: int | None
    tokenizer: Any
    tokens: Sequence[str] | None
    max_weights: int


@overload
def pattern(model: nn.Module, batch: Any, *, head: int, **options: Unpack[PatternKeywords]) -> Pattern: ...
@overload
def pattern(model: nn.Module, batch: Any, *, head: None = None, **options: Unpack[PatternKeywords]) -> Patterns: ...
def pattern(
    model: nn.Module,
    batch: Any,
    *,
    site: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    sequence: int | None = None,
    call: int | None = None,
    tokenizer: Any = None,
    tokens: Sequence[str] | None = None,
    max_weights: int = 2048 * 2048,
) -> Pattern | Patterns:
    """The exact attention weights of one head for one text, with its tokens; without ``head``, those of all heads.

    The batch runs through the model once, without gradients, as in :func:`attemper.scan`; every site that a scan sees
    has a pattern, whatever computes its attention. The weights follow from the queries, keys and masks of that call
    by :func:`attemper.functional.dense_weights`, in float64. Padded tokens are left out of rows and columns. ::

        attemper.pattern(model, tokenizer(text, return_tensors="pt"), layer=3, head=8, tokenizer=tokenizer)
        attemper.pattern(model, tokenizer(text, return_tensors="pt"), tokenizer=tokenizer).to_html("heads.html")

    Args:
        model: any module.
        batch: dict (``model(**batch)``), tuple or list (``model(*batch)``), or tensor (``model(batch)``).
        site: name of a site, as in ``Scan.sites``; or
        layer: number of its block; where blocks run several times, by the order of calls. For one head neither is
            needed where the model has one site; for all heads both may be left out: those of the whole model.
        head: from 0; None for all heads.
        sequence: which one of the batch, from 0; None for the only one.
        call: which of the calls of ``site``, from 0, where its module attends several times in a pass: another way to
            name its sites ``name``, ``name#2``, ...
        tokenizer: names the ids that the model was given: an object with ``convert_ids_to_tokens`` or ``decode``, or
            a function from a list of ids to strings. Without it ids are labels, and places (``#0``) where there are
            no ids: pixels, earlier keys of a cache.
        tokens: labels of the keys, in place of a tokenizer; with or without those of padding.
        max_weights: the most that are kept, queries times keys times heads.

    Returns:
        A :class:`Pattern`: ``.weights`` [Q, K], ``.tokens``, ``.key_tokens``, ``.role``; ``.to_png(path)``. Without
        ``head``, :class:`Patterns`: a sequence of them, as the model ran; ``.to_html(path)``.

    Raises:
        InputError: there is no such site, layer, head, sequence or call; several could be meant; the site was not
            measured; or there are more than ``max_weights`` weights.
    """
    _check(model, batch, site=site, layer=layer, head=head, sequence=sequence, call=call, max_weights=max_weights)
    _check_labels(tokens, tokenizer)
    asked = partial(_is_asked, site, layer, call)
    roles = RoleReader(tokenizer, "pattern")
    collector = WeightsCollector(
        model, CallContext(), asked=asked, head=head, sequence=sequence, max_weights=max_weights, roles=roles
    )
    with observation(model, collector):
        run("pattern: the batch", model, batch, collector)
    seen = _asked_calls(model, collector, site, layer, call)
    if head is None:
        kept = _all_kept(collector, _calls_of_sites(seen, call), max_weights)
        found = [one for part in kept for one in _patterns_of(part, collector, 0, tokens, tokenizer)]
        whole = site is None and layer is None
        return Patterns(found, name=title(model), skipped=collector.readings().skipped if whole else ())
    one = _one_call(seen, layer, call)
    if head >= one.shape[1]:
        raise InputError(f"pattern(head={head}): {one.number.site} has heads 0 to {one.shape[1] - 1}.")
    return _patterns_of(collector.kept[one], collector, head, tokens, tokenizer)[0]


def _check(model: Any, batch: Any, *, site: Any, layer: Any, **numbers: Any) -> None:
    check_model("pattern", model)
    check_batch("pattern", batch)
    if site is not None and layer is not None:
        raise InputError(f"pattern(site={site!r}, layer={layer!r}): give one of the two.")
    if site is not None and not isinstance(site, str):
        raise InputError(f"pattern(site=...) must be the name of a site, got {site!r}.")
    for name, number in (("layer", layer), *numbers.items()):
        optional = name != "max_weights"
        if number is None and optional:
            continue
        whole_number(f"pattern({name}=...)", number, least=0, none=", or None" if optional else "")


def _is_asked(site: str | None, layer: int | None, call: int | None, number: CallNumber) -> bool:
    """Whether a call may be the one that is asked for: its layer may be known only after the pass."""
    if call is not None and number.call != call + 1:
        return False
    if site is not None:
        return site == (number.site if call is None else number.name)
    return layer is None or layer in (layer_of(number.name), number.order)


def _asked_calls(
    model: nn.Module, collector: WeightsCollector, site: str | None, layer: int | None, call: int | None
) -> dict[SiteCall, str]:
    """The calls that were asked for, among those that were seen, and the names of their sites; at least one."""
    # A tap and the attention beside it are one site, under the tap's name.
    found = collector.readings()
    sites = {reading.name: reading.layer for reading in found.sites}
    site_of = collector.call_sites.site
    seen = {one: name for one in collector.seen if (name := site_of(one.number.site, one.mode)) in sites}
    names = list(dict.fromkeys(seen.values()))
    known = first_of(names, MOST_LISTED)
    skipped = {entry.name: entry.reason for entry in found.skipped}
    if site is not None and site not in names and site in skipped:
        raise InputError(f"pattern(site={site!r}): it was not measured: {skipped[site]}.")
    if not names:
        raise InputError(why_nothing("pattern", model, found.skipped))
    if site is not None and site not in names:
        near = did_you_mean(site, names)
        raise InputError(f"pattern(site={site!r}): there is no such site.{near} Sites: {known}.")
    asked = {one: name for one, name in seen.items() if layer is None or sites[name] == layer}
    if site is not None:
        asked = {one: name for one, name in seen.items() if site == (name if call is None else one.number.name)}
    if not asked:
        layers = sorted({number for number in sites.values() if number is not None})
        there = f"Layers: {', '.join(map(str, layers))}" if layers else f"No site has a number: {known}"
        raise InputError(f"pattern(layer={layer}): there is no such layer. {there}.")
    return asked


def _one_call(asked: dict[SiteCall, str], layer: int | None, call: int | None) -> SiteCall:
    """The call of one head, where no other could be meant."""
    modules = {one.number.name for one in asked}
    if len(modules) > 1:
        where = "the model" if layer is None else f"layer {layer}"
        several = first_of(list(dict.fromkeys(asked.values())), MOST_LISTED)
        raise InputError(f"pattern: {where} has several sites, name one by site=: {several}.")
    return _call_of_module(list(asked), call)


def _call_of_module(asked: list[SiteCall], call: int | None) -> SiteCall:
    """The call of one module, or of one site, that was asked for; the only one."""
    calls = f"{asked[0].number.name} attends {len(asked)} times in this pass"
    if call is None and len(asked) > 1:
        raise InputError(f"pattern: {calls}: say which, call=0 to {len(asked) - 1}.")
    if call is not None and call >= len(asked):
        raise InputError(f"pattern(call={call}): {calls}, 0 to {len(asked) - 1}.")
    return asked[call or 0]


def _calls_of_sites(asked: dict[SiteCall, str], call: int | None) -> list[SiteCall]:
    """One call for each site; with ``call``, for each module that attends so often."""
    groups: dict[str, list[SiteCall]] = {}
    for one, name in asked.items():
        groups.setdefault(name if call is None else one.number.name, []).append(one)
    fitting = [calls for calls in groups.values() if call is None or call < len(calls)]
    return [_call_of_module(calls, call) for calls in fitting or groups.values()]


def _all_kept(collector: WeightsCollector, chosen: list[SiteCall], max_weights: int) -> list[HeadWeights]:
    total = sum(math.prod(one.shape[1:]) for one in chosen)
    if total <= max_weights and all(one in collector.kept for one in chosen):
        return [collector.kept[one] for one in chosen]
    heads = sum(one.shape[1] for one in chosen)
    queries, keys = (max(one.shape[axis] for one in chosen) for axis in (2, 3))
    raise InputError(
        f"pattern: {count(heads, 'head')} of up to {queries:,} queries x {keys:,} keys have {total:,} weights, and "
        f"max_weights is {max_weights:,}. Take a text of at most {max(1, math.isqrt(max_weights // heads))} tokens, "
        f"one layer= or head=, or pass max_weights={total} (4 bytes each)."
    )


def _patterns_of(
    kept: HeadWeights, collector: WeightsCollector, first: int, tokens: Sequence[str] | None, tokenizer: Any
) -> list[Pattern]:
    """The weights of heads from ``first`` on without padding, and what their rows and columns are called."""
    call, weights = kept.call, kept.weights
    _, queries, keys = weights.shape
    same = call.kind == "self" and queries == keys
    key_labels = _labels(kept.key_ids, keys, tokenizer) if tokens is None else _given_labels(tokens, kept.keys, keys)
    query_labels = key_labels if same else _labels(kept.query_ids, queries, tokenizer)
    rows = torch.arange(queries) if kept.queries is None else kept.queries.nonzero().view(-1)
    columns = torch.arange(keys)
    if kept.queries is not None:
        weights = weights[:, rows]
    if kept.keys is not None:
        # A key of padding that some row gives weight to is part of the pattern.
        columns = (kept.keys | (weights != 0).flatten(0, 1).any(0)).nonzero().view(-1)
        weights = weights[:, :, columns]
    site = call.number.site
    about: dict[str, Any] = {
        "tokens": tuple(query_labels[row] for row in rows.tolist()),
        "site": site,
        "key_tokens": tuple(key_labels[column] for column in columns.tolist()),
        "kind": call.kind,
        "padding": (queries - len(rows), keys - len(columns)),
        "layer": collector.call_sites.layer(site, call.mode),
    }
    roles = [role_of({name: scores[at] for name, scores in kept.roles.items()}) for at in range(len(weights))]
    return [Pattern(own, head=first + at, role=roles[at], **about) for at, own in enumerate(weights)]


def _check_labels(tokens: Any, tokenizer: Any) -> None:
    """Refuses what names no tokens."""
    if tokens is not None and tokenizer is not None:
        raise InputError("pattern(tokens=..., tokenizer=...): give one of the two; tokens are named already.")
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str) and all(isinstance(t, str) for t in tokens)
    if tokens is not None and not listed:
        raise InputError(
            f"pattern(tokens=...) must be a sequence of strings, one for each key, got {type(tokens).__name__}."
        )
    naming(tokenizer, "pattern")


def _labels(ids: Tensor | None, length: int, tokenizer: Any) -> tuple[str, ...]:
    """A string for each of ``length`` tokens: of its id, or ``#place`` where the id is not known."""
    if ids is None:
        return tuple(f"#{place}" for place in range(length))
    numbers = [int(number) for number in ids.tolist()]
    names = naming(tokenizer, "pattern")
    known = [number for number in numbers if number >= 0]
    named = [str(number) for number in known] if names is None else names(known)
    following = iter(named)
    return tuple(next(following) if number >= 0 else f"#{place}" for place, number in enumerate(numbers))


def _given_labels(tokens: Sequence[str], real: Tensor | None, length: int) -> tuple[str, ...]:
    """``tokens`` for each of ``length`` keys: given for all of them, or for those that are no padding."""
    places = torch.arange(length) if real is None else real.nonzero().view(-1)
    if len(tokens) == length:
        return tuple(tokens)
    if len(tokens) != len(places):
        padding = "" if real is None else f" ({len(places)} without padding)"
        raise InputError(f"pattern(tokens=...) must have a string for each key, {length}{padding}; got {len(tokens)}.")
    named = dict(zip(places.tolist(), tokens, strict=True))
    return tuple(named.get(place, "") for place in range(length))


@dataclass(frozen=True, eq=False)
class SiteCall:
    """One attention call."""

    number: CallNumber
    kind: str
    shape: tuple[int, int, int, int]
    """[batch, heads, queries, keys]"""
    mode: str


@dataclass(frozen=True)
class HeadWeights:
    """The weights that a call gives to one head, or all, of one sequence."""

    call: SiteCall
    weights: Tensor
    """[H, Q, K], padding still in it."""
    queries: Tensor | None
    """[Q] bool: which queries are tokens; None for all."""
    keys: Tensor | None
    """[K] bool: which keys are tokens; None for all."""
    query_ids: Tensor | None
    key_ids: Tensor | None
    """[Q] and [K]: the token at each place, -1 where it is not known; None where no ids of this length were given."""
    roles: Scores
    """Of these heads."""


class WeightsCollector(Collector):
    """Takes note of every call, and keeps the weights of those that are asked for.

    ``asked``: whether a call is one of them. ``head`` None: of all heads. ``sequence`` None: the only one of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        context: CallContext,
        *,
        asked: Callable[[CallNumber], bool],
        head: int | None,
        sequence: int | None,
        max_weights: int,
        roles: RoleReader,
    ) -> None:
        super().__init__(model, context, Scope(ONE_PASS))
        self._asked, self._head, self._sequence, self._max_weights = asked, head, sequence, max_weights
        self._roles = roles
        self.seen: list[SiteCall] = []
        self.kept: dict[SiteCall, HeadWeights] = {}
        self._room = 0

    def begin(self) -> None:
        """Forgets a pass that did not go through."""
        super().begin()
        self.seen.clear()
        self.kept.clear()
        # Twice: a tap and the attention beside it, which are one site, are known to be so only after the pass.
        self._room = 2 * self._max_weights

    def note(self, module: nn.Module, number: CallNumber, kind: str, request: Request, real: Tensor | None) -> None:
        """Takes note of a call; computes the weights at once, since a cache may be written to afterwards."""
        problem = request.problem
        batch, heads, queries, _ = problem.query.shape
        size = problem.key.shape[2]
        seen = SiteCall(number, kind, (batch, heads, queries, size), "train" if module.training else "eval")
        self.seen.append(seen)
        if not self._asked(number) or (self._head or 0) >= heads:
            return
        place = self._of_batch(batch)
        chosen = range(heads) if self._head is None else range(self._head, self._head + 1)
        if self._head is not None and queries * size > self._max_weights:
            raise InputError(
                f"pattern: {number.site} has {queries:,} queries x {size:,} keys = {queries * size:,} weights a head, "
                f"and max_weights is {self._max_weights:,}. Take a shorter text, or pass max_weights={queries * size} "
                "(8 bytes each, several times over while they are computed)."
            )
        self._room -= len(chosen) * queries * size
        if self._head is None and self._room < 0:  # told when all calls are known
            self.kept.clear()
            return
        keys = self.key_tokens(module, size)
        if keys is None and kind == "self" and queries == size:
            keys = real
        ids = ids_of_call(self.context, kind, seen.shape)
        dtype = torch.promote_types(problem.query.dtype, torch.float32)
        groups = head_groups(problem, queries * size, chosen)
        found = torch.cat([weights(problem, place, group)[0].to(dtype) for group in groups])
        roles = self._roles.scores(problem, kind, real, ids, sequence=place, heads=chosen)
        own = ((part, place if part is not None and part.shape[0] > 1 else 0) for part in (real, keys, *ids))
        rows = (None if part is None else part[at].detach().cpu() for part, at in own)
        self.kept[seen] = HeadWeights(seen, found, *rows, roles=roles)

    def _of_batch(self, batch: int) -> int:
        if self._sequence is None and batch == 1:
            return 0
        if self._sequence is None or self._sequence >= batch:
            came = "none was chosen" if self._sequence is None else f"sequence={self._sequence} is not among them"
            raise InputError(f"pattern: the batch has sequences 0 to {batch - 1}, and {came}: pass one as sequence=.")
        return self._sequence
