"""What one call adds to a site on the device: the layout of its sums, apart from the kernel that makes them.

    sums[head] = [rows, empty, nonfinite, max_logit | sums of the means | their counts | histogram | curve by log2 n]

float64, [heads, WIDTH]. Two of them add up column by column, but for the maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.statistics import ONE_PASS, TABLE, Reduction, Rows, state_columns

SUMMED = state_columns(ONE_PASS)
"""The state columns that the sums follow from."""

BINS = 32

_SHOWN = tuple(row for row in TABLE if row.name in ONE_PASS and row.shown is not None)
_MEANS = tuple(row.name for row in _SHOWN if row.shown and row.shown.reduction is not Reduction.LARGEST)
_OF_SOME = tuple(row.name for row in _SHOWN if row.defined in (Rows.TWO_KEYS, Rows.BEYOND_FIRST))
COLUMNS = ("rows", "empty", "nonfinite", "max_logit", *_MEANS, *(f"rows_of_{name}" for name in _OF_SOME))
"""The single columns, in their order. Sums over valid rows; of the two that need more keys, with rows of their own."""

BINNED = ("histogram", *(f"curve_{name}" for name in ("rows", "entropy", *_OF_SOME)))
"""What follows them, ``BINS`` columns each: rows by normalised entropy, and rows and sums by log2 of visible keys."""

WIDTH = len(COLUMNS) + BINS * len(BINNED)

_MAXIMUM = COLUMNS.index("max_logit")


def empty_sums(heads: int, device: torch.device) -> Tensor:
    """[heads, WIDTH] float64: the sums of no rows."""
    return emptied(torch.empty((heads, WIDTH), dtype=torch.float64, device=device))


def emptied(sums: Tensor) -> Tensor:
    """``sums`` itself, holding no rows."""
    sums.zero_()
    sums[:, _MAXIMUM] = -torch.inf
    return sums


def joined(one: Tensor, two: Tensor) -> Tensor:
    """The sums of the rows of both."""
    both = one + two
    torch.maximum(one[:, _MAXIMUM], two[:, _MAXIMUM], out=both[:, _MAXIMUM])
    return both


def column(sums: Tensor, name: str) -> Tensor:
    """One of ``COLUMNS``, [heads], or of ``BINNED``, [heads, BINS]."""
    if name in COLUMNS:
        return sums[:, COLUMNS.index(name)]
    start = len(COLUMNS) + BINS * BINNED.index(name)
    return sums[:, start : start + BINS]
