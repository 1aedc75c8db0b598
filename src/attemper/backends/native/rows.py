"""Rows in C++: weights of rows of scores and their gradients, statistics and sums of rows from their state."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.backends.native.arguments import STATISTICS, address
from attemper.backends.native.library import check, library, run
from attemper.backends.normalizers import CODES
from attemper.backends.sums import SUMMED, WIDTH
from attemper.statistics import STATISTICS as TABLE
from attemper.statistics import Column

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_COMPUTED = ("lse", "entropy", "normalized_entropy", "effective_tokens", "max_weight", "mean_logit", "mass")
# What source/statistics.h derives, in its order: what it computes, and state columns that it copies. Formulas give all
# other statistics.
DERIVED = (*_COMPUTED, *(name for name, row in TABLE.items() if row.column is not None and name not in _COMPUTED))
_COUNTS = ("visible_keys", "support_size")
_NOWHERE = [0] * STATISTICS
_COLUMN_PLACES, _STATISTICS = struct.Struct(f"{len(Column)}q"), struct.Struct(f"{STATISTICS}q")

# AttemperSums of source/sums.cpp.
_SUMS = struct.Struct("5q 2Q 3q Q")


class Derivable(NamedTuple):
    """Statistics that one pass over a state can give."""

    derived: tuple[tuple[str, int], ...]
    """Each with its place in ``Statistics``."""
    counts: tuple[str, ...]


def weights(scores: Tensor, normalizer: str, number: float = 0.0, alpha: Tensor | None = None) -> Tensor:
    """The weights of every row; a row of -inf is 0, one with NaN or +inf is NaN.

    Args:
        scores: [rows, n], one of ``DTYPES``, on the CPU; ``-inf`` hides a key.
        normalizer: a name of ``backends.normalizers.CODES``.
        number: k of "topk", the smallest weight of "threshold", the bias of "sigmoid", alpha of "entmax".
        alpha: [rows] float32, alpha (or the bias) of each row, instead of ``number``.

    Returns:
        [rows, n] of the scores' type.
    """
    scores, result = scores.contiguous(), torch.empty(scores.shape, dtype=scores.dtype)
    rows, n = scores.shape
    each = None if alpha is None else alpha.detach().to(torch.float32).contiguous()
    sizes, tensors = (
        (rows, n, CODES[normalizer]),
        (address(each), DTYPES[scores.dtype], address(scores), address(result)),
    )
    check("attemper_weights", library().attemper_weights(*sizes, number, number, *tensors, torch.get_num_threads()))
    return result


def gradient(
    weights: Tensor, grad: Tensor, normalizer: str, number: float = 0.0, alpha: Tensor | None = None
) -> Tensor:
    """The gradient of the scores from the gradient of the weights, [rows, n]; the support is held fixed.

    ``number`` or ``alpha``: alpha of "entmax", as in ``weights``.
    """
    weights, grad = weights.contiguous(), grad.to(weights.dtype).contiguous()
    rows, n = weights.shape
    result = torch.empty(weights.shape, dtype=weights.dtype)
    each = None if alpha is None else alpha.detach().to(torch.float32).contiguous()
    sizes, tensors = (rows, n, CODES[normalizer]), (address(weights), address(grad), address(result))
    types = (address(each), DTYPES[weights.dtype])
    check("attemper_gradient", library().attemper_gradient(*sizes, number, *types, *tensors, torch.get_num_threads()))
    return result


def statistics(columns: tuple[Column, ...], state: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of ``names`` that are ``DERIVED`` (``mass``: without a sink) or counts, each [B, H, Q].

    ``state``: [columns, B, H, Q] float32, contiguous.
    """
    shape = state.shape[1:]
    rows, start = shape.numel(), address(state)
    values, places = empty_statistics(derivable(columns, tuple(names)), shape, state.stride()[1:])
    from_columns = [0 if place is None else start + 4 * rows * place for place in _places(columns)]
    code = library().attemper_statistics(rows, _COLUMN_PLACES.pack(*from_columns), _STATISTICS.pack(*places))
    check("attemper_statistics", code)
    return values


def empty_statistics(
    wanted: Derivable, shape: torch.Size, strides: tuple[int, ...]
) -> tuple[dict[str, Tensor], list[int]]:
    """Tensors for the statistics that are ``wanted``, and ``Statistics`` of ``source/arguments.h`` for them."""
    values: dict[str, Tensor] = {}
    places = _NOWHERE.copy()
    for name, place in wanted.derived:
        values[name] = value = torch.empty_strided(shape, strides, dtype=torch.float32)
        places[place] = address(value)
    if wanted.counts:
        counted = torch.empty_strided(shape, strides, dtype=torch.int64)
        places[-1] = address(counted)
        for name in wanted.counts:
            values[name] = counted
    return values, places


@cache
def derivable(columns: tuple[Column, ...], names: tuple[str, ...]) -> Derivable:
    """Those of ``names`` that a state of these columns gives."""
    derived = tuple(
        (name, place)
        for place, name in enumerate(DERIVED)
        if name in names and set(TABLE[name].softmax) <= set(columns)
    )
    return Derivable(derived, tuple(name for name in _COUNTS if name in names))


@cache
def _places(columns: tuple[Column, ...]) -> tuple[int | None, ...]:
    return tuple(columns.index(column) if column in columns else None for column in Column)


def sums(state: Tensor, included: Tensor | None, first_tokens: int) -> Tensor:
    """[H, WIDTH] float64, the layout of ``backends/sums.py``, of softmax without a sink.

    ``state``: [F, B, H, R] float32, contiguous, its first columns ``SUMMED``; ``included`` [B, H, R] bool, any strides.
    """
    _, batch, heads, rows = state.shape
    total = torch.empty((heads, WIDTH), dtype=torch.float64)
    strides = (0, 0, 0) if included is None else included.stride()
    assert state.shape[0] >= len(SUMMED)
    sizes = (batch, heads, rows, first_tokens, torch.get_num_threads())
    run("attemper_sums", _SUMS.pack(*sizes, address(state), address(included), *strides, address(total)))
    return total
