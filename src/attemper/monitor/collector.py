"""The observer behind watch and scan: names sites, tells self from cross, leaves padding out, reduces as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from attemper.errors import BackendError, InputError
from attemper.functional.accumulated import Accumulated, accumulated, accumulates
from attemper.functional.attention import executed, prepared
from attemper.functional.call import Call, first_true
from attemper.functional.names import those_of
from attemper.functional.normalization import map_of
from attemper.functional.stats import AttentionStats
from attemper.monitor.reduction import SiteReduction, fits_buckets
from attemper.monitor.tapped import TappedSums
from attemper.records import FEWEST_KEYS, SiteReading, Skipped
from attemper.sites.observer import AttentionCall, UnsupportedCallError
from attemper.sites.padding import CallContext, Tokens
from attemper.sites.sharded import local
from attemper.sites.tap_buffers import TapBuffer
from attemper.sites.wanted import is_wanted
from attemper.sites.wrappers import class_name, named, unwrapped

Key = tuple[str, str, str]
"""(name, kind, mode) of a site."""


@dataclass(frozen=True)
class Taken:
    """What one call adds to a site."""

    key: Key
    found: AttentionStats | Accumulated
    queries: int
    keys: int
    tokens: Tensor | int
    """Real query rows of all sequences."""
    backend: str

    @property
    def shape(self) -> torch.Size:
        """[B, H, Q] of the measured rows."""
        return self.found.shape if isinstance(self.found, AttentionStats) else self.found.state.shape[1:]

    @property
    def device(self) -> torch.device:
        return self.found.device if isinstance(self.found, AttentionStats) else self.found.state.device


@dataclass(frozen=True)
class Found:
    """What there is to show of the latest sample."""

    sites: tuple[SiteReading, ...]
    skipped: tuple[Skipped, ...]
    tokens: int
    """Real tokens: query rows of the first site of each pass."""
    backend: str
    """The backends that computed it, joined by commas."""
    last: Mapping[str, AttentionStats | Accumulated]
    """Rows of the last call of a site, where they were kept."""


class Collector:
    """Takes attention calls, and adds those of a forward pass only once the whole of it went through.

    ``rows``: measure only this many query rows of each sequence. ``wanted``: names of sites (or their beginnings) to
    keep.
    """

    def __init__(
        self, model: nn.Module, stats: tuple[str, ...], backend: str, context: CallContext, *, replace: bool,
        rows: int | None = None, wanted: tuple[str, ...] | None = None,
        quiet: Callable[[str, Exception], None] | None = None, fewest_keys: int = FEWEST_KEYS,
    ) -> None:  # fmt: skip
        self.fewest_keys = fewest_keys
        self.stats, self.backend, self.context, self.replace = stats, backend, context, replace
        self.rows, self.wanted, self._quiet = rows, wanted, quiet
        self.sites: dict[Key, SiteReduction] = {}
        self.skipped: dict[str, str] = {}
        self.last: dict[str, AttentionStats | Accumulated] = {}
        self._backends: dict[str, None] = {}
        self.generator = torch.Generator().manual_seed(0)
        title = class_name(unwrapped(model))
        self._names = {module: name or title for module, name in named(model).items()}
        self._staged: list[Taken] = []
        self._staged_skips: dict[str, str] = {}
        self._tokens: Tensor | int = 0
        self._refused: dict[str, str] = {}
        self.tapped = TappedSums(stats, backend, rows, fewest_keys)
        self.period = 0
        """Counts steps (or passes), so that samples can be told apart."""
        self._read = -1
        """The period of what is in ``sites``."""
        self.unwanted: set[str] = set()
        """Names of sites that were seen and are not ``wanted``."""

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module) or getattr(module, "tap_name", type(module).__name__)

    def owns(self, module: nn.Module) -> bool:
        """Whether this module is a part of the model."""
        return module in self._names

    def owner(self, module: nn.Module, models: list[nn.Module]) -> nn.Module | None:
        """The innermost of ``models`` that holds ``module``."""
        holders = [model for model in models if any(part is module for part in model.modules())]
        return max(holders, key=lambda model: len(self._names[model])) if holders else None

    def begin(self) -> None:
        """Forgets a pass that did not go through."""
        self._staged.clear()
        self._staged_skips.clear()
        self.context.reset()

    def running(self) -> nn.Module:
        return self.context.module()

    def key_tokens(self, module: nn.Module, keys: int) -> Tensor | None:
        tokens = self.context.tokens
        mask = tokens.encoder if self._kind(module, keys) == "cross" else tokens.own
        return mask if mask is not None and mask.shape[1] == keys else None

    def see(self, module: nn.Module, call: AttentionCall) -> None:
        """Measures a call beside whoever computes it. With ``quiet``, what goes wrong goes there and no further."""
        self._guarded(self.name_of(module), partial(self._see, module, call))

    def _see(self, module: nn.Module, call: AttentionCall) -> None:
        if not self._kept(self.name_of(module)):
            return
        try:
            call = local(module, call)
        except UnsupportedCallError as error:
            self.skip(module, error.reason)
            return
        if any(map(is_functorch_wrapped_tensor, (call.query, call.key))):
            self.skip(module, "it runs inside a transform of torch.func (vmap, grad): call the model outside of it")
            return
        keys = call.key.shape[2]
        tokens = self.key_tokens(module, keys)
        first = None
        if tokens is not None and tokens.shape[0] == call.query.shape[0]:
            first = first_true(tokens, 1)
        try:
            stats = those_of(self.stats, map_of(call.options.normalizer))
            plan = prepared(
                call.query.detach(), call.key.detach(), None if call.mask is None else call.mask.detach(),
                replace(call.options, stats=stats, backend=self.backend),
                packing=call.packing, first_keys=first, rows=self.rows, generator=self.generator,
            )  # fmt: skip
            kind = self._kind(module, keys) if call.cross is None else ("cross" if call.cross else "self")
            shape = (*call.query.shape[:3], keys)
            real, reason = self._real(kind, shape, plan.rows, call.tokens)
            found = None if reason else measured(plan, real, shape[2], sums=fits_buckets(self.fewest_keys))
        except (InputError, BackendError) as error:
            self.skip(module, str(error))
            return
        self._stage(module, found, kind, shape, real, reason, plan)

    def observe(self, module: nn.Module, stats: AttentionStats, plan: Call) -> None:
        if not self._kept(self.name_of(module)):
            return
        keys = plan.key.shape[2]
        kind, shape = self._kind(module, keys), (*stats.shape, keys)
        real, reason = self._real(kind, shape, stats.rows, None)
        found = stats.detach() if real is None else _where(stats, real).detach()
        self._stage(module, found, kind, shape, real, reason, plan)

    def take(self, found: dict[TapBuffer, tuple[str, Tensor]]) -> None:
        """Takes what taps have summed in their buffers, by names of sites."""
        named = {}
        for buffer, (name, _) in found.items():
            reason = self.tapped.refusal(buffer)
            if not self._kept(name):
                continue
            if reason is None:
                named[buffer] = name
            else:
                self.skipped[name] = reason
        sums = {buffer: part for buffer, (_, part) in found.items()}
        self._guarded("taps", lambda: self.tapped.take(named, sums, self.period))

    def skip(self, module: nn.Module, reason: str) -> None:
        # Counted as a call: a module of which another call is measured still shows that this one was not.
        self._staged_skips[self._next_name(module)] = reason

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Takes note of modules (by name, empty for the root) into which nothing can look."""
        self._refused |= reasons

    def _kept(self, name: str) -> bool:
        kept = is_wanted(name, self.wanted)
        if not kept:
            self.unwanted.add(name)
        return kept

    def _real(
        self, kind: str, shape: tuple[int, ...], rows: Tensor | None, tokens: Tensor | None
    ) -> tuple[Tensor | None, str | None]:
        """Which queries of a call (batch, heads, queries, keys) are real tokens, [B, Q] (None for all); or why that
        cannot be told.
        """
        context = self.context.tokens if tokens is None else Tokens(tokens, None)
        if context.own is None:
            return None, None
        real = context.of_queries(shape[2], shape[3], cross=kind == "cross")
        if real is not None and real.shape[0] == shape[0]:
            return real, None
        if bool(context.own.all()):
            return None, None
        seen = [*shape[:2], shape[2] if rows is None else len(rows)]
        return None, f"padding of its queries cannot be told: {seen} rows under a mask of {list(context.own.shape)}"

    def _stage(
        self, module: nn.Module, found: AttentionStats | Accumulated | None, kind: str, shape: tuple[int, ...],
        real: Tensor | None, reason: str | None, plan: Call,
    ) -> None:  # fmt: skip
        name = self._next_name(module)
        if reason is not None or found is None:
            self._staged_skips[name] = reason or "it could not be measured"
            return
        tokens = shape[0] * shape[2] if real is None else real.sum()
        key = (name, kind, "train" if module.training else "eval")
        self._staged.append(Taken(key, found, shape[2], shape[3], tokens, plan.backend))
        self.note(module, name, kind, plan, real)

    def note(self, module: nn.Module, name: str, kind: str, call: Call, real: Tensor | None) -> None:
        """Called with every call that is measured, while it is there to look at: a scan wants no more of it.

        ``real``: [B, Q] bool, which of its queries are tokens; None for all.
        """

    def _next_name(self, module: nn.Module) -> str:
        """The name of the attention call that is running: ``name``, and from the second one on ``name#2``."""
        number = self.context.calls.get(module, 0) + 1
        self.context.calls[module] = number
        return self.name_of(module) + (f"#{number}" if number > 1 else "")

    def _kind(self, module: nn.Module, keys: int) -> str:
        return "cross" if self.context.is_cross(module, keys) else "self"

    def commit(self) -> None:
        """Adds the calls of a pass that went through."""
        self.skipped |= self._staged_skips
        for index, taken in enumerate(self._staged):
            self._guarded(taken.key[0], partial(self._add, taken))
            if index == 0:
                self._tokens = self._tokens + taken.tokens
        self._staged.clear()
        self._staged_skips.clear()

    def _add(self, taken: Taken) -> None:
        key, found = taken.key, taken.found
        site = self._site(key, taken.shape[1], taken.device)
        if site is None:
            return
        self._backends[taken.backend] = None
        if isinstance(found, AttentionStats):
            site.add(found, taken.queries, taken.keys)
        elif 0 not in taken.shape:
            site.add_sums(found.sums, taken.queries, taken.keys)
        self.last[key[0]] = found

    def _site(self, key: Key, heads: int, device: torch.device) -> SiteReduction | None:
        """The site of a call with so many heads; None where it had another number of them before."""
        if key not in self.sites:
            self.sites[key] = SiteReduction(*key, heads=heads, device=device, fewest_keys=self.fewest_keys)
        site = self.sites[key]
        if site.heads == heads:
            return site
        self._drop(key, f"it had {site.heads} heads and then {heads}: its queries are not [batch, heads, ...]")
        return None

    def _drop(self, key: Key, reason: str) -> None:
        """Forgets a site whose numbers cannot be trusted, and what comes of it in this sample."""
        self.sites[key].spoiled = True
        self.last.pop(key[0], None)
        self.skipped[key[0]] = reason

    def _guarded(self, name: str, action: Callable[[], None]) -> None:
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

    def found(self) -> Found:
        """The latest sample. Sites in the order of the model's modules, calls of one module in their order."""
        order = {name: place for place, name in enumerate(self._names.values())}

        def place(site: SiteReduction) -> tuple[int, int]:
            module, _, call = site.name.partition("#")
            return order.get(module, len(order)), int(call or 1)

        period, tapped, tokens, reasons = self.tapped.latest()
        self.skipped |= reasons
        fresh = period <= self._read
        sites = {key: site for key, site in self.sites.items() if fresh and not site.spoiled}
        backends = list(self._backends) if fresh else []
        # Tokens of a pass that was seen count those of its taps, too.
        tokens = round(float(self._tokens)) if sites else tokens
        if period >= self._read and tapped:
            backends = list(dict.fromkeys([*backends, "triton"]))
            for site in tapped:
                key = (site.name, site.kind, site.mode)
                sites[key] = site if key not in sites else sites[key].with_sums_of(site)
        readings = tuple(site.reading() for site in sorted(sites.values(), key=place))
        return Found(readings, self._skips(readings), tokens, ", ".join(backends), self.last if fresh else {})

    def skips(self) -> tuple[Skipped, ...]:
        """What was not measured; a site that was in the end is not among it."""
        return self.found().skipped

    def _skips(self, sites: tuple[SiteReading, ...]) -> tuple[Skipped, ...]:
        measured_names = {site.name for site in sites}
        found = {name: reason for name, reason in self.skipped.items() if name not in measured_names}
        for name, reason in self._refused.items():
            # What computes attention with code of its own may have been seen all the same, as torch functions.
            if not any(not name or site == name or site.startswith(f"{name}.") for site in measured_names):
                found.setdefault(name or next(iter(self._names.values())), reason)
        return tuple(Skipped(name, reason) for name, reason in found.items())


def measured(call: Call, real: Tensor | None, queries: int, *, sums: bool = True) -> AttentionStats | Accumulated:
    """What a call adds: ``sums`` on the device where its backend makes them, statistics of rows elsewhere.

    ``real``: [B, Q] bool, which of all its ``queries`` count.
    """
    with torch.no_grad():
        if sums and accumulates(call):
            included = None if real is None else _chosen(real.to(call.query.device), call.rows)
            return accumulated(call, included, queries)
        stats = executed(call, queries).stats
    assert stats is not None
    return (stats if real is None else _where(stats, real)).detach()


def _where(stats: AttentionStats, real: Tensor) -> AttentionStats:
    return stats.where(_chosen(real.to(stats.device), stats.rows)[:, None])


def _chosen(real: Tensor, rows: Tensor | None) -> Tensor:
    """[B, measured] of [B, Q]."""
    return real if rows is None else real[:, rows.to(real.device)]
