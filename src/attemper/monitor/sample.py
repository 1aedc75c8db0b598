"""From sums per head to one sample of all heads of all sites at once: what alarms judge and a store keeps.

The numbers are those of ``SiteSums.reading``, in float32 and without a record for each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attemper.call.normalizer import is_rowwise
from attemper.monitor.head_sums import CURVES, ENOUGH_KEYS, SiteSums, fits_buckets, places
from attemper.readings.sample import Sample
from attemper.statistics import SHOWN, STATISTIC_OF, STATISTICS, Reduction, Rows, rowwise_names

if TYPE_CHECKING:
    import numpy as np

COUNTS = {"rows": "rows", "empty_rows": "empty", "nonfinite_rows": "nonfinite"}
"""Quantity -> the sum that it is."""
SIZES = ("queries", "keys")
JUDGED = ("judged_rows", "judged_normalized_entropy", "judged_first_token_mass")
"""Quantities that follow from the curves by visible keys."""


def sample_of(step: int, time: float, sites: Sequence[SiteSums], stats: tuple[str, ...], tokens: int) -> Sample:
    """The sample of a step. Waits for the device if ``sites`` are on one.

    Args:
        step, time: as in ``Sample``.
        sites: what was measured, at least one.
        stats: names of statistics that were asked for; a quantity of any other would be NaN.
        tokens: real tokens read.
    """
    if any(is_rowwise(site.normalizer) for site in sites):
        stats = (*stats, *rowwise_names(stats))
    plan = _plan(stats, sites[0].fewest_keys)
    sums = torch.cat([site.sums for site in sites]).cpu()
    values = plan.values(sums, torch.tensor([[site.queries, site.keys] for site in sites]), [s.heads for s in sites])
    return Sample(step, time, tuple(site.label for site in sites), plan.quantities, values, tokens)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Which columns of the sums the quantities follow from."""

    quantities: tuple[str, ...]
    means: np.ndarray
    """Columns of the sums of means, and of the rows that each is over."""
    rows: np.ndarray
    weighted: np.ndarray
    """[means] 1.0 where rows without weight are among these rows and do not count, else 0.0."""
    weightless: int
    roots: list[int]
    """Which means are shown as their root."""
    places: list[int]
    """Where among the quantities each of the means stands."""
    others: np.ndarray
    """Columns that are shown as they are, and where."""
    other_places: list[int]
    curves: tuple[slice, ...]
    """Columns of the curves over rows that see enough keys."""

    def values(self, sums: Tensor, sizes: Tensor, heads: Sequence[int]) -> np.ndarray:
        """[quantities, heads] float32, NaN where there is no finite number. ``sizes`` [sites, 2]: queries and keys."""
        import numpy as np

        sum_of = sums.numpy()
        found = np.empty((len(self.quantities), len(sum_of)), np.float32)
        with np.errstate(all="ignore"):
            rows = sum_of[:, self.rows] - self.weighted * sum_of[:, self.weightless, None]
            means = sum_of[:, self.means] / rows
            means[:, self.roots] = np.sqrt(means[:, self.roots])
            found[self.places] = means.T
            found[self.other_places] = sum_of[:, self.others].T
            first = len(self.quantities) - len(SIZES) - len(JUDGED)
            found[first : first + len(SIZES)] = sizes.numpy().repeat(heads, 0).T
            judged, *curves = (sum_of[:, curve].sum(1) for curve in self.curves)
            found[first + len(SIZES)] = judged
            for place, curve in enumerate(curves, first + len(SIZES) + 1):
                found[place] = curve / judged
        found[~np.isfinite(found)] = np.nan
        return found


@lru_cache(maxsize=64)
def _plan(stats: tuple[str, ...], fewest_keys: int) -> _Plan:
    import numpy as np

    column = {name: place.start for name, place in places(fewest_keys).items()}
    shown = [name for name in SHOWN if STATISTIC_OF[name] in stats]
    quantities = (*shown, *COUNTS, *SIZES, *JUDGED)
    means = [name for name in shown if SHOWN[name].reduction is not Reduction.LARGEST]
    names = [STATISTIC_OF[name] for name in means]
    others = {name: STATISTIC_OF[name] for name in shown if name not in means} | COUNTS
    weighted = [f"rows_of_{name}" not in column and STATISTICS[name].defined is not Rows.ALL for name in names]
    return _Plan(
        quantities,
        np.array([column[name] for name in names], int),
        np.array([column.get(f"rows_of_{name}", column["rows"]) for name in names], int),
        np.array(weighted, float),
        column["rows_without_weight"],
        [place for place, name in enumerate(means) if SHOWN[name].reduction is Reduction.ROOT_OF_MEAN],
        [quantities.index(name) for name in means],
        np.array([column[name] for name in others.values()], int),
        [quantities.index(name) for name in others],
        _enough_keys(fewest_keys),
    )


def _enough_keys(fewest_keys: int) -> tuple[slice, ...]:
    """Columns of rows, normalised entropy and first-token mass, of the rows that see at least ``fewest_keys`` keys."""
    fits = fits_buckets(fewest_keys)
    first = (fewest_keys - 1).bit_length() if fits else 0
    wanted = [name for name in (CURVES if fits else ENOUGH_KEYS) if not name.endswith("curve_entropy")]
    curves = [places(fewest_keys)[name] for name in wanted]
    return tuple(slice(curve.start + first, curve.stop) for curve in curves)
