r"""The gradients of keys and values under a rowwise normalizer: a program takes N keys of one key head and sweeps the blocks of M rows
that see them, of every query head that shares the key head, but for blocks without support (``backward_query`` marked them)::

    ds, w = score_gradients(q, k, dO, v)    dV += w^T dO    dK += (multiplier ds softcap')^T Q

Registers: dK [N, D], dV [N, E], scores and dP [M, N]. Shared memory: k, v, and tiles of queries and dO. The query heads of a
key head are summed inside, in their order: no atomics, the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.gradient import row_facts, score_gradients
from attemper.backends.triton.rowwise.normalizers import number_of
from attemper.backends.triton.rowwise.tiles import scores_of
from attemper.backends.triton.scores import LENGTHS, Call, Structure, product, rows_of, tile_of, tile_zeros
from attemper.backends.triton.softmax.backward_key import row_blocks, store_key_gradients


@triton.jit(do_not_specialize=[*LENGTHS, "halvings", "places"])
def rowwise_key_kernel(
    query, key, value, upstream, multiplier, mask, first, per_head, key_grad, value_grad, rows, marks,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, halvings, first_tokens, softcap, given, places,
    CALL: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """KEY, VALUE: which of the two gradients are wanted."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    call = Call(query, key, value, upstream, multiplier, mask, first, structure, heads, repeats, first_tokens, softcap)
    per = tl.cdiv(structure.keys, CALL.BLOCK_N)
    per_rows = tl.cdiv(structure.rows, CALL.BLOCK_M)
    groups = heads // repeats
    program = tl.program_id(0)
    block = program % per
    group = (program // per) % groups
    batch = program // per // groups
    place = block * CALL.BLOCK_N + tl.arange(0, CALL.BLOCK_N)
    k = rows_of(key, batch, group, place, CALL.D, CALL, True, structure.keys)
    values = k
    if CALL.E > 0:
        values = rows_of(value, batch, group, place, CALL.E, CALL, True, structure.keys)
    dk = tile_zeros(CALL.BLOCK_N, CALL.BLOCK_D, tl.float32)
    dv = tile_zeros(CALL.BLOCK_N, CALL.BLOCK_E, tl.float32)
    start, _, _, _, count = row_blocks(block * CALL.BLOCK_N, structure, halvings, CALL, True)
    for step in range(count * repeats):
        head = group * repeats + step // count
        begin = start + step % count * CALL.BLOCK_M
        mark = ((batch.to(tl.int64) * heads + head) * per_rows + begin // CALL.BLOCK_M) * places + block
        if tl.load(marks + mark) != 0:
            here = begin + tl.arange(0, CALL.BLOCK_M)
            exists = here < structure.rows
            number = number_of(per_head, head, given, CALL)
            at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + here
            facts, n = row_facts(rows, at_rows, exists, number, CALL)
            read = tl.where(exists & (n > 0), here, structure.rows)
            tile = tile_of(call, tl.minimum(here, structure.rows - 1), batch, head, read, CALL, True)
            above = tile.query
            if CALL.E > 0:
                above = rows_of(upstream, batch, head, read, CALL.E, CALL, True, structure.rows)
            s, visible, bend = scores_of(tile, call, k, place, CALL)
            ds, applied = score_gradients(s, visible, place, above, values, tile, call, facts, CALL)
            if VALUE:
                dv = product(tl.trans(applied.to(above.dtype)), above, dv)
            if KEY:
                dk = product(tl.trans((ds * bend * tile.scale[:, None]).to(tile.query.dtype)), tile.query, dk)
    store_key_gradients(dk, dv, key_grad, value_grad, place, batch * groups + group, structure.keys, CALL, KEY, VALUE)
