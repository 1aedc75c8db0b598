"""Least, mean, largest and count of blocks of 32, 128, 512, ... samples: what a picture of a whole run is drawn from.

Level k has blocks of 2^k samples; block b holds the samples with numbers from b 2^k on. k is 5, 7, 9, ...: an earlier
level would cost more than the data, and what lies between two levels follows by ``join``. A row of the table holds
32 blocks of one level, so that a picture with 300 columns reads at most 40 rows of a statistic and a site.
"""

from __future__ import annotations

import numpy as np

FIRST_LEVEL = 5
LEVEL_STEP = 2
ROW_BLOCKS = 32
LEAST, MEAN, LARGEST, COUNT = range(4)
"""Places in the second dimension of blocks."""
PYRAMID_BITS = 10
"""Mantissa bits that are kept of these numbers: 4.9e-4 relative, less than a pixel."""


def row_span(level: int) -> int:
    return ROW_BLOCKS << level


def level_for(samples: int, columns: int) -> int:
    """The coarsest level with at least ``columns`` blocks over ``samples``; 0 where samples themselves are needed."""
    level = FIRST_LEVEL
    while samples >> (level + LEVEL_STEP) >= columns:
        level += LEVEL_STEP
    return level if samples >> level >= columns else 0


def blocks(values: np.ndarray) -> np.ndarray:
    """[blocks, samples of a block, ...] -> [blocks, 4, ...]. NaN counts for nothing; it comes out of nothing else."""
    known = ~np.isnan(values)
    count = known.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(1, np.float64) / count
    parts = (np.fmin.reduce(values, 1), mean, np.fmax.reduce(values, 1), count)
    return np.stack(parts, 1).astype(np.float32)


def join(rows: np.ndarray, many: int) -> np.ndarray:
    """[n * many, 4, ...] -> [n, 4, ...]: every ``many`` blocks joined to one."""
    grouped = rows.reshape(-1, many, *rows.shape[1:])
    counts = grouped[:, :, COUNT].astype(np.float64)
    total = counts.sum(1)
    sums = np.where(counts > 0, grouped[:, :, MEAN], 0.0) * counts
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums.sum(1) / total
    parts = (np.fmin.reduce(grouped[:, :, LEAST], 1), mean, np.fmax.reduce(grouped[:, :, LARGEST], 1), total)
    return np.stack(parts, 1).astype(np.float32)


def empty_blocks(many: int, heads: int) -> np.ndarray:
    """[many, 4, heads]: blocks without a sample."""
    empty = np.full((many, 4, heads), np.nan, np.float32)
    empty[:, COUNT] = 0.0
    return empty
