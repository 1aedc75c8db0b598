"""Statistics of many calls as sums per head on their device, in float64; ``readings/sums.py`` has their layout, and how
one reading of each head follows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attemper.call.result import AttentionStats, by_head
from attemper.readings.labels import layer_of
from attemper.readings.reading import FEWEST_KEYS, SiteReading
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.readings.sums import (
    CURVES,
    ENOUGH_KEYS,
    ERRORS,
    LARGEST,
    MEANS,
    SPREAD_PLACE,
    SiteTotals,
    fits_buckets,
    places,
    width,
)
from attemper.statistics import COLUMNS, COUNTED, STATISTIC_OF

MEASURED = frozenset(STATISTIC_OF.values()).difference(COUNTED)
"""Statistics that a reading shows, but for those that are counted beside."""
IN_KERNELS = MEASURED.intersection(COLUMNS)


class SiteSums:
    """Sums over all rows that one site has shown so far: batches in any order give the same reading."""

    def __init__(self, label: SiteLabel, device: torch.device | None = None, fewest_keys: int = FEWEST_KEYS) -> None:
        self.label, self.fewest_keys = label, fewest_keys
        self.queries = self.keys = 0
        self.roles: Mapping[str, tuple[float | None, ...]] = {}
        """Role -> the score of each head, on the first text."""
        self.spoiled = False
        """Whether its numbers cannot be trusted: then it is not shown."""
        self._places = places(fewest_keys)
        # Sums stay where float64 is: nothing waits for the device until a reading is asked for.
        device = torch.device("cpu") if device is None or device.type == "mps" else device
        # Made in inference mode they could not be added to outside of it.
        with torch.inference_mode(False):
            self.sums = torch.zeros((label.heads, width(fewest_keys)), dtype=torch.float64, device=device)
            """[heads, columns] float64, the columns as ``places`` has them."""
            self.sums[:, LARGEST] = -math.inf
        self._ended: Tensor | None = None
        """[H, sums] when the last batch ended: valid rows, those without weight, and ``ERRORS``."""

    def add(self, stats: AttentionStats, queries: int, keys: int) -> None:
        """Adds the rows of one call, without waiting for the device."""
        if 0 in stats.shape:
            return
        self.tell(normalizer=stats.normalizer)
        sums = stats.sums() if self._has_sums(stats) else None
        self.add_sums(self._sums_of(stats) if sums is None else sums, queries, keys)

    def add_sums(self, sums: Tensor, queries: int, keys: int) -> None:
        """Adds sums [H, WIDTH] of a kernel, or [H, columns] of all that is here."""
        self.queries, self.keys = max(self.queries, queries), max(self.keys, keys)
        sums, own = sums.to(self.sums.device), self.sums[:, : sums.shape[1]]
        largest = torch.maximum(own[:, LARGEST], sums[:, LARGEST])
        own.add_(sums)[:, LARGEST] = largest

    def add_counted(self, counted: Tensor) -> None:
        """Adds ``COUNTED`` of one call: sums and their rows, [2, statistics, H] float64."""
        at = [self._places[prefix + name].start for prefix in ("", "rows_of_") for name in COUNTED]
        self.sums[:, at] += counted.flatten(0, 1).T.to(self.sums)

    def end_batch(self) -> None:
        """Takes note of how the batch that was added differs from others, without waiting for the device."""
        now = self.sums[:, [self._places[name].start for name in ("rows", "rows_without_weight", *ERRORS)]]
        batch = now if self._ended is None else now - self._ended
        rows, own = batch[:, :1] - batch[:, 1:2], batch[:, 2:]
        self.sums[:, SPREAD_PLACE] += torch.cat(((rows > 0).to(own), rows, rows**2, own**2, rows * own), 1)
        self._ended = now

    @property
    def key(self) -> SiteKey:
        return self.label.key

    def tell(self, **facts: Any) -> None:
        """Takes what else is known of the site: fields of its label."""
        self.label = _label_with(self.label, **facts)

    def with_sums(self, sums: Tensor) -> SiteSums:
        """The same site with other sums, say on the host."""
        other = copy(self)
        other.sums = sums
        return other

    def under_name(self, name: str | None = None) -> SiteSums:
        """The same rows, of a site of this name, in the layer that it says."""
        other, name = copy(self), name or self.label.name
        other.tell(name=name, layer=layer_of(name))
        return other

    def with_sums_of(self, other: SiteSums) -> SiteSums:
        """A copy with the rows of ``other`` as well, which has as many heads. Calls are no batches: how batches differ
        is not known of it.
        """
        both = deepcopy(self)
        both.add_sums(other.sums, other.queries, other.keys)
        both.sums[:, SPREAD_PLACE] = 0.0
        both.roles = other.roles or self.roles
        return both

    def _has_sums(self, stats: AttentionStats) -> bool:
        """Whether the sums of a kernel hold all that a reading shows of these statistics."""
        return MEASURED.intersection(stats.names) == IN_KERNELS and fits_buckets(self.fewest_keys)

    def _sums_of(self, stats: AttentionStats) -> Tensor:
        """The rows of one call as sums [H, columns]."""
        parts = {name: by_head(getattr(stats, name)).sum(1) for name in ("empty", "nonfinite")}
        valid = stats.valid
        parts["rows"] = by_head(valid).sum(1)
        parts["max_logit"] = by_head(stats.max_logit.masked_fill(~valid, -math.inf)).amax(1)
        parts |= self._means(stats)
        parts["rows_without_weight"] = parts["rows"].to(self.sums.device) - parts["rows_of_entropy"]
        parts["histogram"] = stats.histogram()
        for names, rows in zip((CURVES, ENOUGH_KEYS), self._parts(stats), strict=False):
            curve = rows.by_visible_keys()
            sums = {"curve_rows": curve.rows} | {f"curve_{name}": part for name, part in curve.sums.items()}
            parts |= {name: sums[of] for name, of in zip(names, CURVES, strict=True)}
        empty = self.sums.new_zeros(self.label.heads)
        return torch.cat([parts.get(name, empty).to(self.sums).view(self.label.heads, -1) for name in self._places], 1)

    def _means(self, stats: AttentionStats) -> dict[str, Tensor]:
        """Sums and rows of every mean from one stacked tensor: a sampled training step waits for this."""
        names = [name for name in MEANS if name in stats and name not in COUNTED]
        values = torch.stack([stats[name] for name in names]).to(self.sums.device)
        defined = torch.stack([stats.defined_rows(name) for name in names]).to(self.sums.device)
        sums = torch.where(defined, values, 0.0).sum((1, 3), dtype=torch.float64)
        rows = {f"rows_of_{name}": part for name, part in zip(names, defined.sum((1, 3)), strict=True)}
        return dict(zip(names, sums, strict=True)) | rows

    def _parts(self, stats: AttentionStats) -> tuple[AttentionStats, ...]:
        """Rows that see too few keys to be judged and the others, where one bucket would hold both."""
        if fits_buckets(self.fewest_keys):
            return (stats,)
        enough = stats.visible_keys >= self.fewest_keys
        return stats.where(~enough), stats.where(enough)

    def reading(self) -> SiteReading:
        """Means over everything added so far. Waits for the device."""
        return self.totals((0, 0)).reading(self.fewest_keys)

    def totals(self, order: tuple[int, int]) -> SiteTotals:
        """The same sums on the host, as a copy. Waits for the device."""
        return SiteTotals(self.label, self.queries, self.keys, order, self.sums.cpu().numpy().copy(), self.roles)


@lru_cache(maxsize=4096)
def _label_with(label: SiteLabel, **facts: Any) -> SiteLabel:
    return replace(label, **facts)
