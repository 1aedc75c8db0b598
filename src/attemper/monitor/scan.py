"""``attemper.scan``: every head of a model over batches of data, exact, streaming, without changing the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from attemper.backends.table import check_backend
from attemper.errors import InputError
from attemper.monitor.collector import Collector
from attemper.monitor.forward import observation, run
from attemper.monitor.model import check_model, date_of, device_of, provenance, title, why_nothing
from attemper.monitor.options import Scope
from attemper.readings.alarms import LIMITS
from attemper.readings.limits import AlarmLimits, alarms, check_fewest_keys
from attemper.readings.reading import FEWEST_KEYS, Reading
from attemper.readings.scan import Scan
from attemper.sites.padding import CallContext
from attemper.statistics import reading_names


def scan(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    stats: str | Iterable[str] = "all",
    limits: AlarmLimits | Mapping[str, Any] | None = None,
    fewest_keys: int = FEWEST_KEYS,
    backend: str = "auto",
    name: str | None = None,
    text: str | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Scan:
    """Exact attention statistics of every head of ``model`` over ``batches``.

    Each batch runs through the model once, without gradients, in the mode (train or eval) that the model is in.
    Models of transformers' attention registry attend here for that time, output and statistics in one pass; every
    other attention runs as it is and is measured beside. Everything is put back afterwards, whatever happens. Padded
    queries are left out, by the model's 2-D attention masks.

    Args:
        model: any module.
        batches: an iterable of dict (``model(**batch)``), tuple or list (``model(*batch)``), or tensor
            (``model(batch)``), on the model's device.
        stats: what is measured beside "all", which always is: support_size, mean_distance, gini,
            entropy_with_sink, score_variance. Every reading then shows it. lse, mean_logit and visible_keys are of
            rows: see ``row_statistics``.
        limits: of alarms: :class:`attemper.AlarmLimits`, or a mapping of the names collapsed, diffuse, logits and
            first_token; those not named keep their default.
        fewest_keys: a row must see so many keys to count for alarms about sharpness and first tokens. A head without
            such a row is not ``judged``, and the result's ``notes`` say so.
        backend: as in :func:`attemper.attention`.
        name: of the model in the result; None for its class and what it was loaded from: a hub id, or the last two
            names of a folder.
        text: what the batches are, by a name that the result shows (a file's, a data set's).
        on_batch: called with the number of batches done, after each.

    Returns:
        ``Scan``: ``.sites``, ``.skipped``, ``.alarms``; prints as a table; ``.to_json()``, ``.to_pandas()``.

    Raises:
        InputError: the model is no module, or TorchScript; nothing to scan, no attention was seen, attention dropout
            is on, or a batch of another kind.
        BackendError: the named backend cannot do what a layer needs.
    """
    _check(model, batches)
    checked, fewest_keys = AlarmLimits.of(limits, LIMITS), check_fewest_keys("scan", fewest_keys)
    names = reading_names("scan", stats)
    device = device_of(model)
    check_backend(backend, None if device is None else device.type)
    done, context = 0, CallContext()
    collector = Collector(model, context, Scope(names, backend, fewest_keys=fewest_keys))
    with observation(model, collector) as switch:
        for done, batch in enumerate(batches, 1):
            run(f"scan: batch {done}", model, batch, collector, switch)
            if on_batch is not None:
                on_batch(done)
    if not done:
        raise InputError("scan: there is no batch: batches is empty (or was used up before).")
    collector.refuse(switch.refused)
    if not collector.sites:
        raise InputError(why_nothing("scan", model, collector.skips()))
    found = collector.readings()
    raised = alarms(found.sites, checked, fewest_keys)
    reading = Reading(
        name or title(model),
        found.tokens,
        found.backend,
        found.sites,
        found.skipped,
        raised,
        fewest_keys=fewest_keys,
        text=text,
        **provenance(model, date_of(time.time())),
    )
    return Scan(reading, found.last)


def _check(model: Any, batches: Any) -> None:
    check_model("scan", model)
    if isinstance(batches, Tensor | Mapping | str):
        raise InputError(
            f"scan(batches) must be an iterable of batches, got one {type(batches).__name__}: write [batch] for one."
        )
