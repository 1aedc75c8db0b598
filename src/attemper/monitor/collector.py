"""The observer behind watch and scan: names sites, tells self from cross, leaves padding out, reduces as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from attemper.errors import BackendError, InputError
from attemper.functional.attention import measured
from attemper.functional.call import first_true
from attemper.functional.stats import AttentionStats
from attemper.monitor.reduction import SiteReduction
from attemper.records import SiteReading, Skipped
from attemper.sites.observer import AttentionCall
from attemper.sites.padding import CallContext

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
        self._names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self._staged: list[tuple[Key, AttentionStats, tuple[int, int], Tensor | int]] = []
        self._staged_skips: dict[str, str] = {}
        self._tokens: Tensor | int = 0
        self._refused: dict[str, str] = {}

    @property
    def tokens(self) -> int:
        """Real tokens: query rows of the first site of each pass."""
        return int(self._tokens)

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module) or getattr(module, "tap_name", type(module).__name__)

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
        mask = tokens.encoder if self._kind(module) == "cross" else tokens.own
        return mask if mask is not None and mask.shape[1] == keys else None

    def see(self, module: nn.Module, call: AttentionCall) -> None:
        """Measures a call beside whoever computes it. With ``quiet``, what goes wrong goes there and no further."""
        if self._quiet is None:
            self._see(module, call)
            return
        try:
            self._see(module, call)
        except Exception as error:  # whatever it is, it must not end somebody's training run
            self._quiet(self.name_of(module), error)

    def _see(self, module: nn.Module, call: AttentionCall) -> None:
        if not self._kept(self.name_of(module)):
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
        self._staged_skips[self.name_of(module)] = reason

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Takes note of models (by name, empty for the root) that do not attend through a registry."""
        self._refused = dict(reasons)

    def _kept(self, name: str) -> bool:
        return self.wanted is None or any(name == w or name.startswith(f"{w}.") for w in self.wanted)

    def _stage(
        self, module: nn.Module, stats: AttentionStats, keys: int, queries: int, call: AttentionCall | None
    ) -> None:
        number = self.context.calls.get(module, 0) + 1
        self.context.calls[module] = number
        name = self.name_of(module) + (f"#{number}" if number > 1 else "")
        kind = self._kind(module) if call is None or call.cross is None else ("cross" if call.cross else "self")
        mask = self.context.tokens.own if call is None or call.tokens is None else call.tokens
        read: Tensor | int = stats.lse.shape[0] * queries
        if mask is not None:
            fits = mask.shape[0] == stats.lse.shape[0] and mask.shape[1] == (keys if kind == "self" else queries)
            if not fits:
                if self.replace and not bool(mask.all()):
                    shapes = f"{list(stats.lse.shape)} rows under a mask of {list(mask.shape)}"
                    self._staged_skips[name] = f"padding of its queries cannot be told: {shapes}"
                    return
            else:
                real = mask[:, mask.shape[1] - queries :].to(stats.lse.device)
                read = real.sum()
                stats = stats.where((real if stats.rows is None else real[:, stats.rows.to(real.device)])[:, None])
        self._staged.append(
            ((name, kind, "train" if module.training else "eval"), stats.detach(), (queries, keys), read)
        )

    def _kind(self, module: nn.Module) -> str:
        return "cross" if self.context.cross.get(module, False) else "self"

    def commit(self) -> None:
        """Adds the calls of a pass that went through."""
        self.skipped |= self._staged_skips
        for index, (key, stats, size, read) in enumerate(self._staged):
            if key not in self.sites:
                self.sites[key] = SiteReduction(*key, heads=stats.lse.shape[1], device=stats.lse.device)
            self.sites[key].add(stats, *size)
            self.last[key[0]] = stats
            if index == 0:
                self._tokens = self._tokens + read
        self._staged.clear()
        self._staged_skips.clear()

    def forget(self) -> None:
        """Starts over: the next pass is the first."""
        self.sites, self.last, self._tokens = {}, {}, 0

    def readings(self) -> tuple[SiteReading, ...]:
        """Sites in the order of the model's modules, calls of one module in their order."""
        order = {name: place for place, name in enumerate(self._names.values())}

        def place(site: SiteReduction) -> tuple[int, int]:
            module, _, call = site.name.partition("#")
            return order.get(module, len(order)), int(call or 1)

        return tuple(site.reading() for site in sorted(self.sites.values(), key=place))

    def skips(self) -> tuple[Skipped, ...]:
        """What was not measured; a site that was in the end is not among it."""
        measured_names = {site.name for site in self.sites.values()}
        found = {name: reason for name, reason in self.skipped.items() if name not in measured_names}
        for name, reason in self._refused.items():
            # What computes attention with code of its own may have been seen all the same, as torch functions.
            if not any(not name or site == name or site.startswith(f"{name}.") for site in measured_names):
                found.setdefault(name or type(next(iter(self._names))).__name__, reason)
        return tuple(Skipped(name, reason) for name, reason in found.items())
