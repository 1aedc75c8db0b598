"""What one call adds to a site on the device: the layout of its sums, apart from the kernel that makes them.

    sums[head] = [rows, empty, nonfinite, max_logit | sums of the means | their counts | histogram | curve by log2 n]

float64, [heads, WIDTH]. Two of them add up column by column, but for the maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.statistics import BINNED, BINS, COLUMNS, Column

SUMMED = (
    Column.MAXIMUM,
    Column.LOG_SUM,
    Column.VISIBLE_KEYS,
    Column.MEAN_DEPTH,
    Column.VARIANCE,
    Column.SQUARED_WEIGHTS,
    Column.FIRST_TOKENS,
)
"""The state columns that the sums follow from, in the order in which ``native/source/sums.cpp`` reads them."""

WIDTH = len(COLUMNS) + BINS * len(BINNED)

_MAXIMUM = COLUMNS.index("max_logit")


def empty_sums(heads: int, device: torch.device) -> Tensor:
    """[heads, WIDTH] float64: the sums of no rows."""
    return clear(torch.empty((heads, WIDTH), dtype=torch.float64, device=device))


def clear(sums: Tensor) -> Tensor:
    """``sums`` itself, holding no rows."""
    sums.zero_()
    sums[:, _MAXIMUM] = -torch.inf
    return sums


def join(one: Tensor, two: Tensor) -> Tensor:
    """The sums of the rows of both."""
    both = one + two
    torch.maximum(one[:, _MAXIMUM], two[:, _MAXIMUM], out=both[:, _MAXIMUM])
    return both
