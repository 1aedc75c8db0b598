r"""The forward kernel: the state of every row, and the output where there is a value. Without one it is the statistics
kernel: QK^T only, which can stand beside anybody's attention.

A program takes M query rows of one head and sweeps the blocks of N keys that they can see::

    s = scores(q, k)    rows, e, r = absorbed(rows, s)    O = r O + e V    ...    O mass / Z, state

first the blocks at the edges of what the rows see, with masks, then those inside, without. Registers: query tile
[M, D], O [M, E], scores [M, N], a few numbers per row. Shared memory: tiles of keys and values, in several stages.
Programs of the longest rows of a causal head start first.

FLAG: the program returns at once where the device's flag is 0. GATHER: rows are those of the query that ``positions``
names, taken as they are loaded.

Sums are made in one order, by one program a row: results are the same bits every time, and no atomic is used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import (
    BOOL,
    LENGTHS,
    VISIBLE,
    Structure,
    any_seen,
    block_of,
    blocks,
    edge_start,
    intervals,
    product,
    scores,
    seen,
)
from attemper.backends.triton.softmax import state as softmax
from attemper.backends.triton.softmax.state import F, T


@triton.jit
def _block(
    rows, out, best, query, multiplier, low, high, diagonal, origin, first_limit, row, start, batch, head, group,
    key, value, mask, first, structure, first_tokens, softcap,
    LETTERS: tl.constexpr, EDGE: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr, WINNER: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``rows`` and ``out`` after the keys from ``start`` on, and where the maximum stands if WINNER."""
    local = tl.arange(0, BLOCK_N)
    place = start + local
    keys = block_of(key, batch, group, start, local, BLOCK_D, D, WIDE, EDGE, structure.keys)
    s, _ = scores(query, keys, multiplier, softcap, SOFTCAP)
    more = BLOCK_N
    if EDGE:
        visible, bias = seen(low, high, place, mask, batch, head, row, structure, MASK, LIMIT)
        s = softmax.hidden(s + bias, visible)
        more = tl.sum(visible.to(tl.int32), 1)
    if WINNER:
        top, at = tl.max(s, 1, return_indices=True)
        at += start
        # Edge blocks come first: the lowest key wins a tie wherever it was met.
        best = tl.where((top > rows[0]) | ((top == rows[0]) & (at < best)), at, best)
    rows, e, shrink = softmax.absorbed(rows, s, more, LETTERS, EDGE)
    if F & LETTERS:
        if FIRST:
            from_here = first.pointer + batch.to(tl.int64) * first.batch + place.to(tl.int64) * first.column
            marked = tl.load(from_here, mask=place < structure.keys, other=0)
            rows = softmax.with_first(rows, e, (marked != 0)[None, :])
        elif start < first_limit:
            rows = softmax.with_first(rows, e, place[None, :] - origin[:, None] < first_tokens)
    if T & LETTERS:
        rows = softmax.with_distance(rows, e, tl.abs(diagonal[:, None] - place[None, :]))
    if E > 0:
        values = block_of(value, batch, group, start, local, BLOCK_E, E, WIDE, EDGE, structure.keys)
        out = product(e.to(values.dtype), values, out * shrink[:, None])
    return rows, out, best


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    query, key, value, multiplier, mask, first, sink, output, state, winner, flag,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap,
    LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
    SINK: tl.constexpr, WINNER: tl.constexpr, FLAG: tl.constexpr, GATHER: tl.constexpr, POSITIONS: tl.constexpr,
    PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, EDGE_STAGES: tl.constexpr,
):  # fmt: skip
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    if FLAG:
        if tl.load(flag) == 0:
            return
    per_head = tl.cdiv(structure.rows, BLOCK_M)
    program = tl.program_id(0)
    head = (program // per_head) % heads
    batch = program // per_head // heads
    # The last rows of a causal head see the most keys: they start first.
    begin = (per_head - 1 - program % per_head) * BLOCK_M
    # Rows past the end repeat the last one; what they find is not stored.
    local = tl.minimum(tl.arange(0, BLOCK_M), structure.rows - 1 - begin)
    row = begin + local
    if GATHER:
        row = tl.load(structure.positions + row).to(tl.int32)
    group = head // repeats
    low, high, diagonal, origin = intervals(row, structure, POSITIONS, PACKED, BOTTOM_RIGHT)
    if GATHER:
        q = block_of(query, batch, head, 0, row.to(tl.int64), BLOCK_D, D, WIDE, False, 0)
    else:
        q = block_of(query, batch, head, begin, local, BLOCK_D, D, WIDE, False, 0)
    scale = tl.load(
        multiplier.pointer + batch.to(tl.int64) * multiplier.batch + head * multiplier.head + row * multiplier.row
    )
    first_limit = tl.max(origin, 0) + first_tokens
    rows = softmax.nothing(BLOCK_M)
    best = tl.zeros([BLOCK_M], tl.int32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    start, before, inside_from, inside_to, edges = blocks(low, high, MASK, BLOCK_N)
    # Few blocks, where nothing is hidden but by the structure: their loads are not worth a pipeline.
    for number in tl.range(0, edges, num_stages=EDGE_STAGES):
        at = edge_start(number, start, before, inside_to, BLOCK_N)
        visit = True
        if MASK == BOOL:
            visit = any_seen(low, high, at, mask, batch, head, row, structure, MASK, LIMIT, BLOCK_N)
        if visit:
            rows, out, best = _block(
                rows, out, best, q, scale, low, high, diagonal, origin, first_limit, row, at, batch, head, group,
                key, value, mask, first, structure, first_tokens, softcap,
                LETTERS, True, MASK, LIMIT, FIRST, SOFTCAP, WINNER, D, BLOCK_D, E, BLOCK_E, BLOCK_N, WIDE,
            )  # fmt: skip
    if MASK == VISIBLE:
        for at in range(inside_from, inside_to, BLOCK_N):
            rows, out, best = _block(
                rows, out, best, q, scale, low, high, diagonal, origin, first_limit, row, at, batch, head, group,
                key, value, mask, first, structure, first_tokens, softcap,
                LETTERS, False, MASK, LIMIT, FIRST, SOFTCAP, WINNER, D, BLOCK_D, E, BLOCK_E, BLOCK_N, WIDE,
            )  # fmt: skip
    left, total = softmax.finished(rows, LETTERS)
    places = begin + tl.arange(0, BLOCK_M)
    exists = places < structure.rows
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places
    if WINNER:
        tl.store(winner + at_rows, best, mask=exists)
    else:
        plane = tl.num_programs(0).to(tl.int64) // per_head * structure.rows
        softmax.stored(left, state + at_rows, plane, exists, LETTERS)
    if E > 0:
        part = 1.0 / total
        if SINK:
            part *= softmax.share(left[0] + left[1], tl.load(sink + head).to(tl.float32))
        column = tl.arange(0, BLOCK_E)
        pointers = output + at_rows[:, None] * E + column[None, :]
        written = (out * part[:, None]).to(output.dtype.element_ty)
        tl.store(pointers, written, mask=exists[:, None] & (column < E)[None, :])
