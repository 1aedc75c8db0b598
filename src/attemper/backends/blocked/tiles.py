"""How a problem is cut into tiles that stay in cache, and where what is found on them is written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.backends.contract import Problem
from attemper.statistics import Column


@dataclass(frozen=True)
class Tile:
    """A rectangle of the score tensor: batches x key heads x rows, and the keys that its rows can see at all."""

    batches: slice
    groups: slice
    heads: slice
    rows: slice
    keys: tuple[int, int]
    repeats: int

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """Where the tile stands in a [B, H, Q] tensor."""
        return self.batches, self.heads, self.rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """[batches, heads, rows]."""
        return (
            self.batches.stop - self.batches.start,
            self.heads.stop - self.heads.start,
            self.rows.stop - self.rows.start,
        )

    @property
    def flat(self) -> tuple[int, int]:
        """[n, R * rows]: batches and key heads as one dimension, the query heads of a key head as more rows."""
        batches, heads, rows = self.shape
        return batches * (heads // self.repeats), self.repeats * rows

    def grid(self, values: Tensor) -> Tensor:
        """[n, R * rows, k] seen as [b, g, R, rows, k]."""
        batches, heads, _ = self.shape
        return values.view(batches, heads // self.repeats, self.repeats, -1, values.shape[-1])

    def cut(self, tensor: Tensor, *more: slice) -> Tensor:
        """The tile's part of a tensor whose dimensions are full or 1, in the order batch, head, row, then ``more``."""
        return tensor[region(tensor, (*self.place, *more))]


def region(tensor: Tensor, place: tuple[slice, ...]) -> tuple[slice, ...]:
    """``place`` with every dimension of size 1 left whole."""
    return tuple(part if size > 1 else slice(None) for part, size in zip(place, tensor.shape, strict=True))


def sum_to(values: Tensor, shape: torch.Size) -> Tensor:
    """``values`` summed over the dimensions in which ``shape`` is 1: what broadcasting did, undone."""
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    return values.sum(axes, keepdim=True) if axes else values


def tiles(problem: Problem) -> Iterator[tuple[Tile, Tensor, Tensor | None]]:
    """Tiles with their keys and values [n, K, D or E] in the compute type, converted once per chunk."""
    batch, groups, _, _ = problem.key.shape
    rows, repeats = problem.query.shape[2], problem.repeats
    if 0 in (batch, groups, rows, repeats):
        return
    chunk, tile_rows, _ = _sizes(problem)
    batches, heads = max(1, chunk // groups), min(groups, chunk)
    for b in range(0, batch, batches):
        for g in range(0, groups, heads):
            place = (slice(b, min(b + batches, batch)), slice(g, min(g + heads, groups)))
            key = problem.key[place].to(problem.compute_dtype).flatten(0, 1)
            value = None if problem.value is None else problem.value[place].to(problem.compute_dtype).flatten(0, 1)
            query_heads = slice(place[1].start * repeats, place[1].stop * repeats)
            for r in range(0, rows, tile_rows):
                row = slice(r, min(r + tile_rows, rows))
                yield Tile(*place, query_heads, row, _key_range(problem, row), repeats), key, value


def empty_results(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, Q, E], state [F, B, H, Q], key_mass [B, H, K] of rows that see nothing; size 0 if not asked for."""
    batch, heads, rows, _ = problem.query.shape
    width = 0 if problem.value is None else problem.value.shape[3]
    new = problem.query.new_zeros
    state = new((len(problem.columns), batch, heads, rows), dtype=problem.compute_dtype)
    state[0] = -math.inf
    keys = (batch, heads, problem.key.shape[2]) if problem.key_mass else (0,)
    return new((batch, heads, rows, width)), state, new(keys, dtype=problem.compute_dtype)


def add_key_mass(key_mass: Tensor, problem: Problem, tile: Tile, weights: Tensor) -> None:
    """Adds the weights [n, R * rows, K] of a tile that holds all keys, 0 on rows that do not count."""
    by_key = weights.unflatten(1, (problem.repeats, -1)).sum(2)
    key_mass[tile.batches, tile.heads] += by_key.view(*tile.shape[:2], weights.shape[-1])


def key_blocks(problem: Problem, tile: Tile) -> Iterator[tuple[int, int]]:
    low, high = tile.keys
    step = _sizes(problem)[2]
    for start in range(low, high, step):
        yield start, min(start + step, high)


def row_bounds(problem: Problem, rows: slice) -> tuple[int, int]:
    """The diagonal keys of the first and the last of these rows."""
    if problem.positions is None:
        return rows.start + problem.offset, rows.stop - 1 + problem.offset
    positions = problem.positions[rows]
    return int(positions[0]) + problem.offset, int(positions[-1]) + problem.offset


def row_positions(problem: Problem, tile: Tile) -> Tensor:
    """The diagonal key of every row of the tile, [rows]."""
    device = problem.query.device
    if problem.positions is None:
        return torch.arange(tile.rows.start, tile.rows.stop, device=device) + problem.offset
    return problem.positions[tile.rows].to(device) + problem.offset


def _key_range(problem: Problem, rows: slice) -> tuple[int, int]:
    keys = problem.key.shape[2]
    if problem.key_mass or Column.GINI in problem.columns:
        return 0, keys
    first, last = row_bounds(problem, rows)
    low = min(max(0, first - problem.left), keys)
    return low, max(low, min(keys, last + problem.right + 1))


def _sizes(problem: Problem) -> tuple[int, int, int]:
    """Chunk (batch x key heads), rows and keys of a tile: on a CPU half a million scores, a few of which fit the cache.

    Two chunks or more let the matrix products run on as many threads; measured best of a grid on 2 cores.
    """
    on_cpu = problem.query.device.type == "cpu"
    elements = problem.tile_elements or (1 << 19 if on_cpu else 1 << 24)
    rows, keys, repeats = problem.query.shape[2], problem.key.shape[2], problem.repeats
    few = rows * repeats < 64
    tile_keys = max(1, keys if problem.whole_rows else min(keys, problem.tile_keys or (4096 if few else 512)))
    fit = max(1, elements // (repeats * tile_keys))
    tile_rows = max(1, min(rows, problem.tile_rows or min(fit, max(16, 256 // repeats))))
    chunk = max(1, elements // (repeats * tile_rows * tile_keys))
    return chunk, tile_rows, tile_keys
