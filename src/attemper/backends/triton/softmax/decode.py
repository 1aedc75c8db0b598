r"""Few queries over many keys (decoding): keys are split over programs, and the parts joined by the law of the state.

The split kernel: a program takes all rows of one key head, that is every query of every query head that shares it, and
one of the splits of the keys; it leaves what its rows carry (``softmax.nothing`` lists it) and its unnormalised output.
The join kernel: a program takes rows of any heads and joins their parts in the order of the keys: the same bits every
time. Each key and value is read once. Registers: query tile [M, D], O [M, E], scores [M, N], with M of 16 to 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.scores import LENGTHS, Strided, Structure, blocks, intervals
from attemper.backends.triton.softmax import state as softmax
from attemper.backends.triton.softmax.forward import _block

CARRIED = 13
"""Numbers that a row carries from one kernel to the other."""


# Parts, keys and the strides of masks grow while decoding: nothing is compiled for what divides them.
@triton.jit(do_not_specialize=[*LENGTHS, "splits", "mask_batch", "mask_head", "mask_row", "first_batch"])
def split_kernel(
    query, key, value, multiplier, mask, first, parts, outputs,
    mask_batch, mask_head, mask_row, first_batch,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    groups, repeats, splits, first_tokens, softcap,
    LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
    POSITIONS: tl.constexpr, PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    mask = Strided(mask.pointer, mask_batch, mask_head, mask_row, mask.column)
    first = Strided(first.pointer, first_batch, 0, 0, first.column)
    program = tl.program_id(0)
    split = program % splits
    group = (program // splits) % groups
    batch = program // splits // groups
    count = repeats * structure.rows
    place = tl.arange(0, BLOCK_M)
    # Rows past the end repeat the last one; what they find is not stored.
    taken = tl.minimum(place, count - 1)
    head = group * repeats + taken // structure.rows
    row = taken % structure.rows
    low, high, diagonal, origin = intervals(row, structure, POSITIONS, PACKED, BOTTOM_RIGHT)
    column = tl.arange(0, BLOCK_D)
    base = query.pointer + batch.to(tl.int64) * query.batch + head.to(tl.int64) * query.head
    base += row.to(tl.int64) * query.row
    q = tl.load(base[:, None] + column[None, :].to(tl.int64) * query.column, mask=(column < D)[None, :], other=0.0)
    scale = tl.load(
        multiplier.pointer + batch.to(tl.int64) * multiplier.batch + head * multiplier.head + row * multiplier.row
    )
    rows = softmax.nothing(BLOCK_M)
    best = tl.zeros([BLOCK_M], tl.int32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    start, _, inside_from, inside_to, edges = blocks(low, high, MASK, BLOCK_N)
    number = edges + (inside_to - inside_from) // BLOCK_N
    each = tl.cdiv(number, splits)
    first_limit = tl.max(origin, 0) + first_tokens
    for step in range(split * each, tl.minimum((split + 1) * each, number)):
        rows, out, best = _block(
            rows, out, best, q, scale, low, high, diagonal, origin, first_limit, row, start + step * BLOCK_N, batch,
            head[:, None], group, key, value, mask, first, structure, first_tokens, softcap,
            LETTERS, True, MASK, LIMIT, FIRST, SOFTCAP, False, D, BLOCK_D, E, BLOCK_E, BLOCK_N, WIDE,
        )  # fmt: skip
    exists = place < count
    at = (batch.to(tl.int64) * groups + group) * count + place
    plane = tl.num_programs(0).to(tl.int64) // splits * count
    left = parts + split.to(tl.int64) * 13 * plane + at
    for number in tl.static_range(13):
        tl.store(left + number * plane, rows[number].to(tl.float32), mask=exists)
    if E > 0:
        column = tl.arange(0, BLOCK_E)
        pointers = outputs + (split.to(tl.int64) * plane + at)[:, None] * E + column[None, :]
        tl.store(pointers, out, mask=exists[:, None] & (column < E)[None, :])


@triton.jit
def _carried(source, plane, exists):
    """What rows carry, as the split kernel left it."""
    m = tl.load(source, mask=exists, other=-float("inf"))
    z = tl.load(source + plane, mask=exists, other=0.0)
    zl = tl.load(source + 2 * plane, mask=exists, other=0.0)
    a = tl.load(source + 3 * plane, mask=exists, other=0.0)
    al = tl.load(source + 4 * plane, mask=exists, other=0.0)
    b = tl.load(source + 5 * plane, mask=exists, other=0.0)
    bl = tl.load(source + 6 * plane, mask=exists, other=0.0)
    c = tl.load(source + 7 * plane, mask=exists, other=0.0)
    cl = tl.load(source + 8 * plane, mask=exists, other=0.0)
    f = tl.load(source + 9 * plane, mask=exists, other=0.0)
    t = tl.load(source + 10 * plane, mask=exists, other=0.0)
    lowest = tl.load(source + 11 * plane, mask=exists, other=0.0)
    n = tl.load(source + 12 * plane, mask=exists, other=0.0)
    return m, z, zl, a, al, b, bl, c, cl, f, t, lowest, n.to(tl.int32)


@triton.jit(do_not_specialize=["splits"])
def join_kernel(
    parts, outputs, sink, output, state, total_rows, heads, queries, splits,
    LETTERS: tl.constexpr, SINK: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = place < total_rows
    plane = tl.cast(total_rows, tl.int64)
    column = tl.arange(0, BLOCK_E)
    written = exists[:, None] & (column < E)[None, :]
    rows = softmax.nothing(BLOCK_M)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for split in range(splits):
        at = tl.cast(split, tl.int64) * plane
        other = _carried(parts + 13 * at + place, plane, exists)
        if E > 0:
            more = tl.load(outputs + (at + place)[:, None] * E + column[None, :], mask=written, other=0.0)
            new = tl.maximum(rows[0], other[0])
            _, _, shrink = softmax.step(rows[0], new)
            _, _, fade = softmax.step(other[0], new)
            out = out * shrink[:, None] + more * fade[:, None]
        rows = softmax.joined(rows, other, LETTERS)
    left, total = softmax.finished(rows, LETTERS)
    softmax.stored(left, state + place, plane, exists, LETTERS)
    if E > 0:
        part = 1.0 / total
        if SINK:
            head = place // queries % heads
            part *= softmax.share(left[0] + left[1], tl.load(sink + head, mask=exists, other=0.0).to(tl.float32))
        target = output + place.to(tl.int64)[:, None] * E + column[None, :]
        tl.store(target, (out * part[:, None]).to(output.dtype.element_ty), mask=written)
