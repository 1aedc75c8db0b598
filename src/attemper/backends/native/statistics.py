"""Statistics of rows from their state, all that are wanted in one pass, where no gradient is."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from attemper.backends.native.arguments import address
from attemper.backends.native.library import check, library

# In the order of source/statistics.cpp.
_LETTERS = "mznac"
_NAMES = {
    "lse": "", "entropy": "a", "normalized_entropy": "a", "effective_tokens": "c", "max_weight": "", "mean_logit": "a",
    "mass": "",
}  # fmt: skip
"""Name -> the letter that it needs beside m, z and n."""
_COUNTS = ("visible_keys", "support_size")
_LETTER_PLACES, _VALUE_PLACES = struct.Struct(f"{len(_LETTERS)}q"), struct.Struct(f"{len(_NAMES)}q")


def statistics(fields: str, state: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of ``names`` that take a computation (``mass``: without a sink), each [B, H, Q].

    ``state``: [F, B, H, Q] float32, contiguous, its letters in the order of ``fields``.
    """
    names = set(names)
    shape = state.shape[1:]
    rows, start = shape.numel(), address(state)
    values = {
        name: torch.empty(shape, dtype=torch.float32)
        for name, letter in _NAMES.items()
        if name in names and letter in fields
    }
    counts = torch.empty(shape, dtype=torch.int64) if not names.isdisjoint(_COUNTS) else None
    places = [fields.find(letter) for letter in _LETTERS]
    code = library().attemper_statistics(
        rows,
        _LETTER_PLACES.pack(*[start + 4 * rows * place if place >= 0 else 0 for place in places]),
        _VALUE_PLACES.pack(*[address(values.get(name)) for name in _NAMES]),
        address(counts),
    )
    check("attemper_statistics", code)
    if counts is not None:
        values |= dict.fromkeys(_COUNTS, counts)
    return values
