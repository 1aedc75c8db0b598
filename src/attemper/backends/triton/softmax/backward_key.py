r"""The gradients of keys and values: a program takes N keys of one key head and sweeps the blocks of M rows that see
them, of every query head that shares the key head::

    P, dS = score_slopes(q, k, dO, v)    dV += (mass P)^T dO    dK += (multiplier dS softcap')^T Q

Registers: dK [N, D], dV [N, E], scores and dP [M, N]. Shared memory: k [N, D], v [N, E], and tiles of queries and dO, in
several stages. The query heads of a key head are summed inside, in their order: no atomics, the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import (
    LENGTHS,
    VISIBLE,
    Structure,
    document_of,
    edge_start,
    intervals,
    product,
    rows_of,
)
from attemper.backends.triton.softmax.gradient import known, score_slopes


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
def _rows_seeing(key, structure, halvings, POSITIONS: tl.constexpr, PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr):
    """The rows that see each of these keys by structure, ``from <= row < to``, [2]. Both rise with the key."""
    if PACKED:
        number = document_of(key, structure.starts_k, structure.documents, structure.steps)
        inside = number < structure.documents
        begun = tl.load(structure.starts_q + number, mask=inside, other=0).to(tl.int32)
        over = tl.load(structure.starts_q + number + 1, mask=inside, other=0).to(tl.int32)
        first = tl.load(structure.starts_k + number, mask=inside, other=0).to(tl.int32)
        shift = begun - first
        if BOTTOM_RIGHT:
            end = tl.load(structure.starts_k + number + 1, mask=inside, other=0).to(tl.int32)
            shift -= (end - first) - (over - begun)
        if POSITIONS:
            seen_from = _first_at(key - first - structure.right, structure.positions, begun, over, halvings)
            seen_to = _first_at(key - first + structure.left + 1, structure.positions, begun, over, halvings)
        else:
            seen_from = tl.minimum(tl.maximum(key - structure.right + shift, begun), over)
            seen_to = tl.minimum(tl.maximum(key + structure.left + shift + 1, begun), over)
        # A key behind the last document is seen by none; its place is behind all rows, for both ends must rise.
        return tl.where(inside, seen_from, structure.rows), tl.where(inside, seen_to, structure.rows)
    least = key - structure.right - structure.offset
    most = key + structure.left - structure.offset + 1
    if POSITIONS:
        none = tl.zeros_like(key)
        seen_from = _first_at(least, structure.positions, none, none + structure.rows, halvings)
        seen_to = _first_at(most, structure.positions, none, none + structure.rows, halvings)
    else:
        seen_from = tl.minimum(tl.maximum(least, 0), structure.rows)
        seen_to = tl.minimum(tl.maximum(most, 0), structure.rows)
    return seen_from, seen_to


@triton.jit
def row_blocks(
    place, structure, halvings, MASK: tl.constexpr, POSITIONS: tl.constexpr, PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The blocks of rows that see keys from ``place`` on: as ``scores.blocks``, with rows and keys in each other's
    place. Keys past the end do not count: nothing that they are given is stored."""
    ends = tl.minimum(place + tl.arange(0, 2) * (BLOCK_N - 1), structure.keys - 1)
    seen_from, seen_to = _rows_seeing(ends, structure, halvings, POSITIONS, PACKED, BOTTOM_RIGHT)
    end = tl.max(seen_to, 0)
    start = tl.minimum(tl.min(seen_from, 0), end) // BLOCK_M * BLOCK_M
    last = tl.cdiv(end, BLOCK_M) * BLOCK_M
    inside_from = last
    inside_to = last
    if MASK == VISIBLE:
        inside_from = tl.maximum(tl.minimum(tl.cdiv(tl.max(seen_from, 0), BLOCK_M) * BLOCK_M, last), start)
        inside_to = tl.maximum(tl.min(seen_to, 0) // BLOCK_M * BLOCK_M, inside_from)
    before = (inside_from - start) // BLOCK_M
    return start, before, inside_from, inside_to, before + (last - inside_to) // BLOCK_M


@triton.jit
def _block(
    dk, dv, keys, values, place, begin, batch, head,
    query, upstream, multiplier, mask, first, rows, structure, heads, first_tokens, softcap,
    LETTERS: tl.constexpr, EDGE: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr, SINK: tl.constexpr, MAXIMUM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``dk`` and ``dv`` after the rows from ``begin`` on of one head."""
    places = begin + tl.arange(0, BLOCK_M)
    exists = places < structure.rows
    row = tl.minimum(places, structure.rows - 1)
    low, high, diagonal, origin = intervals(row, structure, POSITIONS, PACKED, BOTTOM_RIGHT)
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places
    terms = known(rows, at_rows, exists, head, LETTERS, SINK, MAXIMUM)
    scale = tl.load(
        multiplier.pointer + batch.to(tl.int64) * multiplier.batch + head * multiplier.head + row * multiplier.row
    )
    read = row
    if EDGE:
        # A row past the end sees nothing. It and empty rows are read as 0: 0 times an inf of theirs would be NaN.
        high = tl.where(exists, high, 0)
        read = tl.where(exists & (terms[0][2] > 0), row, structure.rows)
    q = rows_of(query, batch, head, read, BLOCK_D, D, WIDE, EDGE, structure.rows)
    above = q
    if E > 0:
        above = rows_of(upstream, batch, head, read, BLOCK_E, E, WIDE, EDGE, structure.rows)
    ds, applied, bend = score_slopes(
        q, keys, above, values, scale, terms, low, high, diagonal, origin, row, place, batch, head,
        mask, first, structure, first_tokens, softcap,
        LETTERS, EDGE, MASK, LIMIT, FIRST, SOFTCAP, SINK, MAXIMUM, E,
    )  # fmt: skip
    if VALUE:
        dv = product(tl.trans(applied.to(above.dtype)), above, dv)
    if KEY:
        dk = product(tl.trans((ds * bend * scale[:, None]).to(q.dtype)), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=[*LENGTHS, "halvings"])
def key_gradient_kernel(
    query, key, value, upstream, multiplier, mask, first, key_grad, value_grad, rows,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, halvings, first_tokens, softcap,
    LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
    SINK: tl.constexpr, MAXIMUM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, POSITIONS: tl.constexpr,
    PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """KEY, VALUE: which of the two gradients are wanted."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    per_head = tl.cdiv(structure.keys, BLOCK_N)
    groups = heads // repeats
    program = tl.program_id(0)
    group = (program // per_head) % groups
    batch = program // per_head // groups
    # The first keys of a causal head are seen by the most rows: they start first.
    from_key = program % per_head * BLOCK_N
    place = from_key + tl.arange(0, BLOCK_N)
    keys = rows_of(key, batch, group, place, BLOCK_D, D, WIDE, True, structure.keys)
    values = keys
    if E > 0:
        values = rows_of(value, batch, group, place, BLOCK_E, E, WIDE, True, structure.keys)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    start, before, inside_from, inside_to, edges = row_blocks(
        from_key, structure, halvings, MASK, POSITIONS, PACKED, BOTTOM_RIGHT, BLOCK_M, BLOCK_N
    )
    for number in range(edges * repeats):
        head = group * repeats + number // edges
        at = edge_start(number % edges, start, before, inside_to, BLOCK_M)
        dk, dv = _block(
            dk, dv, keys, values, place, at, batch, head,
            query, upstream, multiplier, mask, first, rows, structure, heads, first_tokens, softcap,
            LETTERS, True, MASK, LIMIT, FIRST, SOFTCAP, SINK, MAXIMUM, KEY, VALUE, POSITIONS, PACKED, BOTTOM_RIGHT,
            D, BLOCK_D, E, BLOCK_E, BLOCK_M, WIDE,
        )  # fmt: skip
    if MASK == VISIBLE:
        insides = (inside_to - inside_from) // BLOCK_M
        for number in range(insides * repeats):
            head = group * repeats + number // insides
            at = inside_from + number % insides * BLOCK_M
            dk, dv = _block(
                dk, dv, keys, values, place, at, batch, head,
                query, upstream, multiplier, mask, first, rows, structure, heads, first_tokens, softcap,
                LETTERS, False, MASK, LIMIT, FIRST, SOFTCAP, SINK, MAXIMUM, KEY, VALUE, POSITIONS, PACKED,
                BOTTOM_RIGHT, D, BLOCK_D, E, BLOCK_E, BLOCK_M, WIDE,
            )  # fmt: skip
    exists = (place < structure.keys)[:, None]
    at_keys = ((batch.to(tl.int64) * groups + group) * structure.keys + place)[:, None]
    if KEY:
        column = tl.arange(0, BLOCK_D)[None, :]
        written = dk.to(key_grad.dtype.element_ty)
        tl.store(key_grad + at_keys * D + column, written, mask=exists & (column < D))
    if VALUE:
        column = tl.arange(0, BLOCK_E)[None, :]
        written = dv.to(value_grad.dtype.element_ty)
        tl.store(value_grad + at_keys * E + column, written, mask=exists & (column < E))
