r"""Few queries over many keys (decoding): keys are split over programs, and the parts joined by the law of the state.

The split kernel: a program takes all rows of one key head, that is every query of every query head that shares it, and
one of the splits of the keys; it leaves what its rows carry (``softmax.nothing`` lists it) and its unnormalised output.
The join kernel: a program takes rows of any heads and joins their parts in the order of the keys: the same bits every
time. Each key and value is read once. Registers: query tile [M, D], O [M, E], scores [M, N], with M of 16 to 64.
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
    View,
    blocks,
    intervals,
    raw_unit,
    row_zeros,
    scale_of,
    tile_zeros,
)
from attemper.backends.triton.softmax import state as softmax
from attemper.backends.triton.softmax.forward import join_block
from attemper.backends.triton.softmax.state import OWN, SPAN

CARRIED = tl.constexpr(12)
"""Numbers that a row carries from one kernel to the other: ``softmax.nothing`` but for its last two."""
MARKED = tl.constexpr(OWN.value | SPAN.value)
"""Bits of STATE with which it carries these, too."""


def carried_numbers(bits: int) -> int:
    """Numbers that a row carries where STATE is ``bits``."""
    return CARRIED.value + (2 if MARKED.value & bits else 0)


# Parts, keys and the strides of masks grow while decoding: nothing is compiled for what divides them.
@triton.jit(do_not_specialize=[*LENGTHS, "splits", "mask_batch", "mask_head", "mask_row", "first_batch"])
def split_kernel(
    query, key, value, multiplier, mask, first, parts, outputs,
    mask_batch, mask_head, mask_row, first_batch,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    groups, repeats, splits, first_tokens, softcap, CALL: tl.constexpr,
):  # fmt: skip
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    mask = View(mask.pointer, mask_batch, mask_head, mask_row, mask.column)
    first = View(first.pointer, first_batch, 0, 0, first.column)
    call = Call(
        query, key, value, query, multiplier, mask, first, structure, groups * repeats, repeats, first_tokens, softcap
    )
    program = tl.program_id(0)
    split = program % splits
    group = (program // splits) % groups
    batch = program // splits // groups
    count = repeats * structure.rows
    place = tl.arange(0, CALL.BLOCK_M)
    # Rows past the end repeat the last one; what they find is not stored.
    taken = tl.minimum(place, count - 1)
    head = group * repeats + taken // structure.rows
    row = taken % structure.rows
    low, high, diagonal, origin = intervals(row, structure, CALL)
    column = tl.arange(0, CALL.BLOCK_D)
    base = query.pointer + batch.to(tl.int64) * query.batch + head.to(tl.int64) * query.head
    base += row.to(tl.int64) * query.row
    pointers = base[:, None] + column[None, :].to(tl.int64) * query.column
    q = tl.load(pointers, mask=(column < CALL.D)[None, :], other=0.0)
    scale = scale_of(call, batch, head, row)
    falling = tl.min(scale, 0) < 0
    tile = Tile(q, scale, low, high, diagonal, origin, row, batch, head[:, None], group)
    rows = softmax.nothing(CALL.BLOCK_M)
    best = row_zeros(CALL.BLOCK_M, tl.int32)
    out = tile_zeros(CALL.BLOCK_M, CALL.BLOCK_E, tl.float32)
    start, _, inside_from, inside_to, edges = blocks(low, high, CALL.MASK != VISIBLE, CALL.BLOCK_N)
    number = edges + (inside_to - inside_from) // CALL.BLOCK_N
    each = tl.cdiv(number, splits)
    first_limit = tl.max(origin, 0) + first_tokens
    for step in range(split * each, tl.minimum((split + 1) * each, number)):
        at = start + step * CALL.BLOCK_N
        rows, out, best = join_block(rows, out, best, tile, call, first_limit, falling, at, CALL, True, False)
    rows = softmax.in_nats(rows, raw_unit(tile, call, CALL))
    exists = place < count
    at = (batch.to(tl.int64) * groups + group) * count + place
    plane = tl.num_programs(0).to(tl.int64) // splits * count
    COUNT: tl.constexpr = CARRIED + 2 if MARKED & CALL.STATE else CARRIED
    left = parts + split.to(tl.int64) * COUNT * plane + at
    for number in tl.static_range(COUNT):
        tl.store(left + number * plane, rows[number].to(tl.float32), mask=exists)
    if CALL.E > 0:
        column = tl.arange(0, CALL.BLOCK_E)
        pointers = outputs + (split.to(tl.int64) * plane + at)[:, None] * CALL.E + column[None, :]
        tl.store(pointers, out, mask=exists[:, None] & (column < CALL.E)[None, :])


@triton.jit
def _carry(source, plane, exists, STATE: tl.constexpr):
    """What rows carry, as the split kernel left it: ``softmax.nothing``'s tuple."""
    sums = (tl.load(source, mask=exists, other=-float("inf")),)
    for number in tl.static_range(1, CARRIED - 1):
        sums = sums + (tl.load(source + number * plane, mask=exists, other=0.0),)
    count = tl.load(source + (CARRIED - 1) * plane, mask=exists, other=0.0)
    sums = sums + (count.to(tl.int32),)
    for number in tl.static_range(CARRIED, CARRIED + 2):
        if MARKED & STATE:
            sums = sums + (tl.load(source + number * plane, mask=exists, other=0.0),)
        else:
            sums = sums + (0.0 * count,)
    return sums


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    parts, outputs, sink, output, state, total_rows, heads, queries, splits, CALL: tl.constexpr, ROWS: tl.constexpr
):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = place < total_rows
    plane = tl.cast(total_rows, tl.int64)
    column = tl.arange(0, CALL.BLOCK_E)
    written = exists[:, None] & (column < CALL.E)[None, :]
    rows = softmax.nothing(ROWS)
    out = tile_zeros(ROWS, CALL.BLOCK_E, tl.float32)
    COUNT: tl.constexpr = CARRIED + 2 if MARKED & CALL.STATE else CARRIED
    for split in range(splits):
        at = tl.cast(split, tl.int64) * plane
        other = _carry(parts + COUNT * at + place, plane, exists, CALL.STATE)
        if CALL.E > 0:
            more = tl.load(outputs + (at + place)[:, None] * CALL.E + column[None, :], mask=written, other=0.0)
            new = tl.maximum(rows[0], other[0])
            _, _, shrink = softmax.step(rows[0], new, softmax.LOG2E)
            _, _, fade = softmax.step(other[0], new, softmax.LOG2E)
            out = out * shrink[:, None] + more * fade[:, None]
        rows = softmax.join(rows, other, CALL.STATE)
    left, total = softmax.finish(rows, CALL.STATE)
    softmax.store(left, state + place, plane, exists, CALL.STATE)
    if CALL.E > 0:
        part = 1.0 / total
        if CALL.SINK:
            head = place // queries % heads
            part *= softmax.share(left[0] + left[1], tl.load(sink + head, mask=exists, other=0.0).to(tl.float32))
        target = output + place.to(tl.int64)[:, None] * CALL.E + column[None, :]
        tl.store(target, (out * part[:, None]).to(output.dtype.element_ty), mask=written)
