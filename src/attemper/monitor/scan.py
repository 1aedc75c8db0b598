"""``attemper.scan``: every head of a model over batches of data, exact, streaming, without changing the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.functional.call import chosen_backend
from attemper.functional.names import asked_names, with_kept
from attemper.functional.stats import AttentionStats
from attemper.monitor.alarms import alarms, checked_limits
from attemper.monitor.reduction import SiteReduction
from attemper.monitor.result import Scan
from attemper.records import Reading, Skipped
from attemper.sites import transformers as registry
from attemper.sites.observer import UnsupportedCallError, observing
from attemper.sites.padding import CallContext, tracked

_ADVICE = (
    "Attention is seen in transformers models that use its attention registry. For a model of your own, measure "
    "queries and keys "
    "directly with attemper.attention_statistics(query, key)."
)


def scan(
    model: nn.Module, batches: Iterable[Any], *, stats: str | Iterable[str] = "all",
    limits: Mapping[str, float] | None = None, backend: str = "auto", name: str | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Scan:  # fmt: skip
    """Exact attention statistics of every head of ``model`` over ``batches``.

    Each batch runs through the model once, without gradients, in the mode (train or eval) that the model is in. For
    that time its attention is computed here, exactly, with statistics in the same pass; its own implementation is put
    back afterwards, whatever happens. Padded queries are left out, by the model's 2-D attention masks.

    Args:
        model: a transformers model, or a module that contains some.
        batches: an iterable of dict (``model(**batch)``), tuple or list (``model(*batch)``), or tensor
            (``model(batch)``), on
            the model's device.
        stats: which statistics; "all" is what the readings show. Add "gini" for ``HeadReading.gini``.
        limits: of alarms, by kind: collapsed, diffuse, logits, first_token; those not named keep their default.
        backend: as in :func:`attemper.attention`.
        name: of the model in the result; None for its class and, if it has one, the path it was loaded from.
        on_batch: called with the number of batches done, after each.

    Returns:
        ``Scan``: ``.sites``, ``.skipped``, ``.alarms``; prints as a table; ``.to_json()``, ``.to_pandas()``.

    Raises:
        InputError: nothing to scan, no attention was seen, attention dropout is on, or a batch of another kind.
        BackendError: the named backend cannot do what a layer needs.
    """
    checked = checked_limits(limits)
    names = with_kept(tuple(dict.fromkeys((*asked_names("scan", "all"), *asked_names("scan", stats)))))
    used = chosen_backend(backend)
    with registry.switched(model) as switch, tracked(model, switch.models) as context:
        collector = _Collector(model, names, backend, context)
        done = 0
        for done, batch in enumerate(batches, 1):
            _run(model, batch, collector, switch, done)
            if on_batch is not None:
                on_batch(done)
    if not done:
        raise InputError("scan: there is no batch: batches is empty (or was used up before).")
    skipped = _skipped(switch.refused | collector.skipped)
    if not collector.sites:
        reasons = "".join(f"\n  {entry.name}: {entry.reason}" for entry in skipped)
        raise InputError(f"scan saw no attention in {type(model).__name__}. {_ADVICE}{reasons}")
    sites = tuple(site.reading() for site in collector.ordered())
    title = name or _title(model)
    reading = Reading(title, collector.tokens, used, sites, skipped, alarms(sites, checked))
    return Scan(reading, collector.last)


def _run(model: nn.Module, batch: Any, collector: _Collector, switch: registry.Switched, number: int) -> None:
    """One batch; a model with a call that cannot be honoured gets its own attention back, and the batch runs again."""
    while True:
        collector.begin()
        try:
            with torch.no_grad(), observing(collector):
                _called(model, batch, number)
        except UnsupportedCallError as error:
            owner = collector.owner(error.module, switch.models)
            if owner is None:
                raise
            collector.skipped[collector.name_of(error.module)] = error.reason
            switch.exclude(owner)
            continue
        collector.commit()
        return


def _called(model: nn.Module, batch: Any, number: int) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    if isinstance(batch, Tensor):
        return model(batch)
    raise InputError(
        f"scan: batch {number} is {type(batch).__name__}; expected a dict (model(**batch)), a tuple or list "
        f"(model(*batch)) or a "
        "tensor (model(batch))."
    )


def _title(model: nn.Module) -> str:
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"{type(model).__name__} {path}".strip()


def _skipped(reasons: Mapping[str, str]) -> tuple[Skipped, ...]:
    return tuple(Skipped(name, reason) for name, reason in reasons.items())


class _Collector:
    """The observer of a scan: names sites, leaves padding out, and adds a batch only once the whole of it went
    through.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], backend: str, context: CallContext) -> None:
        self.stats, self.backend, self.context = names, backend, context
        self.sites: dict[tuple[str, str, str], SiteReduction] = {}
        self.skipped: dict[str, str] = {}
        self.last: dict[str, AttentionStats] = {}
        self.tokens = 0
        self._names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self._staged: list[tuple[tuple[str, str, str], AttentionStats, int]] = []

    def name_of(self, module: nn.Module) -> str:
        return self._names.get(module, type(module).__name__)

    def owner(self, module: nn.Module, models: list[nn.Module]) -> nn.Module | None:
        """The innermost of ``models`` that holds ``module``."""
        holders = [model for model in models if any(part is module for part in model.modules())]
        return max(holders, key=lambda model: len(self._names[model])) if holders else None

    def begin(self) -> None:
        self._staged.clear()
        self.context.stack.clear()

    def key_tokens(self, module: nn.Module, keys: int) -> Tensor | None:
        tokens = self.context.tokens
        mask = tokens.encoder if self._kind(module) == "cross" else tokens.own
        return mask if mask is not None and mask.shape[1] == keys else None

    def observe(self, module: nn.Module, stats: AttentionStats, keys: int) -> None:
        call = self.context.calls.get(module, 0) + 1
        self.context.calls[module] = call
        name = self.name_of(module) + (f"#{call}" if call > 1 else "")
        kind = self._kind(module)
        mask = self.context.tokens.own
        if mask is not None:
            queries = stats.lse.shape[2]
            if mask.shape[0] == stats.lse.shape[0] and mask.shape[1] == (keys if kind == "self" else queries):
                stats = stats.where(mask[:, -queries:][:, None].to(stats.lse.device) if queries else mask[:, None, :0])
            elif not bool(mask.all()):
                self.skipped[name] = (
                    f"padding of its queries cannot be told: {list(stats.lse.shape)} rows under a mask of "
                    f"{list(mask.shape)}"
                )
                return
        mode = "train" if module.training else "eval"
        self._staged.append(((name, kind, mode), stats, keys))

    def _kind(self, module: nn.Module) -> str:
        return "cross" if self.context.cross.get(module, False) else "self"

    def commit(self) -> None:
        """Adds the staged calls of a batch that went through."""
        for index, (key, stats, keys) in enumerate(self._staged):
            if key not in self.sites:
                self.sites[key] = SiteReduction(*key, heads=stats.lse.shape[1])
            self.sites[key].add(stats, keys)
            self.last[key[0]] = stats
            if index == 0:
                counted = stats.valid | stats.empty | stats.nonfinite
                self.tokens += int(counted[:, :1].sum())
        self._staged.clear()

    def ordered(self) -> list[SiteReduction]:
        """Sites in the order of the model's modules, calls of one module in their order."""
        order = {name: place for place, name in enumerate(self._names.values())}

        def place(site: SiteReduction) -> tuple[int, int]:
            module, _, call = site.name.partition("#")
            return order.get(module, len(order)), int(call or 1)

        return sorted(self.sites.values(), key=place)
