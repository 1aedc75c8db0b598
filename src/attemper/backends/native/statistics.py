"""Statistics of rows from their state, all that are wanted in one pass, where no gradient is."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from attemper.backends.native.arguments import address
from attemper.backends.native.library import check, library
from attemper.statistics import ONE_PASS, STATISTICS, TABLE, Column, state_columns

# In the order of source/statistics.cpp.
_NAMES = tuple(
    name
    for name in ONE_PASS
    if not STATISTICS[name].whole_number and STATISTICS[name].column not in state_columns((name,))
)
"""What takes a computation: neither a count nor a state column itself."""
_COUNTS = tuple(row.name for row in TABLE if row.whole_number)
_COLUMNS = state_columns(_NAMES)
_COLUMN_PLACES, _VALUE_PLACES = struct.Struct(f"{len(_COLUMNS)}q"), struct.Struct(f"{len(_NAMES)}q")


def statistics(columns: tuple[Column, ...], state: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of ``names`` that take a computation (``mass``: without a sink), each [B, H, Q].

    ``state``: [columns, B, H, Q] float32, contiguous.
    """
    names = set(names)
    shape = state.shape[1:]
    rows, start = shape.numel(), address(state)
    values = {
        name: torch.empty(shape, dtype=torch.float32)
        for name in _NAMES
        if name in names and all(column in columns for column in STATISTICS[name].softmax)
    }
    counts = torch.empty(shape, dtype=torch.int64) if not names.isdisjoint(_COUNTS) else None
    code = library().attemper_statistics(
        rows,
        _COLUMN_PLACES.pack(*[start + 4 * rows * columns.index(c) if c in columns else 0 for c in _COLUMNS]),
        _VALUE_PLACES.pack(*[address(values.get(name)) for name in _NAMES]),
        address(counts),
    )
    check("attemper_statistics", code)
    if counts is not None:
        values |= dict.fromkeys(_COUNTS, counts)
    return values
