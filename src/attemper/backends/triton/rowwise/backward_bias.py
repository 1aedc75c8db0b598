r"""The gradient of a bias under a map, ds summed over whatever the bias was broadcast over.

A program takes M rows (or all rows, where the bias is one row high) and N keys of the bias itself and adds up, in one
order, the blocks of scores of every batch, head and row that it stands for, but for blocks without support.
Registers: the sum, scores and dP, all [M, N].
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.gradient import block_slopes, known
from attemper.backends.triton.rowwise.maps import number_of
from attemper.backends.triton.rowwise.tiles import Keys, scores_at, tile_of
from attemper.backends.triton.scores import LENGTHS, Structure, rows_of


@triton.jit(do_not_specialize=[*LENGTHS, "places"])
def row_bias_kernel(
    query, key, value, upstream, multiplier, mask, first, per_head, bias_grad, rows, marks,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap, given, places,
    bias_heads, bias_rows, over_batches, over_heads, over_rows,
    MAP: tl.constexpr, RELATIVE: tl.constexpr, LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr,
    FIRST: tl.constexpr, SOFTCAP: tl.constexpr, MAXIMUM: tl.constexpr, POSITIONS: tl.constexpr, PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """``over_*``: how many batches, heads and blocks of rows one entry stands for; ``bias_*``: sizes of the bias."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    key_blocks = tl.cdiv(structure.keys, BLOCK_N)
    per_rows = tl.cdiv(structure.rows, BLOCK_M)
    program = tl.program_id(0)
    block = program % key_blocks
    place = block * BLOCK_N + tl.arange(0, BLOCK_N)
    program = program // key_blocks
    row_blocks = 1 if ALL_ROWS else tl.cdiv(bias_rows, BLOCK_M)
    own_block = program % row_blocks
    own_head = program // row_blocks % bias_heads
    own_batch = program // row_blocks // bias_heads
    keys = Keys(key, mask, first, structure, first_tokens, softcap)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(over_batches * over_heads * over_rows):
        # Where the bias has one head, own_head is 0 and all heads are gone through; otherwise there is one, its own.
        batch = own_batch + step // over_rows // over_heads
        head = own_head + step // over_rows % over_heads
        row_block = own_block + step % over_rows
        mark = ((batch.to(tl.int64) * heads + head) * per_rows + row_block) * places + block
        if tl.load(marks + mark) != 0:
            here = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
            exists = here < structure.rows
            number = number_of(per_head, head, given, MAP)
            at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + here
            facts, n = known(rows, at_rows, exists, number, MAP, LETTERS, RELATIVE)
            read = tl.where(exists & (n > 0), here, structure.rows)
            tile = tile_of(
                query, multiplier, structure, tl.minimum(here, structure.rows - 1), batch, head, repeats, read,
                POSITIONS, PACKED, BOTTOM_RIGHT, D, BLOCK_D, WIDE, True,
            )  # fmt: skip
            s, visible, place, k, bend = scores_at(
                tile, keys, block * BLOCK_N, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_N, WIDE
            )
            above, values = tile.query, k
            if E > 0:
                above = rows_of(upstream, batch, head, read, BLOCK_E, E, WIDE, True, structure.rows)
                values = rows_of(value, batch, tile.group, place, BLOCK_E, E, WIDE, True, structure.keys)
            ds, applied = block_slopes(
                s, visible, place, above, values, tile, keys, facts, MAP, LETTERS, RELATIVE, FIRST,
                MAXIMUM, E, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            total += ds
    plane = own_batch.to(tl.int64) * bias_heads + own_head
    if ALL_ROWS:
        tl.store(bias_grad + plane * structure.keys + place, tl.sum(total, 0), mask=place < structure.keys)
    else:
        here = own_block * BLOCK_M + tl.arange(0, BLOCK_M)
        pointers = bias_grad + (plane * bias_rows + here)[:, None] * structure.keys + place[None, :]
        tl.store(pointers, total, mask=(here < bias_rows)[:, None] & (place < structure.keys)[None, :])
