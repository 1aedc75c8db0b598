"""``attemper.scan``: every head of a model over batches of data, exact, streaming, without changing the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.functional.call import checked_backend
from attemper.functional.names import reading_names
from attemper.monitor.alarms import alarms, checked_fewest_keys, checked_limits
from attemper.monitor.collector import Collector
from attemper.monitor.result import Scan
from attemper.records import FEWEST_KEYS, Reading
from attemper.sites import functions, public_functions
from attemper.sites import transformers as registry
from attemper.sites.compiled import SCRIPTED, compiled_parts, is_compiled, is_script
from attemper.sites.observer import UnsupportedCallError, observing
from attemper.sites.padding import CallContext, tracked
from attemper.sites.wrappers import class_name, unwrapped

ADVICE = (
    "Seen are transformers models, calls of F.scaled_dot_product_attention, nn.MultiheadAttention, FlexAttention, and "
    "softmax by hand, none of them inside code that torch.compile has compiled. Anywhere else, put "
    "attemper.tap(query, key, "
    "name=...) beside the attention, or measure it with attemper.attention_statistics(query, key)."
)


def scan(
    model: nn.Module, batches: Iterable[Any], *, stats: str | Iterable[str] = "all",
    limits: Mapping[str, float] | None = None, fewest_keys: int = FEWEST_KEYS, backend: str = "auto",
    name: str | None = None, on_batch: Callable[[int], None] | None = None,
) -> Scan:  # fmt: skip
    """Exact attention statistics of every head of ``model`` over ``batches``.

    Each batch runs through the model once, without gradients, in the mode (train or eval) that the model is in.
    Models of transformers' attention registry attend here for that time, output and statistics in one pass; every
    other attention runs as it is and is measured beside. Everything is put back afterwards, whatever happens. Padded
    queries are left out, by the model's 2-D attention masks.

    Args:
        model: any module.
        batches: an iterable of dict (``model(**batch)``), tuple or list (``model(*batch)``), or tensor
            (``model(batch)``), on the model's device.
        stats: what is measured beside "all", which always is: support_size, mean_distance, gini, entropy_with_sink,
            score_variance. Every reading then shows it. lse, mean_logit and visible_keys are of rows: see
            ``row_statistics``.
        limits: of alarms, by kind: collapsed, diffuse, logits, first_token; those not named keep their default.
        fewest_keys: a row must see so many keys to count for alarms about sharpness and first tokens. A head without
            such a row is not ``judged``, and the result's ``notes`` say so.
        backend: as in :func:`attemper.attention`.
        name: of the model in the result; None for its class and, if it has one, the path it was loaded from.
        on_batch: called with the number of batches done, after each.

    Returns:
        ``Scan``: ``.sites``, ``.skipped``, ``.alarms``; prints as a table; ``.to_json()``, ``.to_pandas()``.

    Raises:
        InputError: the model is no module, or TorchScript; nothing to scan, no attention was seen, attention dropout
            is on, or a batch of another kind.
        BackendError: the named backend cannot do what a layer needs.
    """
    _check(model, batches)
    checked, fewest_keys = checked_limits(limits), checked_fewest_keys("scan", fewest_keys)
    names = reading_names("scan", stats)
    checked_backend(backend, device_of(model))
    done, context = 0, CallContext()
    collector = Collector(model, names, backend, context, replace=True, fewest_keys=fewest_keys)
    with ExitStack() as stack:
        switch = stack.enter_context(registry.switched(model))
        stack.enter_context(tracked(context, model, registry.pretrained(model)))
        stack.enter_context(public_functions.seen())
        if any(map(is_compiled, model.modules())):
            # Nothing can look into compiled code; run as it was written it computes the same.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        collector.refuse({name: reason for name, reason in compiled_parts(model).items() if reason == SCRIPTED})
        for done, batch in enumerate(batches, 1):
            _run(model, batch, collector, switch, done)
            if on_batch is not None:
                on_batch(done)
    if not done:
        raise InputError("scan: there is no batch: batches is empty (or was used up before).")
    collector.refuse(switch.refused)
    if not collector.sites:
        reasons = "".join(f"\n  {entry.name}: {entry.reason}" for entry in collector.skips())
        raise InputError(f"scan saw no attention in {class_name(unwrapped(model))}. {ADVICE}{reasons}")
    found = collector.found()
    title = name or _title(model)
    raised = alarms(found.sites, checked, fewest_keys)
    reading = Reading(title, found.tokens, found.backend, found.sites, found.skipped, raised, fewest_keys=fewest_keys)
    return Scan(reading, found.last)


def _check(model: Any, batches: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"scan(model) must be a torch.nn.Module, got {type(model).__name__}.")
    if is_script(model):
        raise InputError(f"scan({type(model).__name__}): {SCRIPTED}.")
    if isinstance(batches, Tensor | Mapping | str):
        raise InputError(
            f"scan(batches) must be an iterable of batches, got one {type(batches).__name__}: write [batch] for one."
        )


def device_of(model: nn.Module) -> str | None:
    """The kind of device that the model's parameters are on; None where it has none."""
    parameter = next(model.parameters(), None)
    return None if parameter is None else parameter.device.type


def _run(model: nn.Module, batch: Any, collector: Collector, switch: registry.Switched, number: int) -> None:
    """One batch; a model with a call that cannot be honoured gets its own attention back, and the batch runs again."""
    while True:
        collector.begin()
        try:
            with torch.no_grad(), observing(collector), functions.seen():
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
        "(model(*batch)) or a tensor (model(batch))."
    )


def _title(model: nn.Module) -> str:
    model = unwrapped(model)
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"{class_name(model)} {path}".strip()
