"""One stored sample as the reading of a scan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from attemper.readings.reading import FEWEST_KEYS, HeadReading, Reading, SiteReading, Skipped
from attemper.readings.sample import QUANTITIES, Sample, SiteLabel
from attemper.text import date_of

_FIELDS = tuple(part.name for part in fields(HeadReading) if part.name in QUANTITIES)
_NONE_STORED: dict[str, Any] = {"normalized_entropy_histogram": (), "by_visible_keys": ()}
"""Histograms and curves of a head: no history keeps them."""


def reading(sample: Sample, about: Mapping[str, Any], skipped: Iterable[Skipped] = ()) -> Reading:
    """What a watch showed at this step, as far as it was stored; a number that was not is None."""
    return Reading(
        model=str(about.get("model", "")),
        tokens=sample.tokens,
        backend=str(about.get("backend", "")),
        sites=tuple(_site(sample, label) for label in sample.sites),
        skipped=tuple(skipped),
        sampled_rows=about.get("rows"),
        fewest_keys=about.get("fewest_keys", FEWEST_KEYS),
        date=date_of(sample.time),
        dtype=about.get("dtype"),
        revision=about.get("revision"),
        versions=about.get("versions"),
    )


def _site(sample: Sample, label: SiteLabel) -> SiteReading:
    heads = sample.places[label.key]
    columns = {name: _numbers(name, row[heads]) for name, row in zip(sample.quantities, sample.values, strict=True)}
    return SiteReading(
        name=label.name,
        kind=label.kind,
        mode=label.mode,
        queries=_largest(columns.get("queries", [])),
        keys=_largest(columns.get("keys", [])),
        heads=tuple(_head(label, place, columns) for place in range(label.heads)),
        normalizer=label.normalizer,
        layer=label.layer,
    )


def _head(label: SiteLabel, place: int, columns: Mapping[str, list[Any]]) -> HeadReading:
    values: dict[str, Any] = {name: columns[name][place] if name in columns else None for name in _FIELDS}
    values |= {name: values[name] or 0 for name in _FIELDS if QUANTITIES[name].exact}
    judged = bool(columns["judged_rows"][place]) if "judged_rows" in columns else False
    return HeadReading(head=label.head_numbers[place], layer=label.layer, judged=judged, **_NONE_STORED, **values)


def _numbers(name: str, row: np.ndarray) -> list[Any]:
    """Counts as whole numbers, others in the fewest digits that tell them from their neighbours; None for NaN."""
    to = int if QUANTITIES[name].exact else (lambda value: float(str(np.float32(value))))
    return [to(value) if np.isfinite(value) else None for value in row]


def _largest(counts: list[int | None]) -> int:
    return max((count for count in counts if count is not None), default=0)
