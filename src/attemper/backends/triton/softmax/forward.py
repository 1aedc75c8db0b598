r"""The forward kernel: the state of every row, and the output where there is a value. Without one it is the statistics
kernel: QK^T only, which can stand beside anybody's attention.

A program takes M query rows of one head and sweeps the blocks of N keys that they can see::

    s = raw_scores(q, k)    rows, e, r = absorb(rows, s)    O = r O + e V    ...    O mass / Z, state

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
    Call,
    Structure,
    Tile,
    any_of,
    block_of,
    blocks,
    distance_of,
    edge_start,
    first_of,
    intervals,
    own_of,
    product,
    raw_scores,
    raw_unit,
    row_zeros,
    scale_of,
    span_of,
    tile_zeros,
    visibility,
)
from attemper.backends.triton.softmax import state as softmax
from attemper.backends.triton.softmax.state import OWN, SPAN, F, T


@triton.jit
def join_block(
    rows, out, best, tile, call, first_limit, falling, start,
    CALL: tl.constexpr, EDGE: tl.constexpr, WINNER: tl.constexpr,
):  # fmt: skip
    """``rows`` and ``out`` after the keys from ``start`` on, and where the maximum stands if WINNER."""
    structure, local = call.structure, tl.arange(0, CALL.BLOCK_N)
    place = start + local
    block = block_of(call.key, tile.batch, tile.group, start, local, CALL.D, CALL, EDGE, structure.keys)
    s = raw_scores(tile, block, call, falling, CALL)
    more = CALL.BLOCK_N
    if EDGE:
        visible, bias = visibility(tile, place, call, CALL)
        s = softmax.hide(s + bias, visible)
        more = tl.sum(visible.to(tl.int32), 1)
    if WINNER:
        top, at = tl.max(s, 1, return_indices=True)
        at += start
        # Edge blocks come first: the lowest key wins a tie wherever it was met.
        best = tl.where((top > rows[0]) | ((top == rows[0]) & (at < best)), at, best)
    rows, e, shrink = softmax.absorb(rows, s, raw_unit(tile, call, CALL) * softmax.LOG2E, more, CALL.STATE, EDGE)
    if F & CALL.STATE:
        if CALL.FIRST or start < first_limit:
            rows = softmax.with_first(rows, e, first_of(tile, place, call, CALL))
    if T & CALL.STATE:
        rows = softmax.with_distance(rows, e, distance_of(tile, place))
    if OWN & CALL.STATE:
        rows = softmax.with_own(rows, e, own_of(tile, place))
    if SPAN & CALL.STATE:
        rows = softmax.with_span(rows, e, span_of(tile, place, call))
    if CALL.E > 0:
        values = block_of(call.value, tile.batch, tile.group, start, local, CALL.E, CALL, EDGE, structure.keys)
        out = product(e.to(values.dtype), values, out * shrink[:, None])
    return rows, out, best


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    query, key, value, multiplier, mask, first, sink, output, state, winner, flag,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap,
    CALL: tl.constexpr, WINNER: tl.constexpr, FLAG: tl.constexpr, GATHER: tl.constexpr, EDGE_STAGES: tl.constexpr,
):  # fmt: skip
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    if FLAG:
        if tl.load(flag) == 0:
            return
    call = Call(query, key, value, query, multiplier, mask, first, structure, heads, repeats, first_tokens, softcap)
    per_head = tl.cdiv(structure.rows, CALL.BLOCK_M)
    program = tl.program_id(0)
    head = (program // per_head) % heads
    batch = program // per_head // heads
    # The last rows of a causal head see the most keys: they start first.
    begin = (per_head - 1 - program % per_head) * CALL.BLOCK_M
    # Rows past the end repeat the last one; what they find is not stored.
    local = tl.minimum(tl.arange(0, CALL.BLOCK_M), structure.rows - 1 - begin)
    row = begin + local
    if GATHER:
        row = tl.load(structure.positions + row).to(tl.int32)
    low, high, diagonal, origin = intervals(row, structure, CALL)
    if GATHER:
        q = block_of(query, batch, head, 0, row.to(tl.int64), CALL.D, CALL, False, 0)
    else:
        q = block_of(query, batch, head, begin, local, CALL.D, CALL, False, 0)
    scale = scale_of(call, batch, head, row)
    falling = tl.min(scale, 0) < 0
    tile = Tile(q, scale, low, high, diagonal, origin, row, batch, head, head // repeats)
    first_limit = tl.max(origin, 0) + first_tokens
    rows = softmax.nothing(CALL.BLOCK_M)
    best = row_zeros(CALL.BLOCK_M, tl.int32)
    out = tile_zeros(CALL.BLOCK_M, CALL.BLOCK_E, tl.float32)
    start, before, inside_from, inside_to, edges = blocks(low, high, CALL.MASK != VISIBLE, CALL.BLOCK_N)
    # Few blocks, where nothing is hidden but by the structure: their loads are not worth a pipeline.
    for number in tl.range(0, edges, num_stages=EDGE_STAGES):
        at = edge_start(number, start, before, inside_to, CALL.BLOCK_N)
        visit = True
        if CALL.MASK == BOOL:
            # A block that the mask hides wholly costs no product.
            visible, _ = visibility(tile, at + tl.arange(0, CALL.BLOCK_N), call, CALL)
            visit = any_of(visible) > 0
        if visit:
            rows, out, best = join_block(rows, out, best, tile, call, first_limit, falling, at, CALL, True, WINNER)
    if CALL.MASK == VISIBLE:
        for at in range(inside_from, inside_to, CALL.BLOCK_N):
            rows, out, best = join_block(rows, out, best, tile, call, first_limit, falling, at, CALL, False, WINNER)
    left, total = softmax.finish(softmax.in_nats(rows, raw_unit(tile, call, CALL)), CALL.STATE)
    places = begin + tl.arange(0, CALL.BLOCK_M)
    exists = places < structure.rows
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places
    if WINNER:
        tl.store(winner + at_rows, best, mask=exists)
    else:
        plane = tl.num_programs(0).to(tl.int64) // per_head * structure.rows
        softmax.store(left, state + at_rows, plane, exists, CALL.STATE)
    if CALL.E > 0:
        part = 1.0 / total
        if CALL.SINK:
            part *= softmax.share(left[0] + left[1], tl.load(sink + head).to(tl.float32))
        column = tl.arange(0, CALL.BLOCK_E)
        pointers = output + at_rows[:, None] * CALL.E + column[None, :]
        written = (out * part[:, None]).to(output.dtype.element_ty)
        tl.store(pointers, written, mask=exists[:, None] & (column < CALL.E)[None, :])
