"""Attention calls and taps of one forward pass, until it went through: which of them are one attention, and its name.

A tap names the attention that it stands beside. Where that attention is seen otherwise as well, the site has the tap's
name and the attention's own numbers. In compiled code only taps are seen: the name is the same there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from attemper.call.attention import run
from attemper.call.call_sums import CallSums, accumulate, accumulates
from attemper.call.request import Options, Request
from attemper.call.result import AttentionStats
from attemper.readings.labels import JOINED, Modules, layer_of, pattern_of
from attemper.readings.sample import SiteKey
from attemper.sites.identity import Places, Sketch, partners
from attemper.sites.observation import AttentionCall
from attemper.sites.padding import CallContext
from attemper.text import call_of


@dataclass(frozen=True)
class Contribution:
    """What one call adds to a site."""

    key: SiteKey
    found: AttentionStats | CallSums
    queries: int
    keys: int
    tokens: Tensor | int
    """Real query rows of all sequences."""
    backend: str
    attention: str
    """Its type, one of ``ATTENTIONS``."""
    first_head: int
    """The number of its first head in the whole model."""
    counted: Tensor
    """``COUNTED`` and their rows, [2, statistics, H] float64."""
    roles: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Role -> the score of each head, where they are read."""


def measure(request: Request, real: Tensor | None, *, sums: bool = True) -> AttentionStats | CallSums:
    """What a call adds: ``sums`` on the device where its backend makes them, statistics of rows elsewhere.

    ``real``: [B, Q] bool, which of all its queries count.
    """
    with torch.no_grad():
        if sums and accumulates(request):
            included = None if real is None else _measured_rows(real.to(request.problem.query.device), request.rows)
            return accumulate(request, included)
        stats = run(request).stats
    assert stats is not None
    return with_real_rows(stats, real)


def with_real_rows(stats: AttentionStats, real: Tensor | None) -> AttentionStats:
    """Statistics of the queries that count, without a graph. ``real``: as in ``measure``."""
    if real is not None:
        stats = stats.where(_measured_rows(real.to(stats.device), stats.rows)[:, None])
    return stats.detach()


def _measured_rows(real: Tensor, rows: Tensor | None) -> Tensor:
    """[B, measured] of [B, Q]."""
    return real if rows is None else real[:, rows.to(real.device)]


@dataclass(frozen=True)
class CallNumber:
    """Which call of a pass it is."""

    name: str
    """Of the module or tap; and with the number of the call, from the second one on:"""
    site: str
    call: int
    """Of all calls of this name, from 1."""
    forward: int
    """In which forward of the module it is, from 1; and of the calls of that one:"""
    inner: int
    order: int
    """Of the forwards of all like modules, from 0: its layer where some of them run several times."""
    run: int
    """Which pass."""


@dataclass(eq=False)
class SeenCall:
    """An attention call, or a tap, of a pass that is running."""

    number: CallNumber
    module: str | None
    """The name of the module in whose forward it ran; None where nobody can tell."""
    mode: str
    is_tap: bool
    kept: bool = True
    """Whether it is of the sites that somebody wants."""
    places: Places = frozenset()
    arguments: Arguments | None = None
    sketch: Sketch | None = None
    contribution: Contribution | None = None
    reason: str | None = None
    """Why it was not measured."""
    made: Any = None
    """What a collector that computes with calls itself made of it."""

    @property
    def name(self) -> str:
        """Of its site, where each call of a pass is one."""
        return self.number.site


@dataclass(frozen=True)
class Arguments:
    """What a call's scores follow from beside queries and keys, as far as two calls can be compared without
    reading tensors.
    """

    scale: float | None
    """Divided by the temperature; None where that is a tensor."""
    size: int
    """D"""
    lengths: tuple[int, int]
    """Q and K"""
    masked: bool
    options: Options

    def difference(self, other: Arguments) -> str | None:
        """What is surely another in ``other``, as "a, not b"; None where nothing is."""
        if self.size != other.size or self.lengths != other.lengths:
            return None  # scores by hand have no queries
        pairs = [("scale", self.scale, other.scale), ("softcap", self.options.softcap, other.options.softcap)]
        if not self.masked and not other.masked and self.lengths[0] > 1:
            names = ("is_causal", "window_size")
            pairs += [(name, getattr(self.options, name), getattr(other.options, name)) for name in names]
        differing = [f"{name}={_short(one)}, not {_short(two)}" for name, one, two in pairs if not _same(one, two)]
        return " and ".join(differing) or None


def arguments_of(call: AttentionCall) -> Arguments | None:
    """The arguments of a call that was read; None of one whose queries and keys are not [B, H, tokens, D]."""
    if call.query.dim() != 4 or call.key.dim() != 4:
        return None
    options, size = call.options, call.query.shape[3]
    temperature = options.temperature
    scale = size**-0.5 if options.scale is None else options.scale
    scale = None if isinstance(temperature, Tensor) else scale / temperature
    return Arguments(scale, size, (call.query.shape[2], call.key.shape[2]), call.mask is not None, options)


def _same(one: object, two: object) -> bool:
    if isinstance(one, float) and isinstance(two, float):
        return abs(one - two) <= 1e-6 * abs(two)
    return one is None or two is None or one == two


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Pairing:
    """Which calls and taps are one attention. What has to be computed for it is computed once for each pair."""

    def __init__(self, differs: Callable[[SeenCall, SeenCall, str], None]) -> None:
        self._differs = differs
        """Called with a tap, the call beside it, and how the tap's arguments differ from the call's."""
        self._same: dict[tuple[str, str], bool] = {}

    def join(self, calls: Sequence[SeenCall]) -> list[SeenCall]:
        """The calls of a pass with those that are one attention as one: under the tap's name, as the call was seen."""
        taps = {number: call for number, call in enumerate(calls) if call.is_tap}
        if not taps:
            return list(calls)
        others = {number: call for number, call in enumerate(calls) if not call.is_tap}
        pairs = partners([(n, t.places) for n, t in taps.items()], [(n, c.places) for n, c in others.items()])
        pairs |= self._alike(
            {n: tap for n, tap in taps.items() if n not in pairs},
            {n: call for n, call in others.items() if n not in pairs.values()},
        )
        made = {number: self._one(calls[tap], calls[number]) for tap, number in pairs.items()}
        return [made.get(number, call) for number, call in enumerate(calls) if number not in pairs]

    def _alike(self, taps: dict[int, SeenCall], calls: dict[int, SeenCall]) -> dict[int, int]:
        """Pairs with nn.MultiheadAttention, which projects queries and keys where nobody sees them."""
        found: dict[int, int] = {}
        for number, tap in taps.items():
            for other, call in calls.items():
                if other not in found.values() and self._is_alike(tap, call):
                    found[number] = other
                    break
        return found

    def _is_alike(self, tap: SeenCall, call: SeenCall) -> bool:
        if tap.sketch is None or call.sketch is None or tap.sketch.shape != call.sketch.shape:
            return False
        pair = (tap.name, call.name)
        if pair not in self._same:
            self._same[pair] = tap.sketch.is_of(call.sketch)
        return self._same[pair]

    def _one(self, tap: SeenCall, call: SeenCall) -> SeenCall:
        if call.contribution is not None and tap.arguments is not None and call.arguments is not None:
            difference = tap.arguments.difference(call.arguments)
            if difference is not None:
                self._differs(tap, call, difference)
        kept = tap.kept or call.kept
        seen = call if call.contribution is not None else tap
        if seen.contribution is None:
            return replace(call, number=tap.number, is_tap=True, kept=kept, reason=call.reason or tap.reason)
        contribution = replace(seen.contribution, key=(tap.name, seen.contribution.key[1], call.mode))
        return replace(call, number=tap.number, is_tap=True, kept=kept, contribution=contribution, reason=None)


MOST_CALLS = 64
"""Calls of one module in one pass that may each be a site."""


@dataclass
class CallSites:
    """The calls of a model by name."""

    names: Container[str]
    """Of all modules: no call takes them."""
    asked: Container[str]
    """Names of calls that stay sites of their own."""
    joined: Modules = frozenset()
    """Those whose calls are one site."""
    fixed: Modules = frozenset()
    """Those that stay as they are: ranks have agreed on them."""
    _known: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """Module -> its forwards and calls in a pass."""
    _layers: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Site -> its stack, and its layer by the order of calls, in stacks of which a part runs several times."""
    _run: int = -1
    _latest: dict[str, tuple[CallNumber, object]] = field(default_factory=dict)
    """Name -> its latest call in the pass that runs, and what tells the forward that it is in."""
    _orders: Counter[str] = field(default_factory=Counter)
    """Stack -> forwards of its modules in that pass."""

    def number(self, name: str, place: nn.Module, context: CallContext) -> CallNumber:
        """Of the call that runs in ``place``, of the module or tap of this name."""
        if context.passes != self._run:
            self._run, self._latest, self._orders = context.passes, {}, Counter()
        first = CallNumber(name, name, 0, 0, 0, 0, context.passes)
        before, running = self._latest.get(name, (first, None))
        begun, stack, label = context.forwards.get(place), pattern_of(name), name
        forward = object() if begun is None else (place, begun)  # in compiled code no forward is seen to begin
        again = forward == running
        self._orders[stack] += not again
        if before.call:
            number = call_of(before.site)[1] + 1
            while (label := f"{name}#{number}") in self.names:
                number += 1
        counts = before.call + 1, before.forward + (not again), before.inner * again + 1, self._orders[stack] - 1
        self._latest[name] = CallNumber(name, label, *counts, context.passes), forward
        return self._latest[name][0]

    def settle(self, calls: Sequence[SeenCall]) -> dict[str, str]:
        """Takes note of the calls of passes that went through. ``name#*`` -> why those of a module are one site now."""
        passes: dict[tuple[str, str, int], list[SeenCall]] = {}
        for seen in calls:
            passes.setdefault((seen.number.name, seen.mode, seen.number.run), []).append(seen)
        sizes = {key: max((one.number.forward, one.number.call) for one in group) for key, group in passes.items()}
        steps = {(key[2], sizes[key][0]) for key, group in passes.items() if _decodes(group)}
        found = {}
        for (name, mode, forward_run), here in sizes.items():
            known, why = self._known.setdefault((name, mode), here), None
            if known != here and max(known[0], here[0]) > 1:
                why = f"it attended {known[1]} times in one pass and {here[1]} times in another"
            elif (forward_run, here[0]) in steps:
                why = "its calls are steps of decoding"
            elif here[1] > MOST_CALLS:
                why = f"it attends more than {MOST_CALLS} times in a pass"
            if why is not None and (name, mode) not in self.joined | self.fixed:
                self.joined |= {(name, mode)}
                found[f"{name}{JOINED}"] = f"{why}: the site {name} is the mean over its calls"
        repeated = {pattern_of(name) for (name, _, _), (forwards, _) in sizes.items() if forwards > 1}
        for seen in calls if repeated else ():
            stack = pattern_of(seen.number.name)
            if stack in repeated and (seen.number.name, seen.mode) not in self.joined:
                self._layers.setdefault(seen.name, (stack, seen.number.order))
        return found

    def site(self, name: str, mode: str) -> str:
        module = self.module_and_call(name)[0]
        return module if (module, mode) in self.joined and name not in self.asked else name

    def module_and_call(self, name: str) -> tuple[str, int]:
        """The module, or tap, of a site, and which of its calls it is."""
        return (name, 1) if name in self.names else call_of(name)

    def place(self, name: str, mode: str) -> tuple[str, int] | None:
        """The stack of a site and its layer, where layers follow the order of calls."""
        return None if (self.module_and_call(name)[0], mode) in self.joined else self._layers.get(name)

    def layer(self, name: str, mode: str) -> int | None:
        """Of a site: by the order of calls where parts of its stack run several times, else by its name."""
        return (self.place(name, mode) or ("", layer_of(name)))[1]


def _decodes(group: Iterable[SeenCall]) -> bool:
    """Whether some forward of a module reads more keys that are not its own than the one before: a cache that grows."""
    firsts = [seen.contribution for seen in group if seen.number.inner == 1 and seen.contribution is not None]
    others = [call.keys - call.queries for call in firsts if call.key[1] == "self"]
    return any(later > max(before, 0) for before, later in pairwise(others))
