"""The observer behind watch and scan: names sites, tells self from cross, leaves padding out, reduces as it goes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from attemper.backends.contract import Problem
from attemper.call.attention import measurement
from attemper.call.call_sums import CallSums
from attemper.call.known_requests import KnownRequests
from attemper.call.request import Request, first_true, names_of_call
from attemper.call.result import AttentionStats
from attemper.call.spans import Spans
from attemper.checks import did_you_mean
from attemper.errors import BackendError, InputError
from attemper.monitor.calls import (
    MOST_CALLS,
    CallNumber,
    CallSites,
    Contribution,
    Pairing,
    SeenCall,
    arguments_of,
    measure,
    with_real_rows,
)
from attemper.monitor.checked_model import attention_type, why_nothing
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.kept_rows import RowKeeper
from attemper.monitor.missed_mass import NAME, chooses, with_missed_mass
from attemper.monitor.options import Scope
from attemper.monitor.snapshot import DeviceSample, SampleReadings, SampleSums, Snapshot
from attemper.monitor.tap_sums import TapSums
from attemper.readings.labels import pattern_of, reason_of
from attemper.readings.part import changed_heads
from attemper.readings.reading import Skipped
from attemper.readings.sample import SiteKey
from attemper.readings.sums import fits_buckets
from attemper.sites.find import all_sites, projects
from attemper.sites.identity import Places, places, sketch
from attemper.sites.mixers import Mixers
from attemper.sites.names import class_name, is_wanted, names_of, unwrap
from attemper.sites.observation import AttentionCall, UnsupportedCallError, tell
from attemper.sites.padding import CallContext
from attemper.sites.sharded import first_head, local
from attemper.sites.tap_buffers import TapBuffer

NO_SITE = "no module has this name, and no tap of this name ran"
"""Of a name that a watch was asked for. A tap has a name of its own, and is known once it runs."""


@dataclass(frozen=True, eq=False)
class PreparedCall:
    """A call as a kernel would take it."""

    place: nn.Module
    """The module in whose forward it ran."""
    call: AttentionCall
    kind: str
    problem: Problem
    real: Tensor | None
    """[B, Q] bool: which queries are tokens; None for all."""


class Collector:
    """Takes attention calls, and adds those of a forward pass only once all of them went through.

    Args:
        quiet: called with a name and the error, where something of ours goes wrong; None: the error is raised.
    """

    def __init__(
        self,
        model: nn.Module,
        context: CallContext,
        scope: Scope,
        quiet: Callable[[str, Exception], None] | None = None,
    ) -> None:
        self.scope, self.context, self._quiet = scope, context, quiet
        self.stats, self.backend, self.replace = scope.stats, scope.backend, scope.replace
        if quiet is not None:
            context.fail = partial(tell, observers=(self,))
        self.sites: dict[SiteKey, SiteSums] = {}
        self.skipped: dict[str, str] = {}
        self._withdrawn: dict[str, str] = {}
        """Modules whose calls together are no map for each head, and why."""
        self.last: dict[str, AttentionStats | CallSums] = {}
        self._backends: dict[str, None] = {}
        self.keeper: RowKeeper | None = None
        """Keeps rows of chosen queries; None: nobody asked for them."""
        self.generator = torch.Generator().manual_seed(0)
        title = class_name(unwrap(model))
        self._names = {module: name or title for module, name in names_of(model).items()}
        self._order = {name: place for place, name in enumerate(self._names.values())}
        self._stacks = {pattern_of(name): place for name, place in reversed(self._order.items())}
        self.call_sites = CallSites(self._order, scope.sites or ())
        self.calls: list[SeenCall] = []
        """Of the pass that is running, in their order."""
        self._loops: dict[SiteKey, SiteSums] = {}
        """Rows of its calls above ``MOST_CALLS`` of a module."""
        self._pairing = Pairing(self._tell_difference)
        self._projects = any(map(projects, self._names))
        self._differing: set[str] = set()
        """Taps that were told to have other arguments than the attention beside them."""
        self._known = KnownRequests()
        self._attentions: dict[SiteKey, tuple[str, int]] = {}
        """The type of each site's attention, and the number of its first head in the whole model."""
        self.head_sizes: dict[str, int] = {}
        """Features of a head's queries, by the name of the module in which an attention ran."""
        self._places: dict[str, str] = {}
        """Name of a tap -> that of the module in which its attention ran."""
        self._spans: Spans | None = None
        self._tokens: Tensor | int = 0
        self._refused: dict[str, str] = {}
        self.tapped = TapSums(scope)
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

    @cached_property
    def mixers(self) -> Mixers:
        return Mixers(self._names)

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

    def begin(self) -> None:
        """Forgets a pass that did not go through."""
        self.calls.clear()
        self._loops.clear()
        self.context.reset()

    def take_batch(self, batch: Any) -> None:
        """Takes note of the batch that the next pass reads."""
        spans = self.scope.spans
        self._spans = spans(batch) if callable(spans) else spans
        if self.keeper is not None:
            self.keeper.take_batch(batch)

    def spans(self, module: nn.Module, keys: int) -> Spans | None:
        return None if self._kind(module, keys) == "cross" else self._spans

    def running(self) -> nn.Module:
        return self.context.module()

    def key_tokens(self, module: nn.Module, keys: int) -> Tensor | None:
        tokens = self.context.tokens
        mask = tokens.encoder if self._kind(module, keys) == "cross" else tokens.own
        return mask if mask is not None and mask.shape[1] == keys else None

    def see(self, module: nn.Module, call: AttentionCall) -> None:
        """Measures a call beside whoever computes it. With ``quiet``, what goes wrong goes there and no further."""
        self.guard(self.name_of(module), partial(self._see, module, call))

    def _see(self, module: nn.Module, call: AttentionCall) -> None:
        self._take(module, call, None)

    def observe(self, module: nn.Module, stats: AttentionStats, call: AttentionCall, request: Request) -> None:
        self._take(module, call, (request, stats))

    def _take(self, module: nn.Module, call: AttentionCall, done: tuple[Request, AttentionStats] | None) -> None:
        """Gives a call what is measured of it, or was (``done``); or why nothing can be."""
        seen = self._note_call(module, call)
        own = self._own_call(module, call, seen) if self._is_kept(seen) else None
        if own is None:
            return
        place, shape = self._place(module), (*own.query.shape[:3], own.key.shape[2])
        if self._projects and (seen.is_tap or projects(module)):
            seen.sketch = sketch(own.query, own.key)
        kind = self._kind(place, shape[3]) if own.cross is None else ("cross" if own.cross else "self")
        choosing = self.scope.missed_mass and chooses(place)
        try:
            request = self._request(place, own, kind) if done is None else done[0]
            real, seen.reason = self.context.real_queries(kind, shape, request.rows, own.tokens)
            if seen.reason is not None:
                return
            sums = self.keeper is None and fits_buckets(self.scope.fewest_keys) and not choosing
            found = measure(request, real, sums=sums) if done is None else with_real_rows(done[1], real)
            found = self._with_missed(seen.name, place, own, found) if choosing else found
        except (InputError, BackendError) as error:
            seen.reason = str(error)
            return
        if kind == "cross" and isinstance(found, AttentionStats):
            found = found.without("self_weight")  # keys of another sequence
        tokens, key = shape[0] * shape[2] if real is None else real.sum(), (seen.name, kind, seen.mode)
        if key not in self._attentions:
            self._attentions[key] = attention_type(place, kind, request.problem), first_head(place, call)
            self.head_sizes[self.name_of(place)] = own.query.shape[3]
        backend = request.problem.backend
        seen.contribution = Contribution(key, found, shape[2], shape[3], tokens, backend, *self._attentions[key])
        self.note(place, seen.number, kind, request, real)
        if seen.number.call > MOST_CALLS and self.keeper is None and not any(call.is_tap for call in self.calls):
            self._fold(seen)

    def _request(self, place: nn.Module, call: AttentionCall, kind: str) -> Request:
        tokens = self.key_tokens(place, call.key.shape[2])
        first = first_true(tokens, 1) if tokens is not None and tokens.shape[0] == call.query.shape[0] else None
        options = replace(call.options, spans=None if kind == "cross" else self._spans, backend=self.backend)
        options = replace(options, stats=names_of_call(self.stats, options, call.query, call.key))
        query, key, mask = call.query.detach(), call.key.detach(), None if call.mask is None else call.mask.detach()
        return measurement(
            query,
            key,
            mask,
            options,
            packing=call.packing,
            first_keys=first,
            rows=self.scope.rows,
            generator=self.generator,
            known=self._known,
        )

    def _with_missed(self, name: str, module: nn.Module, call: AttentionCall, found: Any) -> Any:
        """``found``, of a layer that chooses its keys, with its missed mass; or the reason among what is skipped."""
        more = with_missed_mass(module, call, self.context.masks.get(module), found)
        if isinstance(more, str):
            self.skipped[f"{name}.{NAME}"] = more
        return found if isinstance(more, str) else more

    def add_taps(self, found: dict[TapBuffer, tuple[str, Tensor]]) -> None:
        """Adds what taps have summed in their buffers, by names of sites."""
        named = {}
        for buffer, (name, _) in found.items():
            if not is_wanted(name, self.scope.sites):
                self.unwanted.add(name)
            elif (reason := self.tapped.refusal(buffer)) is None:
                named[buffer] = name
            else:
                self.skipped[name] = reason
        sums = {buffer: part for buffer, (_, part) in found.items()}
        self.guard("taps", lambda: self.tapped.add(named, sums, self.period))

    def skip(self, module: nn.Module, reason: str, places: Places = frozenset()) -> None:
        # Counted as a call: a module of which another call is measured still shows that this one was not.
        self._note_call(module, None, places).reason = reason

    def withdraw(self, module: nn.Module, reason: str) -> None:
        self._withdrawn.setdefault(self.name_of(self._place(module)), reason)

    def withdrawn(self, site: str) -> str | None:
        """Why all calls of a site's module were taken back; None where they were not."""
        return self._withdrawn.get(self.call_sites.module_and_call(site)[0])

    def fail(self, error: Exception) -> None:
        """Takes note of a failure of ours: of the attention that was running, as far as that can be told."""
        if self._quiet is None:
            raise error
        running = self.context.running
        self._quiet(self._names.get(running[-1], "attention") if running else "attention", error)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Takes note of modules (by name, empty for the root) into which nothing can look."""
        self._refused |= reasons

    @property
    def refused(self) -> Collection[str]:
        """Why nothing can look into parts of the model."""
        return self._refused.values()

    def _own_call(self, module: nn.Module, call: AttentionCall, seen: SeenCall) -> AttentionCall | None:
        """What this rank has of the call; None, with the reason in ``seen``, where it cannot be read."""
        try:
            own = local(module, call)
        except UnsupportedCallError as error:
            seen.reason = error.reason
            return None
        if any(map(is_functorch_wrapped_tensor, (own.query, own.key))):
            seen.reason = "it runs inside a transform of torch.func (vmap, grad): call the model outside of it"
            return None
        return own

    def _note_call(self, module: nn.Module, call: AttentionCall | None, memory: Places = frozenset()) -> SeenCall:
        """Takes note of a call, or a tap, of the pass that is running."""
        place, is_tap = self._place(module), not self.owns(module) and hasattr(module, "tap_name")
        own = self._names.get(place) if self.owns(place) and (self.context.running or not is_tap) else None
        mode = "train" if place.training else "eval"
        number = self.call_sites.number(self.name_of(module), place, self.context)
        seen = SeenCall(number, own, mode, is_tap, places=memory)
        if call is not None:
            seen.places = call.places or places((call.query, call.key))
            seen.arguments = arguments_of(call)
        self.calls.append(seen)
        return seen

    def _place(self, module: nn.Module) -> nn.Module:
        """The module in whose forward a call runs: itself, or where a tap stands, as far as that is known."""
        if self.owns(module) or not hasattr(module, "tap_name"):
            return module
        return self.context.running[-1] if self.context.running else next(iter(self._names))

    def _is_kept(self, seen: SeenCall) -> bool:
        """Whether a call is wanted: by its own name, as one of all calls of its module, by the module in which a tap
        stands, or by a tap's name that stands beside it.
        """
        number = seen.number
        names = {number.name, f"{number.name}#1" if number.call == 1 else number.site, seen.module or number.name}
        seen.kept = any(is_wanted(name, self.scope.sites) for name in names)
        if not seen.kept and not seen.is_tap:
            taps = (tap for tap in self.calls if tap.is_tap and tap.kept and tap.places)
            seen.kept = any(tap.places <= seen.places for tap in taps)
        return seen.kept

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

    def prepare(self, module: nn.Module, call: AttentionCall, seen: SeenCall) -> PreparedCall | None:
        """What a collector that computes with calls itself needs of one; None, with the reason in ``seen``, where it
        cannot be read.
        """
        own = self._own_call(module, call, seen)
        if own is None:
            return None
        place, keys = self._place(module), own.key.shape[2]
        kind = self._kind(place, keys) if own.cross is None else ("cross" if own.cross else "self")
        try:
            mask = None if own.mask is None else own.mask.detach()
            options = replace(own.options, stats=self.stats, backend=self.backend)
            request = measurement(own.query.detach(), own.key.detach(), mask, options, packing=own.packing)
            real, seen.reason = self.context.real_queries(kind, (*own.query.shape[:3], keys), None, own.tokens)
        except (InputError, BackendError) as error:
            seen.reason = str(error)
        return None if seen.reason is not None else PreparedCall(place, own, kind, request.problem, real)

    def note(self, module: nn.Module, number: CallNumber, kind: str, request: Request, real: Tensor | None) -> None:
        """Called with every call that is measured, while it is there to look at: a scan wants no more of it.

        ``real``: [B, Q] bool, which of its queries are tokens; None for all.
        """

    def _kind(self, module: nn.Module, keys: int) -> str:
        return "cross" if self.context.is_cross(module, keys) else "self"

    def take_calls(self) -> list[SeenCall]:
        """The calls of a pass that went through: a tap and the attention beside it as one, withdrawn with the reason.

        What a tap stands beside is read: somebody asked for it.
        """
        staged, self.calls = self.calls, []
        found = self._pairing.join(staged)
        for seen in found:
            if seen.module in self._withdrawn and not seen.is_tap:
                seen.number, seen.reason = replace(seen.number, site=seen.module), self._withdrawn[seen.module]
        return found

    def note_taps(self, calls: Iterable[SeenCall]) -> set[str]:
        """Learns in which modules the taps among these calls stand; the modules' names."""
        self._places |= {seen.name: seen.module for seen in calls if seen.is_tap and seen.module is not None}
        return {seen.module for seen in calls if seen.is_tap and seen.module is not None}

    def commit(self) -> None:
        """Adds the calls of a pass that went through."""
        called = {seen.number.name if seen.module is None else seen.module for seen in self.calls}
        for name, kind in self.mixers.unread(self.context.forwards, called).items():
            if is_wanted(name, self.scope.sites):
                self.skipped[name] = reason_of(kind)
        first, calls = True, self.take_calls()
        self.join_calls(self.call_sites.settle(calls))
        measured = {seen.number.name for seen in calls if seen.contribution is not None and seen.reason is None}
        for seen in calls:
            number, name = seen.number, self.call_sites.site(seen.name, seen.mode)
            if not seen.kept:
                self.unwanted.add(name)
            elif seen.reason is not None:
                # Where no call is measured, the reason stands once for all forwards.
                once = number.name if number.inner == 1 else f"{number.name}#{number.inner}"
                self.skipped[name if number.name in measured or name == seen.module else once] = seen.reason
            elif seen.contribution is not None:
                if seen.is_tap and seen.module is not None:
                    self._places[name] = seen.module
                contribution = replace(seen.contribution, key=(name, *seen.contribution.key[1:]))
                self.guard(name, partial(self._add, contribution))
                self._tokens = self._tokens + (seen.contribution.tokens if first else 0)
                first = False
        while self._loops:
            self._put(self._loops.popitem()[1].under_name())
        for key in self.sites if self._withdrawn else ():
            if (reason := self.withdrawn(key[0])) is not None:
                self._drop(key, reason)

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
        """Adds a site to what is there of it."""
        earlier = self.sites.setdefault(site.key, site)
        if earlier.heads != site.heads:
            self._drop(site.key, changed_heads(earlier.heads, site.heads))
        elif earlier is not site:
            self.sites[site.key] = site.with_sums_of(earlier)

    def _tell_difference(self, tap: SeenCall, call: SeenCall, difference: str) -> None:
        """A tap that was given other arguments than its attention would read other numbers in compiled code."""
        if tap.name not in self._differing:
            self._differing.add(tap.name)
            warnings.warn(
                f"attemper: tap {tap.name!r} is given {difference} as the attention beside it in {call.module!r}. "
                "Shown are the numbers of that attention; in compiled code, where only the tap is seen, they would be "
                "the tap's. Give the tap the arguments of its attention.",
                stacklevel=2,
            )

    def _add(self, call: Contribution) -> None:
        site = self._site(call.key, call.shape[1], call.device)
        if site is None:
            return
        self._backends[call.backend], site.attention, site.first_head = None, call.attention, call.first_head
        if isinstance(call.found, AttentionStats):
            site.add(call.found, call.queries, call.keys)
            if self.keeper is not None and 0 not in call.shape:
                self.keeper.add(call.key, call.found)
        elif 0 not in call.shape:
            site.add_sums(call.found.sums, call.queries, call.keys)
        self.last[call.key[0]] = call.found

    def _site(self, key: SiteKey, heads: int, device: torch.device) -> SiteSums | None:
        """The site of a call with so many heads; None where it had another number of them before."""
        if key not in self.sites:
            self.sites[key] = SiteSums(*key, heads=heads, device=device, fewest_keys=self.scope.fewest_keys)
        site = self.sites[key]
        site.layer = self.call_sites.layer(key[0], key[2])
        if site.heads == heads:
            return site
        self._drop(key, changed_heads(site.heads, heads))
        return None

    def _drop(self, key: SiteKey, reason: str) -> None:
        """Forgets a site whose numbers cannot be trusted, and what comes of it in this sample."""
        self.sites[key].spoiled = True
        self.last.pop(key[0], None)
        self.skipped[key[0]] = reason

    def guard(self, name: str, action: Callable[[], object]) -> None:
        """Runs ``action``. With ``quiet``, what goes wrong goes there and no further."""
        if self._quiet is None:
            action()
            return
        try:
            action()
        except Exception as error:  # whatever it is, it must not end somebody's training run
            self._quiet(name, error)

    def forget(self) -> None:
        """Starts over: the next pass is the first."""
        self.sites, self.last, self._tokens = {}, {}, 0
        self._backends, self._read = {}, self.period

    def restore(self, snapshot: Snapshot, last: dict[str, AttentionStats | CallSums]) -> None:
        """Makes an earlier sample the latest: its ``snapshot``, and its rows, which are ``last``."""
        self.sites, self.last = {site.key: site for site in snapshot.sites}, last
        self._tokens, self._backends = snapshot.tokens, dict.fromkeys(snapshot.backends)
        self._read = snapshot.period
        self.tapped.restore(snapshot.taps)

    def join_passes(self, passes: list[tuple[Snapshot, int]], last: dict[str, AttentionStats | CallSums]) -> None:
        """Makes one sample of passes, that of the last of them: its period, and its rows, which are ``last``.

        Args:
            passes: each with its period.
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
        self.tapped.join_steps([(snapshot.taps, period) for snapshot, period in passes])

    def snapshot(self) -> Snapshot:
        """The latest sample as it stands, without waiting for a device."""
        sites = tuple(site for site in self.sites.values() if not site.spoiled)
        return Snapshot(sites, self._read, self._tokens, tuple(self._backends), self.tapped.snapshot())

    def join(self, found: DeviceSample) -> SampleSums:
        """Calls and taps of a sample together. Sites in the order of the model's modules, calls of a module in theirs.

        Waits for the devices that ``found`` is on.
        """
        joined = found.join()
        return replace(joined, sites=tuple(sorted(joined.sites, key=self.position)))

    def position(self, site: SiteSums) -> tuple[int, int]:
        """Where a site stands in the model: the place of its module, and which of the module's calls it is. Where parts
        of its stack run several times, the place of the stack, and its layer.
        """
        at = self.call_sites.place(site.name, site.mode)
        if at is not None and at[0] in self._stacks:
            return self._stacks[at[0]], at[1]
        module = self.module_of(site.name)
        # Taps of compiled code, whose modules nobody knows, stay in the order in which they ran.
        known = module in self._order
        return self._order.get(module, len(self._order)), self.call_sites.module_and_call(site.name)[1] if known else 0

    def readings(self) -> SampleReadings:
        """The latest sample as readings. Waits for the device."""
        found = self.join(self.snapshot())
        self.skipped |= found.reasons
        return self.as_readings(found, self.last if found.period == self._read else {})

    def as_readings(self, found: SampleSums, last: Mapping[str, AttentionStats | CallSums]) -> SampleReadings:
        """A sample as readings, with the rows that were kept of it."""
        sites, backends = tuple(site.reading() for site in found.sites), ", ".join(found.backends)
        skipped = self.skips({site.name for site in sites})
        return SampleReadings(sites, skipped, found.tokens, backends, last, found.period)

    @property
    def seen_sites(self) -> set[str]:
        """Names of the sites of the latest sample, and of all taps in compiled code. Nothing waits."""
        return {site.name for site in self.sites.values() if not site.spoiled} | self.tapped.names

    def skips(self, measured: Collection[str]) -> tuple[Skipped, ...]:
        """What was not measured; a site that was in the end, one of these names, is not among it."""
        found = {name: reason for name, reason in self.skipped.items() if name not in measured}
        for name, reason in self._refused.items():
            # What computes attention with code of its own may have been seen all the same, as torch functions.
            if not any(not name or site == name or site.startswith(f"{name}.") for site in measured):
                found.setdefault(name or next(iter(self._names.values())), reason)
        seen = {*found, *measured}
        unknown = self._no_modules.items()
        found |= {one: why for one, why in unknown if not any(is_wanted(name, (one,)) for name in seen)}
        return tuple(Skipped(name, reason) for name, reason in found.items())
