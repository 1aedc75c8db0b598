"""The observer behind watch and scan: names sites, tells self from cross, leaves padding out, reduces as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from attemper.errors import BackendError, InputError
from attemper.functional.attention import measured
from attemper.functional.call import first_true
from attemper.functional.stats import AttentionStats
from attemper.monitor.reduction import SiteReduction
from attemper.records import SiteReading, Skipped
from attemper.sites.observer import AttentionCall, UnsupportedCallError
from attemper.sites.padding import CallContext, Tokens
from attemper.sites.sharded import local
from attemper.sites.wrappers import class_name, named, unwrapped

Key = tuple[str, str, str]
"""(name, kind, mode) of a site."""


class Collector:
    """Takes attention calls, and adds those of a forward pass only once the whole of it went through.

    ``rows``: measure only this many query rows of each sequence. ``wanted``: names of sites (or their beginnings) to
    keep.
    """

    def __init__(
        self, model: nn.Module, stats: tuple[str, ...], backend: str, context: CallContext, *, replace: bool,
        rows: int | None = None, wanted: tuple[str, ...] | None = None,
        quiet: Callable[[str, Exception], None] | None = None,
    ) -> None:  # fmt: skip
        # A sum over all rows cannot leave padded ones out, and no reading shows it.
        stats = tuple(name for name in stats if name != "key_mass")
        self.stats, self.backend, self.context, self.replace = stats, backend, context, replace
        self.rows, self.wanted, self._quiet = rows, wanted, quiet
        self.sites: dict[Key, SiteReduction] = {}
        self.skipped: dict[str, str] = {}
        self.last: dict[str, AttentionStats] = {}
        self.generator = torch.Generator().manual_seed(0)
        title = class_name(unwrapped(model))
        self._names = {module: name or title for module, name in named(model).items()}
        self._staged: list[tuple[Key, AttentionStats, tuple[int, int], Tensor | int]] = []
        self._staged_skips: dict[str, str] = {}
        self._tokens: Tensor | int = 0
        self._refused: dict[str, str] = {}
        self.unwanted: set[str] = set()
        """Names of sites that were seen and are not ``wanted``."""

    @property
    def tokens(self) -> int:
        """Real tokens: query rows of the first site of each pass."""
        return int(self._tokens)

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
            stats = measured(
                call.query.detach(), call.key.detach(), None if call.mask is None else call.mask.detach(),
                replace(call.options, stats=self.stats, backend=self.backend), packing=call.packing, first_keys=first,
                rows=self.rows, generator=self.generator,
            )  # fmt: skip
        except (InputError, BackendError) as error:
            self.skip(module, str(error))
            return
        self._stage(module, stats, keys, call.query.shape[2], call)

    def observe(self, module: nn.Module, stats: AttentionStats, keys: int) -> None:
        if self._kept(self.name_of(module)):
            self._stage(module, stats, keys, stats.lse.shape[2], None)

    def skip(self, module: nn.Module, reason: str) -> None:
        # Counted as a call: a module of which another call is measured still shows that this one was not.
        self._staged_skips[self._next_name(module)] = reason

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Takes note of modules (by name, empty for the root) into which nothing can look."""
        self._refused |= reasons

    def _kept(self, name: str) -> bool:
        kept = self.wanted is None or any(name == w or name.startswith(f"{w}.") for w in self.wanted)
        if not kept:
            self.unwanted.add(name)
        return kept

    def _stage(
        self, module: nn.Module, stats: AttentionStats, keys: int, queries: int, call: AttentionCall | None
    ) -> None:
        name = self._next_name(module)
        kind = self._kind(module, keys) if call is None or call.cross is None else ("cross" if call.cross else "self")
        context = self.context.tokens if call is None or call.tokens is None else Tokens(call.tokens, None)
        read: Tensor | int = stats.lse.shape[0] * queries
        if context.own is not None:
            real = context.of_queries(queries, keys, cross=kind == "cross")
            if real is None or real.shape[0] != stats.lse.shape[0]:
                if not bool(context.own.all()):
                    shapes = f"{list(stats.lse.shape)} rows under a mask of {list(context.own.shape)}"
                    self._staged_skips[name] = f"padding of its queries cannot be told: {shapes}"
                    return
            else:
                real = real.to(stats.lse.device)
                read = real.sum()
                stats = stats.where((real if stats.rows is None else real[:, stats.rows.to(real.device)])[:, None])
        self._staged.append(
            ((name, kind, "train" if module.training else "eval"), stats.detach(), (queries, keys), read)
        )

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
        for index, (key, stats, size, read) in enumerate(self._staged):
            self._guarded(key[0], partial(self._add, key, stats, size))
            if index == 0:
                self._tokens = self._tokens + read
        self._staged.clear()
        self._staged_skips.clear()

    def _add(self, key: Key, stats: AttentionStats, size: tuple[int, int]) -> None:
        heads = stats.lse.shape[1]
        if key not in self.sites:
            self.sites[key] = SiteReduction(*key, heads=heads, device=stats.lse.device)
        site = self.sites[key]
        if site.heads != heads:
            self._drop(key, f"it had {site.heads} heads and then {heads}: its queries are not [batch, heads, ...]")
            return
        site.add(stats, *size)
        self.last[key[0]] = stats

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

    def readings(self) -> tuple[SiteReading, ...]:
        """Sites in the order of the model's modules, calls of one module in their order."""
        order = {name: place for place, name in enumerate(self._names.values())}

        def place(site: SiteReduction) -> tuple[int, int]:
            module, _, call = site.name.partition("#")
            return order.get(module, len(order)), int(call or 1)

        return tuple(site.reading() for site in sorted(self._trusted(), key=place))

    def _trusted(self) -> list[SiteReduction]:
        return [site for site in self.sites.values() if not site.spoiled]

    def skips(self) -> tuple[Skipped, ...]:
        """What was not measured; a site that was in the end is not among it."""
        measured_names = {site.name for site in self._trusted()}
        found = {name: reason for name, reason in self.skipped.items() if name not in measured_names}
        for name, reason in self._refused.items():
            # What computes attention with code of its own may have been seen all the same, as torch functions.
            if not any(not name or site == name or site.startswith(f"{name}.") for site in measured_names):
                found.setdefault(name or next(iter(self._names.values())), reason)
        return tuple(Skipped(name, reason) for name, reason in found.items())
