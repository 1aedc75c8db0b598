r"""The gradient of a bias, dS summed over whatever the bias was broadcast over.

A program takes M rows (or all rows, where the bias is one row high) and N keys of the bias itself and adds up, in one
order, the blocks of scores of every batch, head and row that it stands for. Nothing larger than the bias is ever held.
Registers: the sum, scores and dP, all [M, N].
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import intervals, rows_of
from attemper.backends.triton.softmax.gradient import known, score_slopes


# Specialised for its lengths: without that it spills registers on sm_80.
@triton.jit
def bias_gradient_kernel(
    query, key, value, upstream, multiplier, mask, first, bias_grad, rows, structure,
    heads, repeats, first_tokens, softcap, bias_heads, bias_rows, over_batches, over_heads, over_rows,
    LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
    SINK: tl.constexpr, MAXIMUM: tl.constexpr, POSITIONS: tl.constexpr, PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, ALL_ROWS: tl.constexpr,
):  # fmt: skip
    """``over_*``: how many batches, heads and blocks of rows one entry stands for; ``bias_*``: sizes of the bias."""
    key_blocks = tl.cdiv(structure.keys, BLOCK_N)
    program = tl.program_id(0)
    place = program % key_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    program = program // key_blocks
    row_blocks = 1 if ALL_ROWS else tl.cdiv(bias_rows, BLOCK_M)
    own_block = program % row_blocks
    own_head = program // row_blocks % bias_heads
    own_batch = program // row_blocks // bias_heads
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for number in range(over_batches * over_heads * over_rows):
        # Where the bias has one head, own_head is 0 and all heads are gone through; otherwise there is one, its own.
        batch = own_batch + number // over_rows // over_heads
        head = own_head + number // over_rows % over_heads
        begin = (own_block + number % over_rows) * BLOCK_M
        places = begin + tl.arange(0, BLOCK_M)
        exists = places < structure.rows
        row = tl.minimum(places, structure.rows - 1)
        low, high, diagonal, origin = intervals(row, structure, POSITIONS, PACKED, BOTTOM_RIGHT)
        high = tl.where(exists, high, 0)
        sees = (low < high) & (high > tl.min(place, 0)) & (low <= tl.max(place, 0))
        if tl.max(sees.to(tl.int32), 0) > 0:
            group = head // repeats
            at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places
            terms = known(rows, at_rows, exists, head, LETTERS, SINK, MAXIMUM)
            scale = tl.load(
                multiplier.pointer
                + batch.to(tl.int64) * multiplier.batch
                + head * multiplier.head
                + row * multiplier.row
            )
            q = rows_of(query, batch, head, row, BLOCK_D, D, WIDE, False, 0)
            keys = rows_of(key, batch, group, place, BLOCK_D, D, WIDE, True, structure.keys)
            above, values = q, keys
            if E > 0:
                above = rows_of(upstream, batch, head, row, BLOCK_E, E, WIDE, False, 0)
                values = rows_of(value, batch, group, place, BLOCK_E, E, WIDE, True, structure.keys)
            ds, _, _ = score_slopes(
                q, keys, above, values, scale, terms, low, high, diagonal, origin, row, place, batch, head,
                mask, first, structure, first_tokens, softcap,
                LETTERS, True, MASK, LIMIT, FIRST, SOFTCAP, SINK, MAXIMUM, E,
            )  # fmt: skip
            total += ds
    plane = own_batch.to(tl.int64) * bias_heads + own_head
    if ALL_ROWS:
        tl.store(bias_grad + plane * structure.keys + place, tl.sum(total, 0), mask=place < structure.keys)
    else:
        places = own_block * BLOCK_M + tl.arange(0, BLOCK_M)
        pointers = bias_grad + (plane * bias_rows + places)[:, None] * structure.keys + place[None, :]
        tl.store(pointers, total, mask=(places < bias_rows)[:, None] & (place < structure.keys)[None, :])
