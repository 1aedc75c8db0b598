r"""The forward kernel of the maps that are found on whole rows: state, and output where there is a value.

A program takes M query rows of one head, and goes over the blocks of keys that they can see::

    once                m, n, and the list of blocks that some row sees         (row_search.surveyed)
    a few times         what the map finds on each row, x; the list shrinks     (row_search.found)
    once                omega, the row's sums, O += omega V; blocks without weight cost no product with values

Sigmoid finds nothing, and where no statistic is asked for that needs the maximum it goes over its keys once.
Registers: query tile [M, D], O [M, E], scores [M, N], numbers of a row. No weight is kept; no sum depends on the order
in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.maps import EVERY, SIGMOID, knobs, number_of, shares
from attemper.backends.triton.rowwise.search import bounded, bounds_of_nothing, found, surveyed
from attemper.backends.triton.rowwise.state import H, finished, gathered, gathered_nothing, stored
from attemper.backends.triton.rowwise.tiles import Keys, any_of, below, scores_at, span_of, tile_of
from attemper.backends.triton.scores import LENGTHS, Structure, block_of, product


@triton.jit(do_not_specialize=[*LENGTHS, "places"])
def row_forward_kernel(
    query, key, value, multiplier, mask, first, per_head, output, state, listed,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap, given, places,
    MAP: tl.constexpr, RELATIVE: tl.constexpr, LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr,
    FIRST: tl.constexpr, SOFTCAP: tl.constexpr, GATHER: tl.constexpr, POSITIONS: tl.constexpr, PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``listed``: int32 for the lists, ``places`` of each program. ``given``: k or min_weight."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    per = tl.cdiv(structure.rows, BLOCK_M)
    program = tl.program_id(0)
    head = (program // per) % heads
    batch = program // per // heads
    # The last rows of a causal head see the most keys: they start first.
    begin = (per - 1 - program % per) * BLOCK_M
    # Rows past the end repeat the last one; what they find is not stored.
    row = begin + tl.minimum(tl.arange(0, BLOCK_M), structure.rows - 1 - begin)
    if GATHER:
        row = tl.load(structure.positions + row).to(tl.int32)
    tile = tile_of(
        query, multiplier, structure, row, batch, head, repeats, row,
        POSITIONS, PACKED, BOTTOM_RIGHT, D, BLOCK_D, WIDE, False,
    )  # fmt: skip
    keys = Keys(key, mask, first, structure, first_tokens, softcap)
    number = number_of(per_head, head, given, MAP)
    listed += program.to(tl.int64) * places
    start, count = span_of(tile, BLOCK_N)
    bounds = bounds_of_nothing(BLOCK_M)
    x, limit = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.int32) + EVERY
    SURVEY: tl.constexpr = (MAP != SIGMOID) | RELATIVE
    if SURVEY:
        bounds, count = surveyed(
            tile, keys, start, count, listed, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_M, BLOCK_N, WIDE
        )
    if MAP != SIGMOID:
        x, limit, count = found(
            tile, keys, bounds, number, listed, count, MAP, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_M, BLOCK_N, WIDE
        )
    one, two = knobs(x, bounds[0], limit, number, MAP, RELATIVE)
    sums = gathered_nothing(BLOCK_M)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for block in range(count):
        at = start + block * BLOCK_N
        if SURVEY:
            at = tl.load(listed + block)
        s, visible, place, _, _ = scores_at(tile, keys, at, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_N, WIDE)
        if SURVEY:
            d = below(s, visible, bounds[0])
        else:
            bounds = bounded(bounds, s, visible)
            d = s
        omega, logs = shares(s, d, visible, place, one, two, number, MAP, (H & LETTERS) > 0, RELATIVE)
        if any_of(omega > 0) > 0:
            sums = gathered(sums, omega, logs, d, tile, keys, place, LETTERS, FIRST)
            if E > 0:
                values = block_of(
                    value, batch, tile.group, at, tl.arange(0, BLOCK_N), BLOCK_E, E, WIDE, True, structure.keys
                )
                out = product(omega.to(values.dtype), values, out)
    m, lowest, n, bad = bounds
    left_over, scale = finished(sums, m, n, number, MAP, LETTERS, RELATIVE)
    places_here = begin + tl.arange(0, BLOCK_M)
    exists = places_here < structure.rows
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places_here
    plane = tl.num_programs(0).to(tl.int64) // per * structure.rows
    stored(m, n, x, left_over, bad > 0, state + at_rows, plane, exists, LETTERS)
    if E > 0:
        scale = scale + tl.where(bad > 0, float("nan"), 0.0)
        column = tl.arange(0, BLOCK_E)
        pointers = output + at_rows[:, None] * E + column[None, :]
        written = (out * scale[:, None]).to(output.dtype.element_ty)
        tl.store(pointers, written, mask=exists[:, None] & (column < E)[None, :])
