r"""The gradients of keys and values: a program takes N keys of one key head and sweeps the blocks of M rows that see
them, of every query head that shares the key head::

    P, dS = score_gradients(q, k, dO, v)    dV += (mass P)^T dO    dK += (multiplier dS softcap')^T Q

Registers: dK [N, D], dV [N, E], scores and dP [M, N]. Shared memory: k [N, D], v [N, E], and tiles of queries and dO, in
several stages. The query heads of a key head are summed inside, in their order: no atomics, the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import (
    LENGTHS,
    VISIBLE,
    Call,
    Structure,
    Tile,
    block_of,
    document_of,
    edge_start,
    intervals,
    product,
    rows_of,
    scale_of,
    tile_zeros,
)
from attemper.backends.triton.softmax.gradient import row_facts, score_gradients


@triton.jit
def _first_at(bound, positions, low, high, halvings):
    """The first of the rows ``low <= row < high`` that stands at ``bound`` or after it, [2]; positions ascend."""
    for _ in range(halvings):
        middle = (low + high) // 2
        open_ = low < high
        before = tl.load(positions + middle, mask=open_, other=0).to(tl.int32) < bound
        low = tl.where(open_ & before, middle + 1, low)
        high = tl.where(open_ & (before == 0), middle, high)
    return low


@triton.jit
def _rows_seeing(key, structure, halvings, CALL: tl.constexpr):
    """The rows that see each of these keys by structure, ``from <= row < to``, [2]. Both rise with the key."""
    if CALL.PACKED:
        number = document_of(key, structure.starts_k, structure.documents, structure.steps)
        inside = number < structure.documents
        begun = tl.load(structure.starts_q + number, mask=inside, other=0).to(tl.int32)
        over = tl.load(structure.starts_q + number + 1, mask=inside, other=0).to(tl.int32)
        first = tl.load(structure.starts_k + number, mask=inside, other=0).to(tl.int32)
        shift = begun - first
        if CALL.BOTTOM_RIGHT:
            end = tl.load(structure.starts_k + number + 1, mask=inside, other=0).to(tl.int32)
            shift -= (end - first) - (over - begun)
        if CALL.POSITIONS:
            seen_from = _first_at(key - first - structure.right, structure.positions, begun, over, halvings)
            seen_to = _first_at(key - first + structure.left + 1, structure.positions, begun, over, halvings)
        else:
            seen_from = tl.minimum(tl.maximum(key - structure.right + shift, begun), over)
            seen_to = tl.minimum(tl.maximum(key + structure.left + shift + 1, begun), over)
        # A key behind the last document is seen by none; its place is behind all rows, for both ends must rise.
        return tl.where(inside, seen_from, structure.rows), tl.where(inside, seen_to, structure.rows)
    least = key - structure.right - structure.offset
    most = key + structure.left - structure.offset + 1
    if CALL.POSITIONS:
        none = tl.zeros_like(key)
        seen_from = _first_at(least, structure.positions, none, none + structure.rows, halvings)
        seen_to = _first_at(most, structure.positions, none, none + structure.rows, halvings)
    else:
        seen_from = tl.minimum(tl.maximum(least, 0), structure.rows)
        seen_to = tl.minimum(tl.maximum(most, 0), structure.rows)
    return seen_from, seen_to


@triton.jit
def row_blocks(place, structure, halvings, CALL: tl.constexpr, MASKED: tl.constexpr):
    """The blocks of rows that see keys from ``place`` on: as ``scores.blocks``, with rows and keys in each other's
    place. Keys past the end do not count: nothing that they are given is stored."""
    BLOCK_M: tl.constexpr = CALL.BLOCK_M
    ends = tl.minimum(place + tl.arange(0, 2) * (CALL.BLOCK_N - 1), structure.keys - 1)
    seen_from, seen_to = _rows_seeing(ends, structure, halvings, CALL)
    end = tl.max(seen_to, 0)
    start = tl.minimum(tl.min(seen_from, 0), end) // BLOCK_M * BLOCK_M
    last = tl.cdiv(end, BLOCK_M) * BLOCK_M
    inside_from = last
    inside_to = last
    if not MASKED:
        inside_from = tl.maximum(tl.minimum(tl.cdiv(tl.max(seen_from, 0), BLOCK_M) * BLOCK_M, last), start)
        inside_to = tl.maximum(tl.min(seen_to, 0) // BLOCK_M * BLOCK_M, inside_from)
    before = (inside_from - start) // BLOCK_M
    return start, before, inside_from, inside_to, before + (last - inside_to) // BLOCK_M


@triton.jit
def _block(
    dk, dv, block, values, place, begin, batch, head, rows, call,
    CALL: tl.constexpr, EDGE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """``dk`` and ``dv`` after the rows from ``begin`` on of one head."""
    structure = call.structure
    places = begin + tl.arange(0, CALL.BLOCK_M)
    exists = places < structure.rows
    row = tl.minimum(places, structure.rows - 1)
    low, high, diagonal, origin = intervals(row, structure, CALL)
    at_rows = (batch.to(tl.int64) * call.heads + head) * structure.rows + places
    terms = row_facts(rows, at_rows, exists, head, CALL)
    scale = scale_of(call, batch, head, row)
    read = row
    if EDGE:
        # A row past the end sees nothing. It and empty rows are read as 0: 0 times an inf of theirs would be NaN.
        high = tl.where(exists, high, 0)
        read = tl.where(exists & (terms[0][2] > 0), row, structure.rows)
    q = block_of(call.query, batch, head, begin, read - begin, CALL.D, CALL, EDGE, structure.rows)
    above = q
    if CALL.E > 0:
        above = block_of(call.upstream, batch, head, begin, read - begin, CALL.E, CALL, EDGE, structure.rows)
    tile = Tile(q, scale, low, high, diagonal, origin, row, batch, head, head)
    ds, applied, bend = score_gradients(tile, block, above, values, terms, place, call, CALL, EDGE)
    if VALUE:
        dv = product(tl.trans(applied.to(above.dtype)), above, dv)
    if KEY:
        dk = product(tl.trans((ds * bend * scale[:, None]).to(q.dtype)), q, dk)
    return dk, dv


@triton.jit
def store_key_gradients(
    dk, dv, key_grad, value_grad, place, head, count, CALL: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr
):
    """Writes the gradients of the keys ``place`` of a key head, counted over all batches, of ``count`` keys each."""
    exists = (place < count)[:, None]
    at_keys = (head.to(tl.int64) * count + place)[:, None]
    if KEY:
        column = tl.arange(0, CALL.BLOCK_D)[None, :]
        written = dk.to(key_grad.dtype.element_ty)
        tl.store(key_grad + at_keys * CALL.D + column, written, mask=exists & (column < CALL.D))
    if VALUE:
        column = tl.arange(0, CALL.BLOCK_E)[None, :]
        written = dv.to(value_grad.dtype.element_ty)
        tl.store(value_grad + at_keys * CALL.E + column, written, mask=exists & (column < CALL.E))


@triton.jit(do_not_specialize=[*LENGTHS, "halvings"])
def key_gradient_kernel(
    query, key, value, upstream, multiplier, mask, first, key_grad, value_grad, rows,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, halvings, first_tokens, softcap, CALL: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """KEY, VALUE: which of the two gradients are wanted."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    call = Call(query, key, value, upstream, multiplier, mask, first, structure, heads, repeats, first_tokens, softcap)
    per_head = tl.cdiv(structure.keys, CALL.BLOCK_N)
    groups = heads // repeats
    program = tl.program_id(0)
    group = (program // per_head) % groups
    batch = program // per_head // groups
    # The first keys of a causal head are seen by the most rows: they start first.
    from_key = program % per_head * CALL.BLOCK_N
    place = from_key + tl.arange(0, CALL.BLOCK_N)
    block = rows_of(key, batch, group, place, CALL.D, CALL, True, structure.keys)
    values = block
    if CALL.E > 0:
        values = rows_of(value, batch, group, place, CALL.E, CALL, True, structure.keys)
    dk = tile_zeros(CALL.BLOCK_N, CALL.BLOCK_D, tl.float32)
    dv = tile_zeros(CALL.BLOCK_N, CALL.BLOCK_E, tl.float32)
    start, before, inside_from, inside_to, edges = row_blocks(from_key, structure, halvings, CALL, CALL.MASK != VISIBLE)
    for number in range(edges * repeats):
        head = group * repeats + number // edges
        at = edge_start(number % edges, start, before, inside_to, CALL.BLOCK_M)
        dk, dv = _block(dk, dv, block, values, place, at, batch, head, rows, call, CALL, True, KEY, VALUE)
    if CALL.MASK == VISIBLE:
        insides = (inside_to - inside_from) // CALL.BLOCK_M
        for number in range(insides * repeats):
            head = group * repeats + number // insides
            at = inside_from + number % insides * CALL.BLOCK_M
            dk, dv = _block(dk, dv, block, values, place, at, batch, head, rows, call, CALL, False, KEY, VALUE)
    store_key_gradients(dk, dv, key_grad, value_grad, place, batch * groups + group, structure.keys, CALL, KEY, VALUE)
