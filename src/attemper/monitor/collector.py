"""The observer behind watch and scan: tells self from cross, leaves padding out, and measures each call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from attemper.backends.contract import Problem
from attemper.call.attention import measurement
from attemper.call.known_requests import KnownRequests
from attemper.call.request import Options, Request, first_true, names_of_call
from attemper.call.result import AttentionStats
from attemper.call.spans import Spans
from attemper.errors import BackendError, InputError
from attemper.monitor.calls import (
    MOST_CALLS,
    CallNumber,
    Contribution,
    Pairing,
    SeenCall,
    arguments_of,
    measure,
    with_real_rows,
)
from attemper.monitor.checked_model import attention_type
from attemper.monitor.counted_keys import CountedKeys
from attemper.monitor.exact_weights import ids_of_call
from attemper.monitor.live_sample import LiveSample
from attemper.monitor.missed_mass import NAME, chooses, with_missed_mass
from attemper.monitor.options import Scope
from attemper.readings.labels import reason_of
from attemper.readings.sample import SiteKey
from attemper.readings.sums import fits_buckets
from attemper.sites.find import projects
from attemper.sites.identity import Places, places, sketch
from attemper.sites.mixers import Mixers
from attemper.sites.names import is_wanted
from attemper.sites.observation import AttentionCall, UnsupportedCallError, tell
from attemper.sites.padding import CallContext
from attemper.sites.sharded import first_head, local
from attemper.sites.tap_buffers import TapBuffer


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


class Collector(LiveSample):
    """Takes attention calls, and adds those of a forward pass only once all of them went through. ``quiet``: called
    with a name and the error, where something of ours goes wrong; None: the error is raised.
    """

    def __init__(
        self,
        model: nn.Module,
        context: CallContext,
        scope: Scope,
        quiet: Callable[[str, Exception], None] | None = None,
    ) -> None:
        super().__init__(model, scope)
        self.context, self._quiet = context, quiet
        self.stats, self.backend, self.replace = scope.stats, scope.backend, scope.replace
        if quiet is not None:
            context.fail = partial(tell, observers=(self,))
        self.generator = torch.Generator().manual_seed(0)
        self.calls: list[SeenCall] = []
        """Of the pass that is running, in their order."""
        self._pairing = Pairing(self._tell_difference)
        self._projects = any(map(projects, self._names))
        self._differing: set[str] = set()
        """Taps that were told to have other arguments than the attention beside them."""
        self._known = KnownRequests()
        self._counted_keys = CountedKeys()
        self._attentions: dict[SiteKey, tuple[str, int]] = {}
        """The type of each site's attention, and the number of its first head in the whole model."""
        self.head_sizes: dict[str, int] = {}
        """Features of a head's queries, by the name of the module in which an attention ran."""
        self.dtypes: dict[torch.dtype, None] = {}
        """Types of queries, in the order in which they were seen."""
        self._spans: Spans | None = None

    @cached_property
    def mixers(self) -> Mixers:
        return Mixers(self._names)

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

    def options_of(self, module: nn.Module, call: AttentionCall, stats: tuple[str, ...]) -> Options:
        kind = self._kind(module, call.key.shape[2], call.cross)
        options = replace(call.options, spans=None if kind == "cross" else self._spans, backend=self.backend)
        return replace(options, stats=names_of_call(stats, options, call.query, call.key))

    def first_keys(self, module: nn.Module, call: AttentionCall) -> Tensor | None:
        tokens = self.key_tokens(module, call.key.shape[2])
        if tokens is None or tokens.shape[0] != call.query.shape[0]:
            return None
        return first_true(tokens, call.options.first_tokens)

    def key_tokens(self, module: nn.Module, keys: int) -> Tensor | None:
        tokens = self.context.tokens
        mask = tokens.encoder if self._kind(module, keys) == "cross" else tokens.own
        return mask if mask is not None and mask.shape[1] == keys else None

    def see(self, module: nn.Module, call: AttentionCall) -> None:
        """Measures a call beside whoever computes it. With ``quiet``, what goes wrong goes there and no further."""
        self.guard(self.name_of(module), partial(self._take, module, call))

    def observe(self, module: nn.Module, stats: AttentionStats, call: AttentionCall, request: Request) -> None:
        self._take(module, call, (request, stats))

    def _take(self, module: nn.Module, call: AttentionCall, done: tuple[Request, AttentionStats] | None = None) -> None:
        """Gives a call what is measured of it, or was (``done``); or why nothing can be."""
        seen = self._note_call(module, call)
        own = self._own_call(module, call, seen) if self._is_kept(seen) else None
        if own is None:
            return
        place, shape = self._place(module), (*own.query.shape[:3], own.key.shape[2])
        if self._projects and (seen.is_tap or projects(module)):
            seen.sketch = sketch(own.query, own.key)
        kind = self._kind(place, shape[3], own.cross)
        choosing = self.scope.missed_mass and chooses(place)
        try:
            request = self._request(place, own) if done is None else done[0]
            real, seen.reason = self.context.real_queries(kind, shape, request.rows, own.tokens)
            if seen.reason is not None:
                return
            sums = self.keeper is None and fits_buckets(self.scope.fewest_keys) and not choosing
            found = measure(request, real, sums=sums) if done is None else with_real_rows(done[1], real)
            if choosing:
                assert isinstance(found, AttentionStats)
                found, unknown = with_missed_mass(place, own, self.context.masks.get(place), found)
                self.skipped |= {} if unknown is None else {f"{seen.name}.{NAME}": unknown}
        except (InputError, BackendError) as error:
            seen.reason = str(error)
            return
        if kind == "cross" and isinstance(found, AttentionStats):
            found = found.without("self_weight")  # keys of another sequence
        tokens, key = shape[0] * shape[2] if real is None else real.sum(), (seen.name, kind, seen.mode)
        if key not in self._attentions:
            self._attentions[key] = attention_type(place, kind, request.problem), first_head(place, call)
            self.head_sizes[self.name_of(place)] = own.query.shape[3]
            self.dtypes[own.query.dtype] = None
        backend = request.problem.backend
        counted = self._counted_keys.sums(place, kind, own, self.context.tokens, found, request.rows)
        about, roles = (*self._attentions[key], counted), {}
        if self.role_reader is not None and seen.number.call <= MOST_CALLS:
            roles = self.role_reader.scores(request.problem, kind, real, ids_of_call(self.context, kind, shape))
        seen.contribution = Contribution(key, found, shape[2], shape[3], tokens, backend, *about, roles)
        self.note(place, seen.number, kind, request, real)
        if seen.number.call > MOST_CALLS and self.keeper is None and not any(call.is_tap for call in self.calls):
            self._fold(seen)

    def _request(self, place: nn.Module, call: AttentionCall) -> Request:
        return measurement(
            call.query,
            call.key,
            call.mask,
            self.options_of(place, call, self.stats),
            packing=call.packing,
            first_keys=self.first_keys(place, call),
            rows=self.scope.rows,
            generator=self.generator,
            known=self._known,
        )

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
        self.guard("taps", lambda: self.change_taps(lambda taps: taps.plus(named, sums, self.period)))

    def skip(self, module: nn.Module, reason: str, places: Places = frozenset()) -> None:
        # Counted as a call: a module of which another call is measured still shows that this one was not.
        self._note_call(module, None, places).reason = reason

    def withdraw(self, module: nn.Module, reason: str) -> None:
        self._withdrawn.setdefault(self.name_of(self._place(module)), reason)

    def fail(self, error: Exception) -> None:
        """Takes note of a failure of ours: of the attention that was running, as far as that can be told."""
        if self._quiet is None:
            raise error
        running = self.context.running
        self._quiet(self._names.get(running[-1], "attention") if running else "attention", error)

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

    def prepare(self, module: nn.Module, call: AttentionCall, seen: SeenCall) -> PreparedCall | None:
        """What a collector that computes with calls itself needs of one; None, with the reason in ``seen``, where it
        cannot be read.
        """
        own = self._own_call(module, call, seen)
        if own is None:
            return None
        place, keys = self._place(module), own.key.shape[2]
        kind = self._kind(place, keys, own.cross)
        try:
            options = replace(own.options, stats=self.stats, backend=self.backend)
            request = measurement(own.query, own.key, own.mask, options, packing=own.packing)
            real, seen.reason = self.context.real_queries(kind, (*own.query.shape[:3], keys), None, own.tokens)
        except (InputError, BackendError) as error:
            seen.reason = str(error)
            return None
        return None if seen.reason is not None else PreparedCall(place, own, kind, request.problem, real)

    def note(self, module: nn.Module, number: CallNumber, kind: str, request: Request, real: Tensor | None) -> None:
        """Called with every call that is measured, while it is there to look at: a scan wants no more of it.

        ``real``: [B, Q] bool, which of its queries are tokens; None for all.
        """

    def _kind(self, module: nn.Module, keys: int, told: bool | None = None) -> str:
        """``told``: whether it is cross attention, where the call says so."""
        return "cross" if (self.context.is_cross(module, keys) if told is None else told) else "self"

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

    def _tell_difference(self, tap: SeenCall, call: SeenCall, difference: str) -> None:
        """A tap that was given other arguments than its attention would read other numbers in compiled code."""
        if tap.name not in self._differing:
            self._differing.add(tap.name)
            warnings.warn(
                f"attemper: tap {tap.name!r} is given {difference} as the attention beside it in {call.module!r}. "
                "attemper shows the numbers of that attention. In compiled code it sees the tap alone and would show "
                "the tap's numbers. Give the tap the arguments of its attention.",
                stacklevel=2,
            )

    def guard(self, name: str, action: Callable[[], object]) -> None:
        """Runs ``action``. With ``quiet``, what goes wrong goes there and no further."""
        if self._quiet is None:
            action()
            return
        try:
            action()
        except Exception as error:  # whatever it is, it must not end somebody's training run
            self._quiet(name, error)
