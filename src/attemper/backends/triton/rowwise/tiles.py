"""Blocks of scores of the row kernels, and the list of blocks that can still matter.

A row kernel goes over its keys several times. The first time it visits every block that its rows can see, and lists those
in which they do; later ones visit what is listed, and a block without support is taken off. Blocks stand in the order of
the keys, and each is masked. All kernels of a call cut rows and keys alike, so that a score has the same bits in each.

Registers: query tile [M, D], scores [M, N]. Shared memory: tiles of keys, in several stages. Global: the list, int32, one
place per block of keys of each program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attemper.backends.triton.scores import BIAS, VANISHED, block_of, blocks, intervals, rows_of, scores, seen

FARTHEST = tl.constexpr(-1e18)
"""Scores farther below the maximum have no weight that differs, and their squares would overflow."""


class Tile(NamedTuple):
    """M rows of a head, and where they see keys."""

    query: Any
    scale: Any
    low: Any
    high: Any
    diagonal: Any
    origin: Any
    row: Any
    batch: Any
    head: Any
    group: Any


class Keys(NamedTuple):
    """What rows meet: ``Strided`` tensors, and numbers of the call."""

    key: Any
    mask: Any
    first: Any
    structure: Any
    first_tokens: Any
    softcap: Any


@triton.jit
def tile_of(
    query, multiplier, structure, row, batch, head, repeats, read,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The rows ``row`` [M] of a head; EDGE: those whose ``read`` is past the end read as 0 and see nothing."""
    low, high, diagonal, origin = intervals(row, structure, POSITIONS, PACKED, BOTTOM_RIGHT)
    if EDGE:
        high = tl.where(read < structure.rows, high, 0)
    q = rows_of(query, batch, head, read, BLOCK_D, D, WIDE, EDGE, structure.rows)
    scale = tl.load(
        multiplier.pointer + batch.to(tl.int64) * multiplier.batch + head * multiplier.head + row * multiplier.row
    )
    return Tile(q, scale, low, high, diagonal, origin, row, batch, head, head // repeats)


@triton.jit
def span_of(tile, BLOCK_N: tl.constexpr):
    """Where the blocks of keys that some row of the tile may see begin, and how many there are."""
    start, before, inside_from, inside_to, count = blocks(tile.low, tile.high, BIAS, BLOCK_N)
    return start, count


@triton.jit
def scores_at(
    tile, keys, at, MASK: tl.constexpr, LIMIT: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Scores [M, N] of the keys from ``at`` on (-inf where hidden), which are visible, their places, and the tile of keys
    and the softcap's slope."""
    local = tl.arange(0, BLOCK_N)
    k = block_of(keys.key, tile.batch, tile.group, at, local, BLOCK_D, D, WIDE, True, keys.structure.keys)
    s, visible, bend = scores_of(tile, keys, k, at + local, MASK, LIMIT, SOFTCAP)
    return s, visible, at + local, k, bend


@triton.jit
def scores_of(tile, keys, k, place, MASK: tl.constexpr, LIMIT: tl.constexpr, SOFTCAP: tl.constexpr):
    """``scores_at`` for a tile of keys that is there."""
    s, bend = scores(tile.query, k, tile.scale, keys.softcap, SOFTCAP)
    visible, bias = seen(
        tile.low, tile.high, place, keys.mask, tile.batch, tile.head, tile.row, keys.structure, MASK, LIMIT
    )
    return tl.where(visible, s + bias, -float("inf")), visible, bend


@triton.jit
def below(s, visible, m):
    """d = s - m [M, N], finite: VANISHED where hidden. Where the maximum is not finite it means nothing."""
    d = s - tl.where(tl.abs(m) < float("inf"), m, 0.0)[:, None]
    return tl.where(visible, tl.minimum(tl.maximum(d, FARTHEST), 0.0), VANISHED)


@triton.jit
def any_of(condition):
    """Whether it holds anywhere in [M, N], int32."""
    return tl.max(tl.max(condition.to(tl.int32), 1), 0)


@triton.jit
def first_of(tile, keys, place, FIRST: tl.constexpr):
    """Which keys are first tokens, [M or 1, N] bool."""
    if FIRST:
        source = keys.first.pointer + tile.batch.to(tl.int64) * keys.first.batch
        marked = tl.load(source + place.to(tl.int64) * keys.first.column, mask=place < keys.structure.keys, other=0)
        return (marked != 0)[None, :]
    return place[None, :] - tile.origin[:, None] < keys.first_tokens


@triton.jit
def distance_of(tile, place):
    return tl.abs(tile.diagonal[:, None] - place[None, :]).to(tl.float32)
