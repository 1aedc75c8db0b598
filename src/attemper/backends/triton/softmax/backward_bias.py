r"""The gradient of a bias, dS summed over whatever the bias was broadcast over.

A program takes M rows (or all rows, where the bias is one row high) and N keys of the bias itself and adds up, in one
order, the blocks of scores of every batch, head and row that it stands for. Nothing larger than the bias is ever held.
Registers: the sum, scores and dP, all [M, N].
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import Call, Tile, intervals, rows_of, scale_of, tile_zeros
from attemper.backends.triton.softmax.gradient import row_facts, score_gradients


@triton.jit
def bias_block(structure, bias_heads, bias_rows, CALL: tl.constexpr, ALL_ROWS: tl.constexpr):
    """The batch, the head, the block of rows and the block of keys of the bias that the program holds."""
    key_blocks = tl.cdiv(structure.keys, CALL.BLOCK_N)
    row_blocks = 1 if ALL_ROWS else tl.cdiv(bias_rows, CALL.BLOCK_M)
    program = tl.program_id(0)
    of_rows = program // key_blocks
    return (
        of_rows // row_blocks // bias_heads,
        of_rows // row_blocks % bias_heads,
        of_rows % row_blocks,
        program % key_blocks,
    )


@triton.jit
def term_of_bias(number, own, over_heads, over_rows):
    """Batch, head and block of rows of the scores that are added next."""
    # Where the bias has one head, own[1] is 0 and all heads are gone through; otherwise there is one, its own.
    batch = own[0] + number // over_rows // over_heads
    head = own[1] + number // over_rows % over_heads
    return batch, head, own[2] + number % over_rows


@triton.jit
def store_bias(total, target, own, place, structure, bias_heads, bias_rows, CALL: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Writes the sum [M, N] of a program; ALL_ROWS: summed over its rows."""
    plane = own[0].to(tl.int64) * bias_heads + own[1]
    if ALL_ROWS:
        tl.store(target + plane * structure.keys + place, tl.sum(total, 0), mask=place < structure.keys)
    else:
        places = own[2] * CALL.BLOCK_M + tl.arange(0, CALL.BLOCK_M)
        pointers = target + (plane * bias_rows + places)[:, None] * structure.keys + place[None, :]
        tl.store(pointers, total, mask=(places < bias_rows)[:, None] & (place < structure.keys)[None, :])


# Specialised for its lengths: without that it spills registers on sm_80.
@triton.jit
def bias_gradient_kernel(
    query, key, value, upstream, multiplier, mask, first, bias_grad, rows, structure,
    heads, repeats, first_tokens, softcap, bias_heads, bias_rows, over_batches, over_heads, over_rows,
    CALL: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """``over_*``: how many batches, heads and blocks of rows one entry stands for; ``bias_*``: sizes of the bias."""
    call = Call(query, key, value, upstream, multiplier, mask, first, structure, heads, repeats, first_tokens, softcap)
    own = bias_block(structure, bias_heads, bias_rows, CALL, ALL_ROWS)
    place = own[3] * CALL.BLOCK_N + tl.arange(0, CALL.BLOCK_N)
    total = tile_zeros(CALL.BLOCK_M, CALL.BLOCK_N, tl.float32)
    for number in range(over_batches * over_heads * over_rows):
        batch, head, row_block = term_of_bias(number, own, over_heads, over_rows)
        places = row_block * CALL.BLOCK_M + tl.arange(0, CALL.BLOCK_M)
        exists = places < structure.rows
        row = tl.minimum(places, structure.rows - 1)
        low, high, diagonal, origin = intervals(row, structure, CALL)
        high = tl.where(exists, high, 0)
        sees = (low < high) & (high > tl.min(place, 0)) & (low <= tl.max(place, 0))
        if tl.max(sees.to(tl.int32), 0) > 0:
            group = head // repeats
            at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places
            terms = row_facts(rows, at_rows, exists, head, CALL)
            scale = scale_of(call, batch, head, row)
            q = rows_of(query, batch, head, row, CALL.D, CALL, False, 0)
            block = rows_of(key, batch, group, place, CALL.D, CALL, True, structure.keys)
            above, values = q, block
            if CALL.E > 0:
                above = rows_of(upstream, batch, head, row, CALL.E, CALL, False, 0)
                values = rows_of(value, batch, group, place, CALL.E, CALL, True, structure.keys)
            tile = Tile(q, scale, low, high, diagonal, origin, row, batch, head, group)
            ds, _, _ = score_gradients(tile, block, above, values, terms, place, call, CALL, True)
            total += ds
    store_bias(total, bias_grad, own, place, structure, bias_heads, bias_rows, CALL, ALL_ROWS)
