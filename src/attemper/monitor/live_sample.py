"""The sample of a watch or a scan as it grows: sums of its sites, on their devices, and why others are not in it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor, nn

from attemper.call.call_sums import CallSums
from attemper.call.result import AttentionStats
from attemper.checks import did_you_mean
from attemper.monitor.calls import CallSites, Contribution, SeenCall
from attemper.monitor.checked_model import why_nothing
from attemper.monitor.head_roles import RoleReader
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.kept_rows import RowKeeper
from attemper.monitor.options import Scope
from attemper.monitor.snapshot import DeviceSample, SampleReadings, SampleSums, Snapshot
from attemper.monitor.tap_sums import TapSums
from attemper.readings.labels import pattern_of
from attemper.readings.part import changed_heads
from attemper.readings.reading import Skipped
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.sites.find import all_sites
from attemper.sites.names import class_name, is_wanted, is_within, names_of, unwrap

NO_SITE = "no module has this name, and no tap of this name ran"
"""Of a name that a watch was asked for. A tap has a name of its own, and is known once it runs."""


class LiveSample:
    """The latest sample of a model."""

    def __init__(self, model: nn.Module, scope: Scope) -> None:
        self.scope = scope
        self.sites: dict[SiteKey, SiteSums] = {}
        self.skipped: dict[str, str] = {}
        self._withdrawn: dict[str, str] = {}
        """Modules whose calls together are no map for each head, and why."""
        self.last: dict[str, AttentionStats | CallSums] = {}
        self._backends: dict[str, None] = {}
        self.keeper: RowKeeper | None = None
        """Keeps rows of chosen queries; None: nobody asked for them."""
        self.role_reader: RoleReader | None = None
        """Reads the roles of heads; None: nobody asks for them now."""
        title = class_name(unwrap(model))
        self._names = {module: name or title for module, name in names_of(model).items()}
        self._order = {name: place for place, name in enumerate(self._names.values())}
        self._stacks = {pattern_of(name): place for name, place in reversed(self._order.items())}
        self.call_sites = CallSites(self._order, scope.sites or ())
        self._loops: dict[SiteKey, SiteSums] = {}
        """Rows of its calls above ``MOST_CALLS`` of a module."""
        self._places: dict[str, str] = {}
        """Name of a tap -> that of the module in which its attention ran."""
        self._tokens: Tensor | int = 0
        self._refused: dict[str, str] = {}
        self.tapped = TapSums(scope)
        self._tapped_lock = Lock()
        self.shadowed = False
        """Whether the latest sample is of a shadow pass."""
        self.period = 0
        """Counts steps (or passes), so that samples can be told apart."""
        self._read = -1
        """The period of what is in ``sites``."""
        self.unwanted: set[str] = set()
        """Names of sites that were seen and are not ``wanted``."""

    def why_nothing(self, skipped: tuple[Skipped, ...], *, compiled: bool) -> str:
        """What to say where a model ran and no attention is to be shown."""
        if self.unwanted:
            return (
                f"watch(sites={list(self.scope.sites or ())!r}) matches none of the sites that were seen: "
                f"{', '.join(sorted(self.unwanted))}. Name some of these, or leave out sites=."
            )
        hint = " This model is compiled: only taps are seen inside, and its calls run compiled." if compiled else ""
        return why_nothing("watch", next(iter(self._names)), skipped, hint)

    @cached_property
    def expected(self) -> tuple[str, ...]:
        """Names of the modules whose code attends, as far as they are wanted."""
        return tuple(site.name for site in all_sites(self._names) if is_wanted(site.name, self.scope.sites))

    @cached_property
    def _no_modules(self) -> dict[str, str]:
        """Names of ``sites`` that no module has: those of taps, which are known once they run; or of nothing."""
        names = (name for name in self.scope.sites or () if self.call_sites.module_and_call(name)[0] not in self._order)
        near = {name: did_you_mean(name, self._order) for name in names}
        return {name: f"{NO_SITE}.{hint}" if hint else NO_SITE for name, hint in near.items()}

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module) or getattr(module, "tap_name", type(module).__name__)

    def owns(self, module: nn.Module) -> bool:
        """Whether this module is a part of the model."""
        return module in self._names

    def module_of(self, site: str) -> str:
        """The name of the module in which the attention of a site runs: for a tap that is not its own name. A tap that
        was seen in compiled code only keeps it.
        """
        return self._places.get(site) or self.call_sites.module_and_call(site)[0]

    def withdrawn(self, site: str) -> str | None:
        """Why all calls of a site's module were taken back; None where they were not."""
        return self._withdrawn.get(self.call_sites.module_and_call(site)[0])

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Takes note of modules (by name, empty for the root) into which nothing can look."""
        self._refused |= reasons

    @property
    def refused(self) -> Collection[str]:
        """Why nothing can look into parts of the model."""
        return self._refused.values()

    def _fold(self, seen: SeenCall) -> None:
        """Adds a call of a long loop to those before it, so that a pass does not hold each; unless it is asked for."""
        call, at = seen.contribution, (seen.number.name, seen.mode)
        fixed = at in self.call_sites.fixed and at not in self.call_sites.joined
        if call is not None and not fixed and seen.name not in self.call_sites.asked:
            self.sites, self._loops = self._loops, self.sites
            try:
                self._add(replace(call, key=(seen.number.name, *call.key[1:])))
            finally:
                self.sites, self._loops = self._loops, self.sites
            seen.contribution, seen.arguments, seen.places, seen.sketch = None, None, frozenset(), None

    def join_calls(self, reasons: Mapping[str, str]) -> None:
        """Makes one site of the calls of modules, also of those that this sample has so far, and says why."""
        self.skipped |= reasons
        for key in list(self.sites) if self.call_sites.joined else ():
            name = self.call_sites.site(key[0], key[2])
            if name != key[0]:
                self.last.pop(key[0], None)
                self._put(self.sites.pop(key).under_name(name))
                if self.keeper is not None:
                    self.keeper.move(key, (name, *key[1:]))

    def _put(self, site: SiteSums) -> None:
        earlier = self.sites.setdefault(site.key, site)
        if earlier.label.heads != site.label.heads:
            self._drop(site.key, changed_heads(earlier.label.heads, site.label.heads))
        elif earlier is not site:
            self.sites[site.key] = site.with_sums_of(earlier)

    def _add(self, call: Contribution) -> None:
        site = self._site(call.key, call.found.shape[1], call.found.device)
        if site is None:
            return
        is_empty = 0 in call.found.shape
        self._backends[call.backend] = None
        site.tell(attention=call.attention, first_head=call.first_head)
        site.roles = site.roles or call.roles
        if isinstance(call.found, AttentionStats):
            site.add(call.found, call.queries, call.keys)
            if self.keeper is not None and not is_empty:
                self.keeper.add(call.key, call.found)
        elif not is_empty:
            site.add_sums(call.found.sums, call.queries, call.keys)
        if not is_empty:
            site.add_counted(call.counted)
        self.last[call.key[0]] = call.found

    def _site(self, key: SiteKey, heads: int, device: torch.device) -> SiteSums | None:
        """The site of a call with so many heads; None where it had another number of them before."""
        if key not in self.sites:
            label = SiteLabel(*key, None, "full", "softmax", heads)
            self.sites[key] = SiteSums(label, device, self.scope.fewest_keys)
        site = self.sites[key]
        site.tell(layer=self.call_sites.layer(key[0], key[2]))
        if site.label.heads == heads:
            return site
        self._drop(key, changed_heads(site.label.heads, heads))
        return None

    def _drop(self, key: SiteKey, reason: str) -> None:
        """Forgets a site whose numbers cannot be trusted, and what comes of it in this sample."""
        self.sites[key].spoiled = True
        self.last.pop(key[0], None)
        self.skipped[key[0]] = reason

    def forget(self) -> None:
        """Starts over: the next pass is the first."""
        self.sites, self.last, self._tokens = {}, {}, 0
        self._backends, self._read = {}, self.period

    def restore(self, snapshot: Snapshot, last: dict[str, AttentionStats | CallSums]) -> None:
        """Makes an earlier sample the latest: its ``snapshot``, and its rows, which are ``last``."""
        self.sites, self.last = {site.key: site for site in snapshot.sites}, last
        self._tokens, self._backends = snapshot.tokens, dict.fromkeys(snapshot.backends)
        self._read = snapshot.period
        self.tapped = snapshot.taps

    def change_taps(self, change: Callable[[TapSums], TapSums]) -> None:
        """Puts in place what ``change`` makes of the taps' sums. Compiled graphs may report from other threads."""
        with self._tapped_lock:
            self.tapped = change(self.tapped)

    def join_passes(self, passes: list[tuple[Snapshot, int]], last: dict[str, AttentionStats | CallSums]) -> None:
        """Makes one sample of passes, that of the last of them: its period, and its rows, which are ``last``.
        ``passes``: each with its period.
        """
        self.forget()
        self.last, self._read = last, passes[-1][1]
        for snapshot, period in passes:
            if snapshot.period != period:  # it has taps alone, and sites of an earlier pass
                continue
            for site in snapshot.sites:
                self._put(site)
            self._tokens = self._tokens + snapshot.tokens
            self._backends |= dict.fromkeys(snapshot.backends)
        self.join_calls({})
        self.tapped = TapSums.of_steps([(snapshot.taps, period) for snapshot, period in passes])

    def snapshot(self) -> Snapshot:
        """The latest sample as it stands, without waiting for a device."""
        sites = tuple(site for site in self.sites.values() if not site.spoiled)
        return Snapshot(sites, self._read, self._tokens, tuple(self._backends), self.tapped)

    def join(self, found: DeviceSample) -> SampleSums:
        """Calls and taps of a sample together, and why others are not in it. Sites in the order of the model's modules,
        calls of a module in theirs.

        Waits for the devices that ``found`` is on.
        """
        joined = found.join()
        self.skipped |= joined.reasons
        return replace(joined, sites=tuple(sorted(joined.sites, key=self.position)))

    def position(self, site: SiteSums) -> tuple[int, int]:
        """Where a site stands in the model: the place of its module, and which of the module's calls it is. Where parts
        of its stack run several times, the place of the stack, and its layer.
        """
        at = self.call_sites.place(site.label.name, site.label.mode)
        if at is not None and at[0] in self._stacks:
            return self._stacks[at[0]], at[1]
        module = self.module_of(site.label.name)
        # Taps of compiled code, whose modules nobody knows, stay in the order in which they ran.
        known = module in self._order
        call = self.call_sites.module_and_call(site.label.name)[1] if known else 0
        return self._order.get(module, len(self._order)), call

    def readings(self) -> SampleReadings:
        """The latest sample as readings. Waits for the device."""
        found = self.join(self.snapshot())
        return self.as_readings(found, self.last if found.period == self._read else {})

    def as_readings(self, found: SampleSums, last: Mapping[str, AttentionStats | CallSums]) -> SampleReadings:
        """A sample as readings, with the rows that were kept of it."""
        sites, backends = tuple(site.reading() for site in found.sites), ", ".join(found.backends)
        skipped = self.skips({site.name for site in sites})
        return SampleReadings(sites, skipped, found.tokens, backends, last, found.period)

    @property
    def seen_sites(self) -> set[str]:
        """Names of the sites of the latest sample, and of all taps in compiled code. Nothing waits."""
        return {site.label.name for site in self.sites.values() if not site.spoiled} | self.tapped.names

    def skips(self, measured: Collection[str]) -> tuple[Skipped, ...]:
        """What was not measured; a site that was in the end, one of these names, is not among it."""
        found = {name: reason for name, reason in self.skipped.items() if name not in measured}
        for name, reason in self._refused.items():
            # What computes attention with code of its own may have been seen all the same, as torch functions.
            if not any(is_within(site, name) for site in measured):
                found.setdefault(name or next(iter(self._names.values())), reason)
        seen = {*found, *measured}
        unknown = self._no_modules.items()
        found |= {one: why for one, why in unknown if not any(is_wanted(name, (one,)) for name in seen)}
        return tuple(Skipped(name, reason) for name, reason in found.items())
