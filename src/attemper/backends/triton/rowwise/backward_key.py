r"""The gradients of keys and values under a map: a program takes N keys of one key head and sweeps the blocks of M rows
that see them, of every query head that shares the key head, but for blocks without support (``row_query`` marked them)::

    ds, w = block_slopes(q, k, dO, v)    dV += w^T dO    dK += (multiplier ds softcap')^T Q

Registers: dK [N, D], dV [N, E], scores and dP [M, N]. Shared memory: k, v, and tiles of queries and dO. The query heads of a
key head are summed inside, in their order: no atomics, the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.gradient import block_slopes, known
from attemper.backends.triton.rowwise.maps import number_of
from attemper.backends.triton.rowwise.tiles import Keys, scores_of, tile_of
from attemper.backends.triton.scores import BIAS, LENGTHS, Structure, product, rows_of
from attemper.backends.triton.softmax.backward_key import row_blocks


@triton.jit(do_not_specialize=[*LENGTHS, "halvings", "places"])
def row_key_kernel(
    query, key, value, upstream, multiplier, mask, first, per_head, key_grad, value_grad, rows, marks,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, halvings, first_tokens, softcap, given, places,
    MAP: tl.constexpr, RELATIVE: tl.constexpr, LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr,
    FIRST: tl.constexpr, SOFTCAP: tl.constexpr, MAXIMUM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """KEY, VALUE: which of the two gradients are wanted."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    per = tl.cdiv(structure.keys, BLOCK_N)
    per_rows = tl.cdiv(structure.rows, BLOCK_M)
    groups = heads // repeats
    program = tl.program_id(0)
    block = program % per
    group = (program // per) % groups
    batch = program // per // groups
    place = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = rows_of(key, batch, group, place, BLOCK_D, D, WIDE, True, structure.keys)
    values = k
    if E > 0:
        values = rows_of(value, batch, group, place, BLOCK_E, E, WIDE, True, structure.keys)
    keys = Keys(key, mask, first, structure, first_tokens, softcap)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    start, _, _, _, count = row_blocks(
        block * BLOCK_N, structure, halvings, BIAS, POSITIONS, PACKED, BOTTOM_RIGHT, BLOCK_M, BLOCK_N
    )
    for step in range(count * repeats):
        head = group * repeats + step // count
        begin = start + step % count * BLOCK_M
        mark = ((batch.to(tl.int64) * heads + head) * per_rows + begin // BLOCK_M) * places + block
        if tl.load(marks + mark) != 0:
            here = begin + tl.arange(0, BLOCK_M)
            exists = here < structure.rows
            number = number_of(per_head, head, given, MAP)
            at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + here
            facts, n = known(rows, at_rows, exists, number, MAP, LETTERS, RELATIVE)
            read = tl.where(exists & (n > 0), here, structure.rows)
            tile = tile_of(
                query, multiplier, structure, tl.minimum(here, structure.rows - 1), batch, head, repeats, read,
                POSITIONS, PACKED, BOTTOM_RIGHT, D, BLOCK_D, WIDE, True,
            )  # fmt: skip
            above = tile.query
            if E > 0:
                above = rows_of(upstream, batch, head, read, BLOCK_E, E, WIDE, True, structure.rows)
            s, visible, bend = scores_of(tile, keys, k, place, MASK, LIMIT, SOFTCAP)
            ds, applied = block_slopes(
                s, visible, place, above, values, tile, keys, facts, MAP, LETTERS, RELATIVE, FIRST, MAXIMUM, E,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
            if VALUE:
                dv = product(tl.trans(applied.to(above.dtype)), above, dv)
            if KEY:
                dk = product(tl.trans((ds * bend * tile.scale[:, None]).to(tile.query.dtype)), tile.query, dk)
    exists_key = (place < structure.keys)[:, None]
    at_keys = ((batch.to(tl.int64) * groups + group) * structure.keys + place)[:, None]
    if KEY:
        column = tl.arange(0, BLOCK_D)[None, :]
        tl.store(key_grad + at_keys * D + column, dk.to(key_grad.dtype.element_ty), mask=exists_key & (column < D))
    if VALUE:
        column = tl.arange(0, BLOCK_E)[None, :]
        tl.store(value_grad + at_keys * E + column, dv.to(value_grad.dtype.element_ty), mask=exists_key & (column < E))
