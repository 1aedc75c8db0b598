r"""The gradient of queries: a program takes M rows of one head and sweeps the blocks of N keys that they see::

    dS = score_slopes(q, k, dO, v)    dQ += (dS softcap') K    ...    dQ * multiplier; d multiplier = rowsum(dQ q)

Registers: dQ [M, D], scores and dP [M, N], the numbers of a row. Shared memory: q [M, D], dO [M, E], and tiles of keys
and values, in several stages. One program a row, one order of sums: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import LENGTHS, VISIBLE, Structure, blocks, edge_start, intervals, product, rows_of
from attemper.backends.triton.softmax.gradient import known, score_slopes, without_noise


@triton.jit
def _block(
    dq, q, upstream, scale, terms, low, high, diagonal, origin, row, start, batch, head, group,
    key, value, mask, first, structure, first_tokens, softcap,
    LETTERS: tl.constexpr, EDGE: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr, SINK: tl.constexpr, MAXIMUM: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``dq`` after the keys from ``start`` on."""
    place = start + tl.arange(0, BLOCK_N)
    keys = rows_of(key, batch, group, place, BLOCK_D, D, WIDE, EDGE, structure.keys)
    values = keys
    if E > 0:
        values = rows_of(value, batch, group, place, BLOCK_E, E, WIDE, EDGE, structure.keys)
    ds, _, bend = score_slopes(
        q, keys, upstream, values, scale, terms, low, high, diagonal, origin, row, place, batch, head,
        mask, first, structure, first_tokens, softcap,
        LETTERS, EDGE, MASK, LIMIT, FIRST, SOFTCAP, SINK, MAXIMUM, E,
    )  # fmt: skip
    return product((ds * bend).to(keys.dtype), keys, dq)


@triton.jit(do_not_specialize=LENGTHS)
def query_gradient_kernel(
    query, key, value, upstream, multiplier, mask, first, query_grad, multiplier_rows, rows,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap,
    LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
    SINK: tl.constexpr, MAXIMUM: tl.constexpr, QUERY: tl.constexpr, MULTIPLIER: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """QUERY, MULTIPLIER: which of the two gradients are wanted."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    per_head = tl.cdiv(structure.rows, BLOCK_M)
    program = tl.program_id(0)
    head = (program // per_head) % heads
    batch = program // per_head // heads
    # The last rows of a causal head see the most keys: they start first.
    places = (per_head - 1 - program % per_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = places < structure.rows
    row = tl.minimum(places, structure.rows - 1)
    group = head // repeats
    low, high, diagonal, origin = intervals(row, structure, POSITIONS, PACKED, BOTTOM_RIGHT)
    q = rows_of(query, batch, head, row, BLOCK_D, D, WIDE, False, 0)
    scale = tl.load(
        multiplier.pointer + batch.to(tl.int64) * multiplier.batch + head * multiplier.head + row * multiplier.row
    )
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places
    terms = known(rows, at_rows, exists, head, LETTERS, SINK, MAXIMUM)
    above = q
    if E > 0:
        settled, terms = without_noise(terms, LETTERS, SINK)
        read = tl.where(settled, structure.rows, row)  # what is past the end reads as 0
        above = rows_of(upstream, batch, head, read, BLOCK_E, E, WIDE, True, structure.rows)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, before, inside_from, inside_to, edges = blocks(low, high, MASK, BLOCK_N)
    for number in range(edges):
        at = edge_start(number, start, before, inside_to, BLOCK_N)
        dq = _block(
            dq, q, above, scale, terms, low, high, diagonal, origin, row, at, batch, head, group,
            key, value, mask, first, structure, first_tokens, softcap,
            LETTERS, True, MASK, LIMIT, FIRST, SOFTCAP, SINK, MAXIMUM, D, BLOCK_D, E, BLOCK_E, BLOCK_N, WIDE,
        )  # fmt: skip
    if MASK == VISIBLE:
        for at in range(inside_from, inside_to, BLOCK_N):
            dq = _block(
                dq, q, above, scale, terms, low, high, diagonal, origin, row, at, batch, head, group,
                key, value, mask, first, structure, first_tokens, softcap,
                LETTERS, False, MASK, LIMIT, FIRST, SOFTCAP, SINK, MAXIMUM, D, BLOCK_D, E, BLOCK_E, BLOCK_N, WIDE,
            )  # fmt: skip
    if MULTIPLIER:
        tl.store(multiplier_rows + at_rows, tl.sum(dq * q.to(tl.float32), 1), mask=exists)
    if QUERY:
        column = tl.arange(0, BLOCK_D)
        written = (dq * scale[:, None]).to(query_grad.dtype.element_ty)
        pointers = query_grad + at_rows[:, None] * D + column[None, :]
        tl.store(pointers, written, mask=exists[:, None] & (column < D)[None, :])
