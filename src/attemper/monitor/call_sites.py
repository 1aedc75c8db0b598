"""Which calls of a pass are sites of their own, where a module runs several times in it, and in which layer each is.

Every call is a site (``name``, ``name#2``, ...) while its module runs equally often in each pass that it runs in. Where
that number changes from pass to pass, where calls read what earlier ones have cached, and above ``MOST_CALLS``, they
are all one site from then on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import nn

from attemper.monitor.calls import CallNumber, SeenCall
from attemper.readings.calls import Modules
from attemper.readings.labels import JOINED, layer_of, pattern_of
from attemper.sites.padding import CallContext
from attemper.text import call_of

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
        for (name, mode, run), here in sizes.items():
            known, why = self._known.setdefault((name, mode), here), None
            if known != here and max(known[0], here[0]) > 1:
                why = f"it attended {known[1]} times in one pass and {here[1]} times in another"
            elif (run, here[0]) in steps:
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
        """The site of a call of this name."""
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
