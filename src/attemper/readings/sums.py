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
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from attemper.readings.reading import HeadReading, SiteReading, VisibleKeyBucket, number
from attemper.readings.sample import MOST_EXACT, SiteKey, SiteLabel
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
COUNT_COLUMNS = {"rows": "rows", "empty_rows": "empty", "nonfinite_rows": "nonfinite"}
"""Quantity -> the sum that it is."""
SIZES = ("queries", "keys")
JUDGED_QUANTITIES = ("judged_rows", "judged_normalized_entropy", "judged_first_token_mass")
"""Quantities that follow from the curves by visible keys."""


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
        label, columns = self.label, places(fewest_keys)
        plan = plan_of(tuple(STATISTIC_OF.values()), fewest_keys)
        values = plan.values(self.sums, [(self.queries, self.keys, label.heads)], whole=True)
        scores = [dict(zip(self.roles, each, strict=True)) for each in zip(*self.roles.values(), strict=True)]
        heads = tuple(
            _head(
                {"head": head, "layer": label.layer, "roles": roles},
                {name: own[place] for name, place in columns.items()},
                dict(zip(plan.quantities, numbers, strict=True)),
                fewest_keys,
            )
            for head, own, numbers, roles in zip(
                label.head_numbers, self.sums.tolist(), values.T.tolist(), scores or [None] * label.heads, strict=True
            )
        )
        return SiteReading(
            label.name, label.kind, label.mode, self.queries, self.keys, heads, label.normalizer, label.layer
        )


def _head(
    place: Mapping[str, Any], sums: Mapping[str, Sequence[float]], numbers: Mapping[str, float], fewest_keys: int
) -> HeadReading:
    errors = _standard_errors(sums)
    counted: dict[str, Any] = {name: int(numbers[name]) for name in COUNT_COLUMNS}
    shown: dict[str, Any] = {name: number(numbers[name]) for name in SHOWN}
    return HeadReading(
        **place,
        normalized_entropy_histogram=tuple(map(int, sums["histogram"])),
        by_visible_keys=tuple(_buckets(sums, fewest_keys)),
        judged=numbers["judged_rows"] > 0,
        batches=None if errors is None else int(sums["batches"][0]),
        standard_errors=errors,
        **counted,
        **shown,
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


@dataclass(frozen=True, eq=False)
class Plan:
    """Which columns of the sums the numbers of heads follow from. A sampled step waits: few operations, and no loop."""

    quantities: tuple[str, ...]
    """Statistics, ``COUNT_COLUMNS``, ``SIZES`` and ``JUDGED_QUANTITIES``, in this order."""
    columns: np.ndarray
    """Of the means, of the rows that each is over, of what is shown as it is, and of rows without weight."""
    weighted: np.ndarray
    """[means, 1] 1.0 where rows without weight are among the rows of the mean and do not count, else 0.0."""
    roots: list[int]
    """Which means are shown as their root."""
    means: list[int]
    """Where among the quantities each of the means stands."""
    others: list[int]
    """The same of what is shown as it is."""
    curves: slice
    """The curves by visible keys."""
    first: int
    """The first of their buckets whose rows see enough keys."""

    def values(self, sums: np.ndarray, sites: Sequence[tuple[int, int, int]], *, whole: bool = False) -> np.ndarray:
        """[quantities, heads] as in ``Sample``, NaN where there is no finite number.

        Args:
            sums: [heads, columns] of all ``sites``: of each its queries, keys and heads.
            whole: whether in float64, whatever the counts.
        """
        import numpy as np

        taken, many = sums.T[self.columns], len(self.means)
        large = whole or taken[-1 - len(COUNT_COLUMNS) : -1].max(initial=0.0) > MOST_EXACT
        found = np.empty((len(self.quantities), len(sums)), np.float64 if large else np.float32)
        with np.errstate(all="ignore"):
            means = taken[:many] / (taken[many : 2 * many] - self.weighted * taken[-1])
            means[self.roots] = np.sqrt(means[self.roots])
            found[self.means], found[self.others] = means, taken[2 * many : -1]
            sizes, judged = -len(SIZES) - len(JUDGED_QUANTITIES), -len(JUDGED_QUANTITIES)
            queries, keys, heads = zip(*sites, strict=True)
            found[sizes:judged] = np.repeat([queries, keys], heads, 1)
            curves = sums[:, self.curves].reshape(len(sums), len(CURVES), BINS)[..., self.first :].sum(2).T
            found[judged] = curves[0]
            found[judged + 1 :] = curves[_OF_JUDGED] / curves[0]
        found[~np.isfinite(found)] = np.nan
        return found


_OF_JUDGED = [CURVES.index("curve_normalized_entropy"), CURVES.index("curve_first_token_mass")]
"""Which of ``CURVES`` the ``JUDGED_QUANTITIES`` means are of; the first is of rows."""


@lru_cache(maxsize=64)
def plan_of(stats: tuple[str, ...], fewest_keys: int) -> Plan:
    import numpy as np

    column = {name: place.start for name, place in places(fewest_keys).items()}
    shown = [name for name in SHOWN if STATISTIC_OF[name] in stats]
    quantities = (*shown, *COUNT_COLUMNS, *SIZES, *JUDGED_QUANTITIES)
    means = [name for name in shown if SHOWN[name].reduction is not Reduction.LARGEST]
    names = [STATISTIC_OF[name] for name in means]
    others = {name: STATISTIC_OF[name] for name in shown if name not in means} | COUNT_COLUMNS
    rows = [f"rows_of_{name}" if f"rows_of_{name}" in column else "rows" for name in names]
    weighted = [
        rows_of == "rows" and STATISTICS[name].defined is not Rows.ALL
        for name, rows_of in zip(names, rows, strict=True)
    ]
    fits = fits_buckets(fewest_keys)
    curves = [places(fewest_keys)[name] for name in (CURVES if fits else ENOUGH_KEYS)]
    return Plan(
        quantities,
        np.array([column[name] for name in (*names, *rows, *others.values(), "rows_without_weight")]),
        np.array(weighted, float)[:, None],
        [place for place, name in enumerate(means) if SHOWN[name].reduction is Reduction.ROOT_OF_MEAN],
        [quantities.index(name) for name in means],
        [quantities.index(name) for name in others],
        slice(curves[0].start, curves[-1].stop),
        (fewest_keys - 1).bit_length() if fits else 0,
    )
