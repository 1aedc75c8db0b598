"""Attention calls and taps of one forward pass, until it went through: which of them are one attention, and its name.

A tap names the attention that it stands beside. Where that attention is seen otherwise as well, the site has the tap's
name and the attention's own numbers. In compiled code only taps are seen: the name is the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attemper.call.attention import run
from attemper.call.call_sums import CallSums, accumulate, accumulates
from attemper.call.request import Options, Request
from attemper.call.result import AttentionStats
from attemper.readings.sample import SiteKey
from attemper.sites.identity import Places, Sketch, partners
from attemper.sites.observation import AttentionCall


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

    @property
    def shape(self) -> torch.Size:
        """[B, H, Q] of the measured rows."""
        return self.found.shape if isinstance(self.found, AttentionStats) else self.found.state.shape[1:]

    @property
    def device(self) -> torch.device:
        return self.found.device if isinstance(self.found, AttentionStats) else self.found.state.device


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
