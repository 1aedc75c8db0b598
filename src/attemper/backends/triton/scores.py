"""Scores of a tile: where its rows see keys, the product, softcap, bias and masks. Shared by every Triton kernel.

Every structural rule (causality, window, documents, the end of the keys) is one thing here: an interval of keys
``low <= key < high`` per row. Blocks of keys outside all intervals of a tile are never visited; blocks inside all of
them are computed without a mask; only the blocks at the edges compare. Bool masks and biases are looked at block by
block, and a block that a bool mask hides wholly costs no product.

Registers: query tile [M, D], multipliers and intervals [M]. Shared memory: the key tile [N, D], several stages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

VISIBLE, BOOL, BIAS = (tl.constexpr(kind) for kind in (0, 1, 2))
"""What stands in for a mask: nothing, bool, an additive bias."""

FIRST_MARK, SPAN_MARK = tl.constexpr(1), tl.constexpr(2)
"""Bits of a key's mark: it is a first token, it is in the span that the caller marks."""

VANISHED = tl.constexpr(-1000.0)
"""exp(VANISHED) is 0: a masked key's distance from the maximum, finite so that 0 times it is 0."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, which multiplies matrices of bfloat16 as if they were integers."""


class View(NamedTuple):
    """A tensor as kernels take it: up to four dimensions, stride 0 where one is broadcast."""

    pointer: Any
    batch: int = 0
    head: int = 0
    row: int = 0
    column: int = 0


class Structure(NamedTuple):
    """Where rows see keys. ``positions``, ``starts_q`` and ``starts_k`` are read only if their constexpr says so."""

    rows: int
    keys: int
    left: int
    right: int
    offset: int
    positions: Any
    starts_q: Any
    starts_k: Any
    documents: int
    steps: int
    """Halvings that find a document among all."""


class Tile(NamedTuple):
    """M rows of a head, and where they see keys."""

    query: Any
    scale: Any
    low: Any
    high: Any
    diagonal: Any
    origin: Any
    row: Any
    batch: Any
    head: Any
    group: Any


class Call(NamedTuple):
    """``call`` in every kernel: its tensors as ``View``, where rows see keys, and its numbers."""

    query: Any
    key: Any
    value: Any
    upstream: Any
    """The gradient of the output; any tensor in the forward pass."""
    multiplier: Any
    mask: Any
    first: Any
    """Marks of keys, uint8: bits of ``FIRST_MARK`` and ``SPAN_MARK``."""
    structure: Any
    heads: Any
    repeats: Any
    """Query heads per key head."""
    first_tokens: Any
    softcap: Any


class Constants(NamedTuple):
    """``CALL`` in every kernel: what it is compiled for. The features of the call, its sizes, and how it is cut."""

    STATE: int
    MASK: int
    LIMIT: float
    FIRST: bool
    SOFTCAP: bool
    SINK: bool
    MAXIMUM: bool
    POSITIONS: bool
    PACKED: bool
    BOTTOM_RIGHT: bool
    D: int
    BLOCK_D: int
    E: int
    BLOCK_E: int
    BLOCK_M: int
    BLOCK_N: int
    WIDE: bool
    NORMALIZER: int = 0
    """Rowwise only: which normalizer, and whether the weights of sigmoid are relative to the largest."""
    RELATIVE: bool = False


LENGTHS = ("row_count", "key_count", "left", "right", "offset", "documents", "steps")
"""The numbers of ``Structure`` as kernels take them: one by one, for those of a tuple are always specialised, and a kernel
that is specialised for what divides a length is compiled anew in the midst of decoding."""


@triton.jit
def row_zeros(ROWS: tl.constexpr, TYPE: tl.constexpr):
    """Zeros, one a row. A field of a call inside of a list is no constant to Triton 3.6: as an argument it is."""
    return tl.zeros([ROWS], TYPE)


@triton.jit
def tile_zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """Zeros of a whole block."""
    return tl.zeros([ROWS, COLUMNS], TYPE)


@triton.jit
def document_of(row, starts, documents, steps):
    """The document that each row stands in, [M]: the number of documents that end at or before it."""
    low = tl.zeros_like(row)
    high = low + documents
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        ended = tl.load(starts + middle + 1, mask=open_, other=0).to(tl.int32) <= row
        low = tl.where(open_ & ended, middle + 1, low)
        high = tl.where(open_ & (ended == 0), middle, high)
    return low


@triton.jit
def intervals(row, structure, CALL: tl.constexpr):
    """Of every row: the keys it may see, ``low <= key < high``, its diagonal key, and its sequence's first key."""
    first = tl.zeros_like(row)
    end = first + structure.keys
    if CALL.PACKED:
        document = document_of(row, structure.starts_q, structure.documents, structure.steps)
        inside = document < structure.documents
        begun = tl.load(structure.starts_q + document, mask=inside, other=0).to(tl.int32)
        first = tl.load(structure.starts_k + document, mask=inside, other=0).to(tl.int32)
        end = tl.load(structure.starts_k + document + 1, mask=inside, other=0).to(tl.int32)
        diagonal = first + row - begun
        if CALL.POSITIONS:
            diagonal = first + tl.load(structure.positions + row).to(tl.int32)
        if CALL.BOTTOM_RIGHT:
            over = tl.load(structure.starts_q + document + 1, mask=inside, other=0).to(tl.int32)
            diagonal += (end - first) - (over - begun)
    else:
        diagonal = row
        if CALL.POSITIONS:
            diagonal = tl.load(structure.positions + row).to(tl.int32)
        diagonal += structure.offset
    low = tl.maximum(diagonal - structure.left, first)
    high = tl.minimum(diagonal + structure.right + 1, end)
    return low, high, diagonal, first


@triton.jit
def blocks(low, high, MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of keys of a tile: (start, edges before, inside from, inside to, number of edge blocks).

    Edge blocks are those that some row sees in part; they come first, then those that every row sees whole. MASKED: all
    blocks count as edges, for each must look.
    """
    empty = low >= high
    start = tl.min(tl.where(empty, 2147483647, low), 0)
    end = tl.max(tl.where(empty, 0, high), 0)
    start = tl.minimum(start, end) // BLOCK_N * BLOCK_N
    last = tl.cdiv(end, BLOCK_N) * BLOCK_N
    inside_from = last
    inside_to = last
    if not MASKED:
        inside_from = tl.maximum(tl.minimum(tl.cdiv(tl.max(low, 0), BLOCK_N) * BLOCK_N, last), start)
        inside_to = tl.maximum(tl.minimum(tl.min(high, 0) // BLOCK_N * BLOCK_N, last), inside_from)
    before = (inside_from - start) // BLOCK_N
    edges = before + (last - inside_to) // BLOCK_N
    return start, before, inside_from, inside_to, edges


@triton.jit
def edge_start(number, start, before, inside_to, BLOCK_N: tl.constexpr):
    """Where the edge block of this number begins."""
    return tl.where(number < before, start + number * BLOCK_N, inside_to + (number - before) * BLOCK_N)


@triton.jit
def block_of(matrix, batch, head, begin, local, D: tl.constexpr, CALL: tl.constexpr, COUNT: tl.constexpr, count):
    """The rows ``begin + local`` of [B, H, *, D] at (batch, head), [len(local), D or more]; columns past D are 0.

    64 bits carry the beginning, 32 bits what is inside the block, unless CALL.WIDE.
    ``COUNT``: rows at or past ``count`` do not exist and read as 0.
    """
    BLOCK_D: tl.constexpr = CALL.BLOCK_D if D == CALL.D else CALL.BLOCK_E
    base = matrix.pointer + batch.to(tl.int64) * matrix.batch + head.to(tl.int64) * matrix.head
    base += tl.cast(begin, tl.int64) * matrix.row
    column = tl.arange(0, BLOCK_D)
    if CALL.WIDE:
        pointers = base + local[:, None].to(tl.int64) * matrix.row + column[None, :].to(tl.int64) * matrix.column
    else:
        pointers = base + local[:, None] * matrix.row + column[None, :] * matrix.column
    if COUNT:
        return tl.load(pointers, mask=(column < D)[None, :] & (begin + local < count)[:, None], other=0.0)
    if D == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=(column < D)[None, :], other=0.0)


@triton.jit
def rows_of(matrix, batch, head, index, D: tl.constexpr, CALL: tl.constexpr, COUNT: tl.constexpr, count):
    """``block_of`` for rows whose beginning is not known: it has to be found, across the warps of a program."""
    begin = tl.min(index, 0)
    return block_of(matrix, batch, head, begin, index - begin, D, CALL, COUNT, count)


@triton.jit
def scale_of(call, batch, head, row):
    """scale / T of rows of a head, [M]."""
    multiplier = call.multiplier
    base = multiplier.pointer + batch.to(tl.int64) * multiplier.batch + head * multiplier.head
    return tl.load(base + row * multiplier.row)


@triton.jit
def tile_of(call, row, batch, head, read, CALL: tl.constexpr, EDGE: tl.constexpr):
    """The rows ``row`` [M] of a head; EDGE: those whose ``read`` is past the end read as 0 and see nothing."""
    count = call.structure.rows
    low, high, diagonal, origin = intervals(row, call.structure, CALL)
    if EDGE:
        high = tl.where(read < count, high, 0)
    q = rows_of(call.query, batch, head, read, CALL.D, CALL, EDGE, count)
    scale = scale_of(call, batch, head, row)
    return Tile(q, scale, low, high, diagonal, origin, row, batch, head, head // call.repeats)


@triton.jit
def visibility(tile, place, call, CALL: tl.constexpr):
    """Which of the keys each row sees, [M, N], and the bias [M, N] where there is one (0 where hidden)."""
    visible = (place[None, :] >= tile.low[:, None]) & (place[None, :] < tile.high[:, None])
    bias = 0.0
    if CALL.MASK != VISIBLE:
        mask = call.mask
        base = mask.pointer + tile.batch.to(tl.int64) * mask.batch + tile.head.to(tl.int64) * mask.head
        pointers = base + tile.row[:, None].to(tl.int64) * mask.row + place[None, :].to(tl.int64) * mask.column
        # Past the last key there is no mask to read; elsewhere hidden keys are not read either.
        given = tl.load(pointers, mask=visible, other=0)
        if CALL.MASK == BOOL:
            visible = visible & (given != 0)
        else:
            if given.dtype != tl.float64:
                given = given.to(tl.float32)
            visible = visible & ((given <= CALL.LIMIT) == 0)
            if given.dtype == tl.float64:
                # A float64 bias beyond float32 stays a bias: its key is visible, with no weight. Half of float32's range
                # leaves room for its distance in bits.
                given = tl.where(given < -1.7e38, -1.7e38, given).to(tl.float32)
            bias = tl.where(visible, given, 0.0)
    return visible, bias


@triton.jit
def any_of(condition):
    """Whether it holds anywhere in [M, N], int32."""
    return tl.max(tl.max(condition.to(tl.int32), 1), 0)


@triton.jit
def first_of(tile, place, call, CALL: tl.constexpr):
    """Which keys are first tokens, [M or 1, N] bool."""
    if CALL.FIRST:
        source = call.first.pointer + tile.batch.to(tl.int64) * call.first.batch
        marked = tl.load(source + place.to(tl.int64) * call.first.column, mask=place < call.structure.keys, other=0)
        found = ((marked & FIRST_MARK) != 0)[None, :]
    else:
        found = place[None, :] - tile.origin[:, None] < call.first_tokens
    return found  # at one place: compiled, a function has one type of result


@triton.jit
def span_of(tile, place, call):
    """Which keys the caller marks, [1, N] bool."""
    source = call.first.pointer + tile.batch.to(tl.int64) * call.first.batch
    marked = tl.load(source + place.to(tl.int64) * call.first.column, mask=place < call.structure.keys, other=0)
    return ((marked & SPAN_MARK) != 0)[None, :]


@triton.jit
def own_of(tile, place):
    """Which key is the query's own, [M, N] bool; also in the document before, whose keys the row does not see."""
    return tile.diagonal[:, None] == place[None, :]


@triton.jit
def distance_of(tile, place):
    """abs(position of query - position of key), [M, N]."""
    return tl.abs(tile.diagonal[:, None] - place[None, :]).to(tl.float32)


@triton.jit
def tanh(x):
    """tanh to 3 units in the last place: a polynomial of x^2 near 0, where 1 - 2 / (exp(2x) + 1) would cancel."""
    size = tl.abs(x)
    z = x * x
    series = z * (0.13332924 + z * (-0.053875137 + z * (0.021116214 + z * -0.0062763877)))
    near = x + x * z * (-0.3333333 + series)
    # Beyond 20 the result is 1; the cut keeps the exponential finite. NaN passes through ``near``.
    far = 1.0 - 2.0 / (tl.exp2(tl.minimum(size, 20.0) * 2.8853900817779268) + 1.0)
    return tl.where(size > 0.6, tl.where(x < 0, -far, far), near)


@triton.jit
def product(a, b, total):
    """``total + a b`` in float32, exact products: float32 as it is (ieee), never as TF32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def raw_scores(tile, block, call, falling, CALL: tl.constexpr):
    """Scores [M, N] before what multiplies a whole row, which is ``raw_unit``; without bias and masks.

    ``falling``: whether some row's scale is negative. Raw scores rise as scores do, so they are turned there: not the
    queries, which matrix units read from shared memory as they were loaded.
    """
    x = product(tile.query, tl.trans(block), tl.zeros([tile.query.shape[0], block.shape[0]], tl.float32))
    if not CALL.SOFTCAP and CALL.MASK != BIAS and falling:
        x = tl.where((tile.scale < 0)[:, None], -x, x)
    if CALL.SOFTCAP:
        x = tanh(x * tile.scale[:, None] / call.softcap)
        if CALL.MASK == BIAS:
            x = x * call.softcap
    elif CALL.MASK == BIAS:
        x = x * tile.scale[:, None]
    return x


@triton.jit
def raw_unit(tile, call, CALL: tl.constexpr):
    """What a raw score of 1 is in nats, [M], at least 0: 1 where a bias is added to it, else the softcap, else scale / T."""
    unit = tl.abs(tile.scale)
    if CALL.MASK == BIAS:
        unit = tile.scale * 0.0 + 1.0
    elif CALL.SOFTCAP:
        unit = tile.scale * 0.0 + call.softcap
    return unit


@triton.jit
def scores(tile, block, call, CALL: tl.constexpr):
    """``softcap(multiplier q.k)`` [M, N] in float32, before bias and masks, and the softcap's gradient (1 without)."""
    x = product(tile.query, tl.trans(block), tl.zeros([tile.query.shape[0], block.shape[0]], tl.float32))
    x = x * tile.scale[:, None]
    gradient = 1.0
    if CALL.SOFTCAP:
        bent = tanh(x / call.softcap)
        x = bent * call.softcap
        gradient = 1.0 - bent * bent
    return x, gradient
