"""Sums over the rows of each head, in float64, and the reading that follows from them. Without torch.

The sums of a site are one array [heads, columns]. It begins with the columns that kernels fill (``COLUMNS`` and
``BINNED``); what only ``AttentionStats`` have follows::

    [ columns of kernels | rows without weight | by-name sums | their rows | curves of rows that see enough keys ]

The last part is there only if ``fewest_keys`` is no power of two, so that one bucket by visible keys holds rows that
are judged and rows that are not. Two such arrays add up column by column, but for the largest logit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from attemper.readings.reading import HeadReading, SiteReading, VisibleKeyBucket, number
from attemper.readings.sample import SiteKey, SiteLabel
from attemper.statistics import BINNED, BINS, COLUMNS, SHOWN, STATISTIC_OF, STATISTICS, Reduction, Rows

if TYPE_CHECKING:
    import numpy as np

LARGEST = COLUMNS.index("max_logit")
MEANS = tuple(STATISTIC_OF[field] for field, shown in SHOWN.items() if shown.reduction is not Reduction.LARGEST)
"""Statistics of which a reading shows the mean, or follows from it."""
OTHERS = tuple(name for name in MEANS if name not in COLUMNS)
"""Those of them that kernels do not sum."""
CURVES = tuple(name for name in BINNED if name.startswith("curve_"))
ENOUGH_KEYS = tuple(f"judged_{name}" for name in CURVES)
"""The curves of rows that see enough keys, where a bucket would hold others, too."""
ERRORS = tuple(name for name in MEANS if name in COLUMNS)
"""Statistics of which a scan keeps how batches differ."""
SPREAD = (
    *("batches", "batched", "batched_squares"),
    *(f"{kind}_{name}" for kind in ("squares", "joint") for name in ERRORS),
)
"""Over batches, of which one has r rows and the sums s: how many there are, and the sums of r, r^2, s^2 and s r."""
NUMBERS = (*COLUMNS, *BINNED, "rows_without_weight", *OTHERS, *(f"rows_of_{name}" for name in OTHERS), *SPREAD)
"""What stands in the array, in this order; ``ENOUGH_KEYS`` follow where they are needed."""
_ROWS_OF = {name.removeprefix("rows_of_"): name for name in NUMBERS if name.startswith("rows_of_")}
"""Statistic -> the number of its rows, where they are not those of all others."""


def fits_buckets(fewest_keys: int) -> bool:
    """Whether an edge of the buckets by visible keys, which are powers of two, is at ``fewest_keys``."""
    return fewest_keys & (fewest_keys - 1) == 0


@cache
def places(fewest_keys: int) -> dict[str, slice]:
    """Where each number stands among the columns of a site."""
    found, start = {}, 0
    for name in NUMBERS if fits_buckets(fewest_keys) else (*NUMBERS, *ENOUGH_KEYS):
        width = BINS if name in BINNED or name in ENOUGH_KEYS else 1
        found[name] = slice(start, start + width)
        start += width
    return found


@cache
def width(fewest_keys: int) -> int:
    """How many columns a site has."""
    return max(place.stop for place in places(fewest_keys).values())


SPREAD_PLACE = slice(places(1)[SPREAD[0]].start, places(1)[SPREAD[-1]].stop)
"""Where ``SPREAD`` stands, whatever ``fewest_keys``."""


@dataclass(frozen=True, eq=False)
class SiteTotals:
    """Sums over all rows that a site has shown, on the host."""

    label: SiteLabel
    queries: int
    keys: int
    order: tuple[int, int]
    """Where the site stands in the model: the place of its module, and which of the module's calls it is."""
    sums: np.ndarray
    """[heads, columns] float64, the columns as ``places`` has them."""
    roles: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Role -> the score of each head, on the first text; empty where they were not read."""

    @property
    def key(self) -> SiteKey:
        return self.label.key

    def without_spread(self) -> SiteTotals:
        """The same without how batches differ: calls that are joined are no batches."""
        sums = self.sums.copy()
        sums[:, SPREAD_PLACE] = 0.0
        return replace(self, sums=sums)

    def plus(self, other: SiteTotals) -> SiteTotals:
        """The rows of both. ``other`` is of the same site and has as many heads."""
        import numpy as np

        sums = self.sums + other.sums
        sums[:, LARGEST] = np.maximum(self.sums[:, LARGEST], other.sums[:, LARGEST])
        return replace(
            self,
            queries=max(self.queries, other.queries),
            keys=max(self.keys, other.keys),
            order=min(self.order, other.order),
            sums=sums,
            roles=self.roles or other.roles,
        )

    def reading(self, fewest_keys: int) -> SiteReading:
        """Means over all rows."""
        found = site_reading(self.label, self.queries, self.keys, self.sums.tolist(), fewest_keys)
        if not self.roles:
            return found
        scores = [dict(zip(self.roles, each, strict=True)) for each in zip(*self.roles.values(), strict=True)]
        heads = (replace(head, roles=own) for head, own in zip(found.heads, scores, strict=True))
        return replace(found, heads=tuple(heads))


def site_reading(
    label: SiteLabel, queries: int, keys: int, sums: Sequence[Sequence[float]], fewest_keys: int
) -> SiteReading:
    """The reading of a site from its sums [heads, columns]."""
    columns = places(fewest_keys)
    heads = tuple(
        _head(head, {name: numbers[place] for name, place in columns.items()}, label.layer, fewest_keys)
        for head, numbers in zip(label.head_numbers, sums, strict=True)
    )
    return SiteReading(label.name, label.kind, label.mode, queries, keys, heads, label.normalizer, label.layer)


def _head(head: int, sums: Mapping[str, Sequence[float]], layer: int | None, fewest_keys: int) -> HeadReading:
    buckets, errors = tuple(_buckets(sums, fewest_keys)), _standard_errors(sums)
    return HeadReading(
        head=head,
        normalized_entropy_histogram=tuple(map(int, sums["histogram"])),
        by_visible_keys=buckets,
        rows=int(sums["rows"][0]),
        empty_rows=int(sums["empty"][0]),
        nonfinite_rows=int(sums["nonfinite"][0]),
        layer=layer,
        judged=any(bucket.first >= fewest_keys for bucket in buckets),
        batches=None if errors is None else int(sums["batches"][0]),
        standard_errors=errors,
        roles=None,
        **{field: _number(STATISTIC_OF[field], shown.reduction, sums) for field, shown in SHOWN.items()},
    )


def _buckets(sums: Mapping[str, Sequence[float]], fewest_keys: int) -> Iterator[VisibleKeyBucket]:
    for index, first, last, counts, curves in _bucket_ends(fewest_keys):
        if rows := int(sums[counts][index]):
            entropy, normalized, first_token = (sums[name][index] / rows for name in curves)
            # A row with one key has no normalised entropy, and no key beside the first.
            others = (normalized, first_token) if index else (None, None)
            yield VisibleKeyBucket(first, last, rows, entropy, *others)


@cache
def _bucket_ends(fewest_keys: int) -> tuple[tuple[int, int, int, str, Sequence[str]], ...]:
    """Buckets by visible keys: powers of two, parted at ``fewest_keys``. The number of each, its first and last
    number of keys, and the curves that hold its rows and its sums.
    """
    kinds = (CURVES,) if fits_buckets(fewest_keys) else (CURVES, ENOUGH_KEYS)
    found = []
    for index in range(BINS):
        first, last = 1 << index, (2 << index) - 1
        parted = first < fewest_keys <= last
        ends = ((first, fewest_keys - 1), (fewest_keys, last)) if parted else ((first, last),) * 2
        found += [(index, *end, rows, sums) for end, (rows, *sums) in zip(ends[: len(kinds)], kinds, strict=True)]
    return tuple(found)


def _number(name: str, reduction: Reduction, sums: Mapping[str, Sequence[float]]) -> float | None:
    """The number of a reading that shows a statistic; None where no row defines it."""
    if reduction is Reduction.LARGEST:
        return number(sums[name][0])
    rows = _rows_of(name, sums)
    mean = number(sums[name][0] / rows) if rows else None
    return math.sqrt(mean) if mean is not None and reduction is Reduction.ROOT_OF_MEAN else mean


def _standard_errors(sums: Mapping[str, Sequence[float]]) -> dict[str, float] | None:
    """sqrt(B / (B - 1) sum (s - m r)^2) / sum r of each mean m = sum s / sum r, over B batches; None where there are
    not two, or rows of which no batch is known.
    """
    batches, rows, squares = (sums[name][0] for name in SPREAD[:3])
    if batches < 2 or not rows or rows != sums["rows"][0] - sums["rows_without_weight"][0]:
        return None
    found = {}
    for name in ERRORS:
        mean = sums[name][0] / rows
        apart = sums[f"squares_{name}"][0] - 2 * mean * sums[f"joint_{name}"][0] + mean * mean * squares
        if math.isfinite(apart):
            found[name] = math.sqrt(max(apart, 0.0) * batches / (batches - 1)) / rows
    return found


def _rows_of(name: str, sums: Mapping[str, Sequence[float]]) -> float:
    """How many rows a mean is over."""
    if name in _ROWS_OF:
        return sums[_ROWS_OF[name]][0]
    weightless = 0.0 if STATISTICS[name].defined is Rows.ALL else sums["rows_without_weight"][0]
    return sums["rows"][0] - weightless
