"""Differences between two ways to train, paired by seed: what the seed decides for both is not counted as noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import NamedTuple

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's t at 97.5%, for 1 to 9 degrees of freedom. With more, the last: a little too wide, never too narrow."""


class Difference(NamedTuple):
    """A mean difference of pairs, and half of its 95% interval."""

    mean: float
    half: float
    """inf for one pair."""

    @property
    def told(self) -> bool:
        """Whether the interval leaves out 0."""
        return abs(self.mean) > self.half

    def __str__(self) -> str:
        return f"{self.mean:+.3f}" + (f" ± {self.half:.3f}" if math.isfinite(self.half) else "")


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """``values`` less ``baseline``, each by seed, over the seeds of both; None without any.

    The interval is Student's, for differences that are normal.

    Example:
        >>> str(paired_difference({0: 2.0, 1: 2.2, 2: 2.1}, {0: 1.9, 1: 2.0, 2: 1.8}))
        '+0.200 ± 0.248'
    """
    found = [values[seed] - baseline[seed] for seed in values.keys() & baseline.keys()]
    if len(found) < 2:
        return Difference(found[0], math.inf) if found else None
    quantile = QUANTILES[min(len(found) - 1, len(QUANTILES)) - 1]
    return Difference(fmean(found), quantile * stdev(found) / math.sqrt(len(found)))
