"""Streaming reduction: per-row statistics of many batches into one reading per head, in float64 sums."""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor

from attemper.call.result import BUCKETS, HISTOGRAM_BINS, AttentionStats, by_head
from attemper.call.sums import COLUMNS, column, joined, summed
from attemper.readings.labels import layer_of
from attemper.readings.reading import FEWEST_KEYS, HeadReading, SiteReading, VisibleKeyBucket, number

_MEANS = (
    "entropy", "normalized_entropy", "effective_tokens", "max_weight", "logit_variance", "mass", "first_token_mass",
    "gini", "support_size", "mean_distance", "entropy_with_sink", "score_variance",
)  # fmt: skip
"""Statistics of which a reading shows the mean."""

_IN_SUMS = tuple(name for name in _MEANS if name in COLUMNS)
_SHOWN = {*_IN_SUMS, "max_logit"}
"""What ``backends/sums.py`` has. Statistics that hold all of it, and nothing else a reading shows, come as sums."""

_CURVE = ("entropy", "normalized_entropy", "first_token_mass")


class SiteReduction:
    """Sums over all rows that one site has shown so far: batches in any order give the same reading."""

    def __init__(
        self, name: str, kind: str, mode: str, heads: int, device: torch.device | None = None,
        fewest_keys: int = FEWEST_KEYS,
    ) -> None:  # fmt: skip
        self.name, self.kind, self.mode = name, kind, mode
        self.fewest_keys = fewest_keys
        self.queries = self.keys = 0
        self.heads = heads
        self.normalizer = "softmax"
        self.spoiled = False
        """Whether its numbers cannot be trusted: then it is not shown."""
        # Sums stay where float64 is: nothing waits for the device until a reading is asked for.
        device = torch.device("cpu") if device is None or device.type == "mps" else device
        # Made in inference mode they could not be added to outside of it.
        with torch.inference_mode(False):
            zeros = torch.zeros(heads, dtype=torch.float64, device=device)
            self._sums = {statistic: zeros.clone() for statistic in _MEANS}
            self._counts = {statistic: zeros.clone() for statistic in _MEANS}
            self._max_logit = torch.full_like(zeros, -math.inf)
            self._rows, self._empty, self._nonfinite = zeros.clone(), zeros.clone(), zeros.clone()
            self._histogram = torch.zeros((heads, HISTOGRAM_BINS), dtype=torch.int64, device=device)
            parts = 1 if fits_buckets(fewest_keys) else 2
            self._bucket_rows = torch.zeros((parts, heads, BUCKETS), dtype=torch.float64, device=device)
        self._bucket_sums: dict[str, Tensor] = {}
        self._added: Tensor | None = None
        """Sums of ``add_sums`` that are not among the others yet."""

    def add(self, stats: AttentionStats, queries: int, keys: int) -> None:
        """Takes in one call's rows, without waiting for the device."""
        if 0 in stats.shape:
            return
        self.queries, self.keys = max(self.queries, queries), max(self.keys, keys)
        self.normalizer = stats.normalizer
        if self._has_sums(stats) and (sums := summed(stats)) is not None:
            self.add_sums(sums, queries, keys)
            return
        self._add_means(stats)
        rows, empty, nonfinite = (by_head(part).sum(1) for part in (stats.valid, stats.empty, stats.nonfinite))
        largest = by_head(stats.max_logit.masked_fill(~stats.valid, -math.inf)).amax(1)
        self._max_logit = torch.maximum(self._max_logit, largest.to(self._max_logit))
        self._rows += rows.to(self._rows.device)
        self._empty += empty.to(self._rows.device)
        self._nonfinite += nonfinite.to(self._rows.device)
        self._histogram += stats.histogram().to(self._histogram.device)
        curves = [part.by_visible_keys() for part in self._parted(stats)]
        self._add_binned(
            torch.stack([curve.rows for curve in curves]),
            {statistic: torch.stack([curve.sums[statistic] for curve in curves]) for statistic in curves[0].sums},
        )

    def _has_sums(self, stats: AttentionStats) -> bool:
        """Whether sums of a kernel hold all that a reading shows of these statistics."""
        by_name = {*_MEANS} - {*_IN_SUMS}
        return _SHOWN.issubset(stats.names) and by_name.isdisjoint(stats.names) and fits_buckets(self.fewest_keys)

    def _parted(self, stats: AttentionStats) -> tuple[AttentionStats, ...]:
        """Rows that see too few keys to be judged and the others, where one bucket would hold both."""
        if fits_buckets(self.fewest_keys):
            return (stats,)
        enough = stats.visible_keys >= self.fewest_keys
        return stats.where(~enough), stats.where(enough)

    def _add_means(self, stats: AttentionStats) -> None:
        """Sums and counts of every mean as one stacked tensor: a sampled training step waits for this."""
        names = [name for name in _MEANS if name in stats]
        values = torch.stack([stats[name] for name in names]).to(self._rows.device)
        defined = torch.stack([stats.defined(name) for name in names]).to(self._rows.device)
        sums = torch.where(defined, values, 0.0).sum((1, 3), dtype=torch.float64)
        for statistic, total, count in zip(names, sums, defined.sum((1, 3)), strict=True):
            self._sums[statistic] += total
            self._counts[statistic] += count

    def _add_binned(self, rows: Tensor, sums: dict[str, Tensor]) -> None:
        self._bucket_rows += rows
        for statistic, added in sums.items():
            self._bucket_sums[statistic] = self._bucket_sums.get(statistic, 0.0) + added

    def add_sums(self, sums: Tensor, queries: int, keys: int) -> None:
        """Takes in calls that a kernel has summed (``backends/sums.py``), [H, WIDTH]: two operations."""
        self.queries, self.keys = max(self.queries, queries), max(self.keys, keys)
        self._added = sums if self._added is None else joined(self._added, sums)

    def _take_in(self) -> None:
        """Brings what ``add_sums`` got to where ``add`` adds."""
        if self._added is None:
            return
        sums, self._added = self._added.to(self._rows.device), None
        rows = column(sums, "rows")
        for statistic in _IN_SUMS:
            own = f"rows_of_{statistic}"
            self._sums[statistic] += column(sums, statistic)
            self._counts[statistic] += column(sums, own) if own in COLUMNS else rows
        self._max_logit = torch.maximum(self._max_logit, column(sums, "max_logit"))
        self._rows += rows
        self._empty += column(sums, "empty")
        self._nonfinite += column(sums, "nonfinite")
        self._histogram += column(sums, "histogram").to(self._histogram.dtype)
        curve = {statistic: column(sums, f"curve_{statistic}")[None] for statistic in _CURVE}
        self._add_binned(column(sums, "curve_rows")[None], curve)

    def with_sums_of(self, other: SiteReduction) -> SiteReduction:
        """A copy with the rows of ``other`` as well, which has as many heads, and holds nothing but sums."""
        both = deepcopy(self)
        assert other._added is not None
        both.add_sums(other._added, other.queries, other.keys)
        return both

    def reading(self) -> SiteReading:
        """Means over everything added so far."""
        self._take_in()
        layer = layer_of(self.name)
        heads = tuple(self._head(head, layer) for head in range(self.heads))
        return SiteReading(self.name, self.kind, self.mode, self.queries, self.keys, heads, self.normalizer, layer)

    def _mean(self, statistic: str, head: int) -> float | None:
        count = float(self._counts[statistic][head])
        return number(float(self._sums[statistic][head]) / count) if count else None

    def _head(self, head: int, layer: int | None) -> HeadReading:
        buckets = self._buckets(head)
        variance = self._mean("logit_variance", head)
        return HeadReading(
            head=head,
            entropy_nats=self._mean("entropy", head),
            normalized_entropy=self._mean("normalized_entropy", head),
            effective_tokens=self._mean("effective_tokens", head),
            max_weight=self._mean("max_weight", head),
            max_logit=number(float(self._max_logit[head])),
            logit_std=None if variance is None else math.sqrt(variance),
            mass=self._mean("mass", head),
            first_token_mass=self._mean("first_token_mass", head),
            gini=self._mean("gini", head),
            normalized_entropy_histogram=tuple(self._histogram[head].tolist()),
            by_visible_keys=buckets,
            rows=int(self._rows[head]),
            empty_rows=int(self._empty[head]),
            nonfinite_rows=int(self._nonfinite[head]),
            layer=layer,
            support_size=self._mean("support_size", head),
            mean_distance=self._mean("mean_distance", head),
            entropy_with_sink_nats=self._mean("entropy_with_sink", head),
            score_variance=self._mean("score_variance", head),
            judged=any(bucket.first >= self.fewest_keys for bucket in buckets),
        )

    def _buckets(self, head: int) -> tuple[VisibleKeyBucket, ...]:
        found = self._bucket_rows[:, head].T.tolist()
        return tuple(
            self._bucket(head, index, part, int(rows))
            for index, parts in enumerate(found)
            for part, rows in enumerate(parts)
            if rows
        )

    def _bucket(self, head: int, index: int, part: int, rows: int) -> VisibleKeyBucket:
        first, last = 1 << index, (2 << index) - 1
        if first < self.fewest_keys <= last:
            first, last = (self.fewest_keys, last) if part else (first, self.fewest_keys - 1)
        means = {name: float(sums[part, head, index]) / rows for name, sums in self._bucket_sums.items()}
        return VisibleKeyBucket(
            first=first,
            last=last,
            rows=rows,
            entropy_nats=means.get("entropy"),
            # A row with one key has no normalised entropy, and no key beside the first.
            normalized_entropy=means.get("normalized_entropy") if index else None,
            first_token_mass=means.get("first_token_mass") if index else None,
        )


def fits_buckets(fewest_keys: int) -> bool:
    """Whether an edge of the buckets by visible keys, which are powers of two, is at ``fewest_keys``."""
    return fewest_keys & (fewest_keys - 1) == 0
