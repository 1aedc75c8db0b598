"""Which calls of a pass are sites of their own, where a module runs several times in it, and in which layer each is.

Every call is a site (``name``, ``name#2``, ...) while its module runs equally often in each pass that it runs in. Where
that number changes from pass to pass, where calls read what earlier ones have cached, and above ``MOST_CALLS``, calls
are told apart within one forward of the module only: from then on a site has the rows of all its forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from attemper.monitor.calls import CallNumber, SeenCall
from attemper.readings.labels import JOINED, call_of, layer_of, pattern_of
from attemper.sites.padding import CallContext

MOST_CALLS = 64
"""Calls of one module in one pass that may each be a site."""


@dataclass
class _Count:
    """The calls of one name in the pass that runs."""

    latest: CallNumber | None = None
    label: int = 0
    """The number in the latest name."""
    forward: object = None
    """What tells the forward of the latest call from others."""


@dataclass
class CallSites:
    """The calls of a model by name. ``modules``: names of all modules, which no call takes."""

    modules: Container[str]
    joined: dict[tuple[str, str], int] = field(default_factory=dict)
    """(Name, mode) of sites of all forwards -> how many calls of one forward they tell apart (0: not known yet)."""
    fixed: frozenset[tuple[str, str]] = frozenset()
    """(Name, mode) of what stays as it is: ranks have agreed on it."""
    _known: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """(Name, mode) -> forwards and calls of a pass."""
    _layers: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Site -> its stack, and its layer by the order of calls, in stacks of which a part runs several times."""
    _counts: dict[str, _Count] = field(default_factory=dict)
    _orders: Counter[str] = field(default_factory=Counter)
    """Stack -> forwards of its modules in the pass that runs."""
    _run: int = -1

    def number(self, name: str, place: nn.Module, context: CallContext) -> CallNumber:
        """Of the call that runs in ``place``, of the module or tap of this name."""
        if context.passes != self._run:
            self._run, self._counts, self._orders = context.passes, {}, Counter()
        count, begun, stack = self._counts.setdefault(name, _Count()), context.forwards.get(place), pattern_of(name)
        # In compiled code no forward is seen to begin.
        forward = object() if begun is None else (place, begun)
        call = forwards = inner = 0
        if count.latest is not None:
            call, forwards, inner = count.latest.call, count.latest.forward, count.latest.inner
        if forward != count.forward:
            count.forward, forwards, inner = forward, forwards + 1, 0
            self._orders[stack] += 1
        count.label += 1
        while count.label > 1 and f"{name}#{count.label}" in self.modules:
            count.label += 1
        site = name if count.label == 1 else f"{name}#{count.label}"
        order = self._orders[stack] - 1
        count.latest = CallNumber(name, site, call + 1, forwards, inner + 1, order, context.passes)
        return count.latest

    def settle(self, calls: Sequence[SeenCall]) -> dict[str, str]:
        """Takes note of the calls of passes that went through. Why those of a module are one site from now on, by
        ``name#*``.
        """
        passes: dict[tuple[str, str, int], list[SeenCall]] = {}
        for seen in calls:
            passes.setdefault((seen.number.name, seen.mode, seen.number.run), []).append(seen)
        sizes = {key: _size(group) for key, group in passes.items()}
        steps = {(key[2], sizes[key][0]) for key, group in passes.items() if _decodes(group)}
        found = {}
        for (name, mode, run), group in passes.items():
            at, here = (name, mode), sizes[name, mode, run]
            known = self._known.setdefault(at, here)
            why = None
            if known != here and max(known[0], here[0]) > 1:
                why = f"it attended {known[1]} times in one pass and {here[1]} times in another"
            elif (run, here[0]) in steps:
                why = "its calls are steps of decoding"
            elif here[1] > MOST_CALLS:
                why = f"it attends more than {MOST_CALLS} times in a pass"
            if at in self.fixed or (why is None and at not in self.joined):
                continue
            if at not in self.joined:
                found[f"{name}{JOINED}"] = f"{why}: the site {name} is the mean over its calls"
            each = set(Counter(seen.number.forward for seen in group).values())
            apart = each.pop() if len(each) == 1 else 1
            before = self.joined.get(at) or apart
            self.joined[at] = before if before == apart <= MOST_CALLS else 1
        self._note_layers(calls)
        return found

    def _note_layers(self, calls: Iterable[SeenCall]) -> None:
        repeated = {pattern_of(seen.number.name) for seen in calls if seen.number.forward > 1}
        for seen in calls if repeated else ():
            stack = pattern_of(seen.number.name)
            if stack in repeated and (seen.number.name, seen.mode) not in self.joined:
                self._layers.setdefault(seen.name, (stack, seen.number.order))

    def site(self, name: str, mode: str) -> str:
        """The site of a call of this name."""
        module, call = self.module_and_call(name)
        if (module, mode) not in self.joined:
            return name
        number = (call - 1) % (self.joined[module, mode] or 1) + 1
        return module if number == 1 else f"{module}#{number}"

    def module_and_call(self, name: str) -> tuple[str, int]:
        """The module, or tap, of a site, and which of its calls it is."""
        return (name, 1) if name in self.modules else call_of(name)

    def layer(self, name: str, mode: str) -> int | None:
        """Of a site: by the order of calls where parts of its stack run several times, else by its name."""
        at = self.place(name, mode)
        return layer_of(name) if at is None else at[1]

    def place(self, name: str, mode: str) -> tuple[str, int] | None:
        """The stack of a site and its layer, where layers follow the order of calls."""
        joined = (self.module_and_call(name)[0], mode) in self.joined
        return None if joined else self._layers.get(name)


def _size(group: Iterable[SeenCall]) -> tuple[int, int]:
    """Forwards and calls of one module in a pass."""
    last = max((seen.number for seen in group), key=lambda number: number.call)
    return last.forward, last.call


def _decodes(group: Iterable[SeenCall]) -> bool:
    """Whether some forward of a module reads more keys that are not its own than the one before: a cache that grows."""
    firsts = [seen.contribution for seen in group if seen.number.inner == 1 and seen.contribution is not None]
    own = [(call.keys, call.keys - call.queries) for call in firsts if call.key[1] == "self"]
    return any(later[1] > max(before[1], 0) for before, later in pairwise(own))
