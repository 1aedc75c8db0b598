r"""The gradient of a bias under a rowwise normalizer, ds summed over whatever the bias was broadcast over.

A program takes M rows (or all rows, where the bias is one row high) and N keys of the bias itself and adds up, in one
order, the blocks of scores of every batch, head and row that it stands for, but for blocks without support.
Registers: the sum, scores and dP, all [M, N].
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.gradient import row_facts, score_gradients
from attemper.backends.triton.rowwise.normalizers import number_of
from attemper.backends.triton.rowwise.tiles import scores_at
from attemper.backends.triton.scores import LENGTHS, Call, Structure, rows_of, tile_of, tile_zeros
from attemper.backends.triton.softmax.backward_bias import bias_block, store_bias, term_of_bias


@triton.jit(do_not_specialize=[*LENGTHS, "places"])
def rowwise_bias_kernel(
    query, key, value, upstream, multiplier, mask, first, per_head, bias_grad, rows, marks,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap, given, places, bias_heads, bias_rows, over_batches, over_heads, over_rows,
    CALL: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """``over_*``: how many batches, heads and blocks of rows one entry stands for; ``bias_*``: sizes of the bias."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    call = Call(query, key, value, upstream, multiplier, mask, first, structure, heads, repeats, first_tokens, softcap)
    per_rows = tl.cdiv(structure.rows, CALL.BLOCK_M)
    own = bias_block(structure, bias_heads, bias_rows, CALL, ALL_ROWS)
    place = own[3] * CALL.BLOCK_N + tl.arange(0, CALL.BLOCK_N)
    total = tile_zeros(CALL.BLOCK_M, CALL.BLOCK_N, tl.float32)
    for step in range(over_batches * over_heads * over_rows):
        batch, head, row_block = term_of_bias(step, own, over_heads, over_rows)
        mark = ((batch.to(tl.int64) * heads + head) * per_rows + row_block) * places + own[3]
        if tl.load(marks + mark) != 0:
            here = row_block * CALL.BLOCK_M + tl.arange(0, CALL.BLOCK_M)
            exists = here < structure.rows
            number = number_of(per_head, head, given, CALL)
            at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + here
            facts, n = row_facts(rows, at_rows, exists, number, CALL)
            read = tl.where(exists & (n > 0), here, structure.rows)
            tile = tile_of(call, tl.minimum(here, structure.rows - 1), batch, head, read, CALL, True)
            s, visible, place, k, bend = scores_at(tile, call, own[3] * CALL.BLOCK_N, CALL)
            above, values = tile.query, k
            if CALL.E > 0:
                above = rows_of(upstream, batch, head, read, CALL.E, CALL, True, structure.rows)
                values = rows_of(value, batch, tile.group, place, CALL.E, CALL, True, structure.keys)
            ds, applied = score_gradients(s, visible, place, above, values, tile, call, facts, CALL)
            total += ds
    store_bias(total, bias_grad, own, place, structure, bias_heads, bias_rows, CALL, ALL_ROWS)
