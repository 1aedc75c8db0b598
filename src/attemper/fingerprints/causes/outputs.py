"""Causes behind the scores: values, and what happens inside a kernel that no tap sees."""

from __future__ import annotations

import numpy as np

from attemper.fingerprints import floor
from attemper.fingerprints.finding import Finding, in_words
from attemper.fingerprints.pair import SitePair, level_of_rows, sketch_difference
from attemper.fingerprints.site import ROUNDING, SiteFingerprint

STAGE = "head output"
INSIDE = 16.0
"""An output is not the one of its own queries, keys and values if it is so many roundings away from it, and further
than rounding of its scores explains."""


def inside(pair: SitePair) -> Finding | None:
    """One run's output does not follow from its own queries, keys, values and mask: the fault is in its kernel."""
    one = _limit(max(pair.rounding))  # its own weights are right, however they were rounded
    limits = [np.maximum(one, scores) for scores in pair.score_rounding]
    levels = [_mismatch(site, site.recomputed) / limit for site, limit in zip((pair.a, pair.b), limits, strict=True)]
    off = [level > 1 for level in levels]
    if not (off[0] ^ off[1]).any():
        return None
    which = 1 if (off[1] & ~off[0]).any() else 0
    site, marked = (pair.a, pair.b)[which], off[which]
    heads, name = pair.heads(marked), "ab"[which]
    if (_mismatch(site, site.tiled) <= limits[which])[marked].all() and not np.isnan(site.tiled).all():
        words = f"query head h of run {name} reads key head h mod {site.kv_heads}, in place of groups side by side"
        return Finding("grouping", STAGE, 0.0, None, heads, words, own=True)
    words = (
        f"{in_words(heads)}the output of run {name} does not follow from its own q, k, v and mask: its kernel differs"
    )
    return Finding("scores", STAGE, 1.0, None, heads, words, own=True)


def mismatch(output: np.ndarray, expected: np.ndarray, dtype: str) -> np.ndarray:
    """Of sketches [..., 1 + PROJECTIONS]: how far outputs are from what is expected, in units of what rounding in that
    type explains; NaN where one was not seen.
    """
    return sketch_difference(output, expected) / _limit(ROUNDING.get(dtype, 2.0**-8))


def _limit(eps: float) -> float:
    return INSIDE * max(eps, 1e-6)


def _mismatch(site: SiteFingerprint, expected: np.ndarray) -> np.ndarray:
    """[H]: how far a head's outputs are from what is expected, by most of its rows; 0 where that was not seen."""
    return np.array([level_of_rows(row) for row in sketch_difference(site.output, expected)])


ALONE = 3.0
"""A head whose output is near what rounding explains is beyond it if it is so many times as far as most others."""


def values(pair: SitePair) -> Finding | None:
    """Outputs differ by more than scores and inputs explain, or those of few heads by much more than the others'."""
    if np.isnan(pair.output).all():
        return None
    times = floor.times(pair.by_head(pair.output), floor.outputs(pair))
    marked = times > floor.EDGE
    if not ((times > 1) | (marked & (times > ALONE * np.median(times)))).any():
        return None
    heads = pair.heads(marked)
    return Finding(
        "values", STAGE, 0.5, None, heads, f"{in_words(heads)}weights are the same and outputs differ: values do"
    )
