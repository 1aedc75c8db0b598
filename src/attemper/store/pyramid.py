"""Least, mean and largest of 2, 4, 8, ... blocks of samples: what a picture of a whole run is drawn from.

A row of the lowest *part* has the blocks of 32 samples of one chunk; a row of the part above it joins 128 such rows, two
by two, and so on. What lies between two parts follows by ``pairs``.
"""

from __future__ import annotations

import warnings

import numpy as np

from attemper.store.chunk import Values

LEAST, MEAN, LARGEST = range(3)


def blocks(values: Values, size: int) -> tuple[Values, Values]:
    """[samples, heads] in blocks of ``size`` samples, the last one perhaps shorter.

    Returns:
        [blocks, 3, heads] least, mean and largest without NaN (NaN where there is nothing else), and [blocks] samples.
    """
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is NaN only
        found = [(np.nanmin(part, 0), np.nanmean(part, 0, np.float64), np.nanmax(part, 0)) for part in parts]
    return np.array(found, np.float32), np.array([len(part) for part in parts], np.float64)


def pairs(values: Values, counts: Values) -> tuple[Values, Values]:
    """Two blocks each joined to one; a last one without a second stays."""
    joined, sums = [], []
    for start in range(0, len(values), 2):
        two, weights = values[start : start + 2], counts[start : start + 2]
        known = ~np.isnan(two[:, MEAN])
        share = known * weights[:, None]
        total = share.sum(0)
        mean = np.where(known, two[:, MEAN].astype(np.float64), 0.0) * share
        with np.errstate(invalid="ignore"):
            middle = np.where(total > 0, mean.sum(0) / np.where(total > 0, total, 1.0), np.nan)
        joined.append((np.fmin.reduce(two[:, LEAST]), middle, np.fmax.reduce(two[:, LARGEST])))
        sums.append(weights.sum())
    return np.array(joined, np.float32), np.array(sums, np.float64)


def top(values: Values) -> Values:
    """[3, heads]: all blocks joined to one."""
    counts = np.ones(len(values))
    while len(values) > 1:
        values, counts = pairs(values, counts)
    return values[0]
