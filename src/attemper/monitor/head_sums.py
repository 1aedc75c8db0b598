"""Statistics of many calls as sums per head, in float64, and one reading of each head from them.

The sums of a site are one tensor [heads, columns]. It begins with the columns of ``backends/sums.py``, which kernels
can fill; what only ``AttentionStats`` have follows::

    [ WIDTH columns of kernels | rows without weight | by-name sums | their rows | curves of rows that see enough keys ]

The last part is there only if ``fewest_keys`` is no power of two, so that one bucket by visible keys holds rows that
are judged and rows that are not. Two such tensors add up, but for the largest logit.
"""

from __future__ import annotations

import math
from copy import copy, deepcopy
from functools import cache, lru_cache

import torch
from torch import Tensor

from attemper.backends.sums import BINNED, COLUMNS
from attemper.call.result import BUCKETS, AttentionStats, by_head
from attemper.readings.labels import layer_of
from attemper.readings.reading import FEWEST_KEYS, HeadReading, SiteReading, VisibleKeyBucket, number
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.statistics import SHOWN, STATISTIC_OF, STATISTICS, Reduction, Rows

MEASURED = frozenset(STATISTIC_OF.values())
"""Statistics that a reading shows."""
IN_KERNELS = MEASURED.intersection(COLUMNS)
LARGEST = COLUMNS.index("max_logit")
MEANS = tuple(STATISTIC_OF[field] for field, shown in SHOWN.items() if shown.reduction is not Reduction.LARGEST)
"""Statistics of which a reading shows the mean, or follows from it."""
OTHERS = tuple(name for name in MEANS if name not in COLUMNS)
"""Those of them that kernels do not sum."""
CURVES = tuple(name for name in BINNED if name.startswith("curve_"))
ENOUGH_KEYS = tuple(f"judged_{name}" for name in CURVES)
"""The curves of rows that see enough keys, where a bucket would hold others, too."""
NUMBERS = (*COLUMNS, *BINNED, "rows_without_weight", *OTHERS, *(f"rows_of_{name}" for name in OTHERS))
"""What stands in the tensor, in this order; ``ENOUGH_KEYS`` follow where they are needed."""


class SiteSums:
    """Sums over all rows that one site has shown so far: batches in any order give the same reading."""

    def __init__(
        self,
        name: str,
        kind: str,
        mode: str,
        heads: int,
        device: torch.device | None = None,
        fewest_keys: int = FEWEST_KEYS,
    ) -> None:
        self.name, self.kind, self.mode = name, kind, mode
        self.fewest_keys = fewest_keys
        self.queries = self.keys = 0
        self.heads = heads
        self.normalizer = SiteReading.normalizer
        self.attention = "full"
        """Its type, one of ``ATTENTIONS``."""
        self.spoiled = False
        """Whether its numbers cannot be trusted: then it is not shown."""
        self._places = places(fewest_keys)
        width = max(place.stop for place in self._places.values())
        # Sums stay where float64 is: nothing waits for the device until a reading is asked for.
        device = torch.device("cpu") if device is None or device.type == "mps" else device
        # Made in inference mode they could not be added to outside of it.
        with torch.inference_mode(False):
            self._sums = torch.zeros((heads, width), dtype=torch.float64, device=device)
            self._sums[:, LARGEST] = -math.inf

    def add(self, stats: AttentionStats, queries: int, keys: int) -> None:
        """Adds the rows of one call, without waiting for the device."""
        if 0 in stats.shape:
            return
        self.normalizer = stats.normalizer
        sums = stats.sums() if self._has_sums(stats) else None
        self.add_sums(self._sums_of(stats) if sums is None else sums, queries, keys)

    def add_sums(self, sums: Tensor, queries: int, keys: int) -> None:
        """Adds sums [H, WIDTH] of a kernel, or [H, columns] of all that is here."""
        self.queries, self.keys = max(self.queries, queries), max(self.keys, keys)
        sums, own = sums.to(self._sums.device), self._sums[:, : sums.shape[1]]
        largest = torch.maximum(own[:, LARGEST], sums[:, LARGEST])
        own.add_(sums)[:, LARGEST] = largest

    @property
    def key(self) -> SiteKey:
        return self.name, self.kind, self.mode

    @property
    def label(self) -> SiteLabel:
        """What is known of the site beside its numbers."""
        return _label(self.name, self.kind, self.mode, self.attention, self.normalizer, self.heads)

    @property
    def sums(self) -> Tensor:
        """[heads, columns] float64, the columns as ``places`` has them."""
        return self._sums

    def with_sums(self, sums: Tensor) -> SiteSums:
        """The same site with other sums, say on the host."""
        other = copy(self)
        other._sums = sums
        return other

    def with_sums_of(self, other: SiteSums) -> SiteSums:
        """A copy with the rows of ``other`` as well, which has as many heads."""
        both = deepcopy(self)
        both.add_sums(other._sums, other.queries, other.keys)
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
        parts["rows_without_weight"] = parts["rows"].to(self._sums.device) - parts["rows_of_entropy"]
        parts["histogram"] = stats.histogram()
        for names, rows in zip((CURVES, ENOUGH_KEYS), self._parts(stats), strict=False):
            curve = rows.by_visible_keys()
            sums = {"curve_rows": curve.rows} | {f"curve_{name}": part for name, part in curve.sums.items()}
            parts |= {name: sums[of] for name, of in zip(names, CURVES, strict=True)}
        empty = self._sums.new_zeros(self.heads)
        return torch.cat([parts.get(name, empty).to(self._sums).view(self.heads, -1) for name in self._places], 1)

    def _means(self, stats: AttentionStats) -> dict[str, Tensor]:
        """Sums and rows of every mean from one stacked tensor: a sampled training step waits for this."""
        names = [name for name in MEANS if name in stats]
        values = torch.stack([stats[name] for name in names]).to(self._sums.device)
        defined = torch.stack([stats.defined_rows(name) for name in names]).to(self._sums.device)
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
        layer = layer_of(self.name)
        heads = tuple(self._head(head, numbers, layer) for head, numbers in enumerate(self._sums.tolist()))
        return SiteReading(self.name, self.kind, self.mode, self.queries, self.keys, heads, self.normalizer, layer)

    def _head(self, head: int, numbers: list[float], layer: int | None) -> HeadReading:
        sums = {name: numbers[place] for name, place in self._places.items()}
        buckets = self._buckets(sums)
        return HeadReading(
            head=head,
            normalized_entropy_histogram=tuple(map(int, sums["histogram"])),
            by_visible_keys=buckets,
            rows=int(sums["rows"][0]),
            empty_rows=int(sums["empty"][0]),
            nonfinite_rows=int(sums["nonfinite"][0]),
            layer=layer,
            judged=any(bucket.first >= self.fewest_keys for bucket in buckets),
            **{field: _number(STATISTIC_OF[field], shown.reduction, sums) for field, shown in SHOWN.items()},
        )

    def _buckets(self, sums: dict[str, list[float]]) -> tuple[VisibleKeyBucket, ...]:
        """Rows by powers of two of their keys, parted at ``fewest_keys``."""
        buckets = []
        for index in range(BUCKETS):
            first, last = 1 << index, (2 << index) - 1
            parted = first < self.fewest_keys <= last
            ends = ((first, self.fewest_keys - 1), (self.fewest_keys, last)) if parted else ((first, last),) * 2
            for (low, high), names in zip(ends, (CURVES, ENOUGH_KEYS), strict=True):
                if names[0] in sums and (rows := int(sums[names[0]][index])):
                    entropy, normalized, first_token = (sums[name][index] / rows for name in names[1:])
                    # A row with one key has no normalised entropy, and no key beside the first.
                    others = (normalized, first_token) if index else (None, None)
                    buckets.append(VisibleKeyBucket(low, high, rows, entropy, *others))
        return tuple(buckets)


@lru_cache(maxsize=4096)
def _label(name: str, kind: str, mode: str, attention: str, normalizer: str, heads: int) -> SiteLabel:
    return SiteLabel(name, kind, mode, layer_of(name), attention, normalizer, heads)


def fits_buckets(fewest_keys: int) -> bool:
    """Whether an edge of the buckets by visible keys, which are powers of two, is at ``fewest_keys``."""
    return fewest_keys & (fewest_keys - 1) == 0


@cache
def places(fewest_keys: int) -> dict[str, slice]:
    """Where each number stands among the columns of a site."""
    found, start = {}, 0
    for name in NUMBERS if fits_buckets(fewest_keys) else (*NUMBERS, *ENOUGH_KEYS):
        width = BUCKETS if name in BINNED or name in ENOUGH_KEYS else 1
        found[name] = slice(start, start + width)
        start += width
    return found


def _number(name: str, reduction: Reduction, sums: dict[str, list[float]]) -> float | None:
    """The number of a reading that shows a statistic; None where no row defines it."""
    if reduction is Reduction.LARGEST:
        return number(sums[name][0])
    rows = _rows_of(name, sums)
    mean = number(sums[name][0] / rows) if rows else None
    return math.sqrt(mean) if mean is not None and reduction is Reduction.ROOT_OF_MEAN else mean


def _rows_of(name: str, sums: dict[str, list[float]]) -> float:
    """How many rows a mean is over."""
    if f"rows_of_{name}" in sums:
        return sums[f"rows_of_{name}"][0]
    weightless = 0.0 if STATISTICS[name].defined is Rows.ALL else sums["rows_without_weight"][0]
    return sums["rows"][0] - weightless
