"""Blocks of scores of the rowwise kernels, and the list of blocks that can still matter.

A rowwise kernel goes over its keys several times. The first time it visits every block that its rows can see, and lists those
in which they do; later ones visit what is listed, and a block without support is taken off. Blocks stand in the order of
the keys, and each is masked. All kernels of a call cut rows and keys alike, so that a score has the same bits in each.

Registers: query tile [M, D], scores [M, N]. Shared memory: tiles of keys, in several stages. Global: the list, int32, one
place per block of keys of each program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import VANISHED, block_of, blocks, scores, visibility

FARTHEST = tl.constexpr(-1e18)
"""Scores farther below the maximum have no weight that differs, and their squares would overflow."""


@triton.jit
def span_of(tile, CALL: tl.constexpr):
    """Where the blocks of keys that some row of the tile may see begin, and how many there are."""
    start, before, inside_from, inside_to, count = blocks(tile.low, tile.high, True, CALL.BLOCK_N)
    return start, count


@triton.jit
def scores_at(tile, call, at, CALL: tl.constexpr):
    """Scores [M, N] of the keys from ``at`` on (-inf where hidden), which are visible, their places, and the block of
    keys and the softcap's gradient."""
    local = tl.arange(0, CALL.BLOCK_N)
    block = block_of(call.key, tile.batch, tile.group, at, local, CALL.D, CALL, True, call.structure.keys)
    s, visible, bend = scores_of(tile, call, block, at + local, CALL)
    return s, visible, at + local, block, bend


@triton.jit
def scores_of(tile, call, block, place, CALL: tl.constexpr):
    """``scores_at`` for a block of keys that is there."""
    s, bend = scores(tile, block, call, CALL)
    visible, bias = visibility(tile, place, call, CALL)
    return tl.where(visible, s + bias, -float("inf")), visible, bend


@triton.jit
def values_at(tile, call, at, CALL: tl.constexpr):
    """The values of the keys from ``at`` on, [N, E]."""
    local = tl.arange(0, CALL.BLOCK_N)
    return block_of(call.value, tile.batch, tile.group, at, local, CALL.E, CALL, True, call.structure.keys)


@triton.jit
def below(s, visible, m):
    """d = s - m [M, N], finite: VANISHED where hidden. Where the maximum is not finite it means nothing."""
    d = s - tl.where(tl.abs(m) < float("inf"), m, 0.0)[:, None]
    return tl.where(visible, tl.minimum(tl.maximum(d, FARTHEST), 0.0), VANISHED)
