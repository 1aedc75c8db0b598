r"""The gradient of queries: a program takes M rows of one head and sweeps the blocks of N keys that they see::

    dS = score_gradients(q, k, dO, v)    dQ += (dS softcap') K    ...    dQ * multiplier; d multiplier = rowsum(dQ q)

Registers: dQ [M, D], scores and dP [M, N], the numbers of a row. Shared memory: q [M, D], dO [M, E], and tiles of keys
and values, in several stages. One program a row, one order of sums: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import (
    LENGTHS,
    VISIBLE,
    Call,
    Structure,
    block_of,
    blocks,
    edge_start,
    product,
    rows_of,
    tile_of,
    tile_zeros,
)
from attemper.backends.triton.softmax.gradient import row_facts, score_gradients, without_noise


@triton.jit
def _block(dq, tile, upstream, terms, start, call, CALL: tl.constexpr, EDGE: tl.constexpr):
    """``dq`` after the keys from ``start`` on."""
    local, count = tl.arange(0, CALL.BLOCK_N), call.structure.keys
    place = start + local
    block = block_of(call.key, tile.batch, tile.group, start, local, CALL.D, CALL, EDGE, count)
    values = block
    if CALL.E > 0:
        values = block_of(call.value, tile.batch, tile.group, start, local, CALL.E, CALL, EDGE, count)
    ds, _, bend = score_gradients(tile, block, upstream, values, terms, place, call, CALL, EDGE)
    return product((ds * bend).to(block.dtype), block, dq)


@triton.jit(do_not_specialize=LENGTHS)
def query_gradient_kernel(
    query, key, value, upstream, multiplier, mask, first, query_grad, multiplier_rows, rows,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap, CALL: tl.constexpr, QUERY: tl.constexpr, MULTIPLIER: tl.constexpr,
):  # fmt: skip
    """QUERY, MULTIPLIER: which of the two gradients are wanted."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    call = Call(query, key, value, upstream, multiplier, mask, first, structure, heads, repeats, first_tokens, softcap)
    per_head = tl.cdiv(structure.rows, CALL.BLOCK_M)
    program = tl.program_id(0)
    head = (program // per_head) % heads
    batch = program // per_head // heads
    # The last rows of a causal head see the most keys: they start first.
    places = (per_head - 1 - program % per_head) * CALL.BLOCK_M + tl.arange(0, CALL.BLOCK_M)
    exists = places < structure.rows
    row = tl.minimum(places, structure.rows - 1)
    tile = tile_of(call, row, batch, head, row, CALL, False)
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places
    terms = row_facts(rows, at_rows, exists, head, CALL)
    above = tile.query
    if CALL.E > 0:
        settled, terms = without_noise(terms, CALL)
        read = tl.where(settled, structure.rows, row)  # what is past the end reads as 0
        above = rows_of(upstream, batch, head, read, CALL.E, CALL, True, structure.rows)
    dq = tile_zeros(CALL.BLOCK_M, CALL.BLOCK_D, tl.float32)
    start, before, inside_from, inside_to, edges = blocks(tile.low, tile.high, CALL.MASK != VISIBLE, CALL.BLOCK_N)
    for number in range(edges):
        at = edge_start(number, start, before, inside_to, CALL.BLOCK_N)
        dq = _block(dq, tile, above, terms, at, call, CALL, True)
    if CALL.MASK == VISIBLE:
        for at in range(inside_from, inside_to, CALL.BLOCK_N):
            dq = _block(dq, tile, above, terms, at, call, CALL, False)
    if MULTIPLIER:
        tl.store(multiplier_rows + at_rows, tl.sum(dq * tile.query.to(tl.float32), 1), mask=exists)
    if QUERY:
        column = tl.arange(0, CALL.BLOCK_D)
        written = (dq * tile.scale[:, None]).to(query_grad.dtype.element_ty)
        pointers = query_grad + at_rows[:, None] * CALL.D + column[None, :]
        tl.store(pointers, written, mask=exists[:, None] & (column < CALL.D)[None, :])
