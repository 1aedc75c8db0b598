"""Statistics of one call added to a site's running sums, all on the device: nothing is read back, nothing waits.

Three kernels: the forward kernel without values leaves the state of the measured rows; a program of the second takes a
chunk of the rows of one head, carries its sums in registers and writes them once; the third adds the chunks of each
head to the site's sums, in their order. All return at once when the flag is down, so that a CUDA graph that was
captured once serves sampled steps and others. How rows are cut follows from shapes alone, and there are no atomics: the
same bits every time.

``backends/sums.py`` has the layout of the sums.

Registers: twelve sums and a maximum of [M] rows and five of [32] bins, in float64; [M, 32] while rows are sorted into bins.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from attemper.backends.sums import BINNED, BINS, COLUMNS, SUMMED, WIDTH, empty_sums
from attemper.backends.triton.scores import View
from attemper.backends.triton.softmax import state as softmax

__all__ = ["BINNED", "BINS", "COLUMNS", "SUMMED", "WIDTH", "add", "empty_sums", "positions_kernel"]

PROGRAMS = 1024
"""Chunks in all heads, at most: some for every processor of the largest machines."""

BLOCK = 128
"""Rows that a program takes at a time."""

SINGLE, MAXIMUM = tl.constexpr(len(COLUMNS)), tl.constexpr(COLUMNS.index("max_logit"))


@triton.jit
def positions_kernel(start, positions, flag, rows, queries, BLOCK: tl.constexpr):
    """Evenly strided rows from a start in [0, 1) on the device: floor((start + i) * (queries / rows)), in float64."""
    if tl.load(flag) == 0:
        return
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float64)
    row = ((tl.load(start) + place.to(tl.float64)) * ((zero + queries) / (zero + rows))).to(tl.int32)
    tl.store(positions + place, tl.minimum(row, queries - 1), mask=place < rows)


@triton.jit
def _sums_by_bin(bin, value, counted):
    """Sums of ``value`` by bin, [32] float64."""
    place = tl.arange(0, 32)
    return tl.sum(tl.where((bin[:, None] == place[None, :]) & counted[:, None], value[:, None], 0.0), 0)


@triton.jit
def _number(condition):
    return condition.to(tl.float64)


@triton.jit
def _of(value, counted):
    return tl.where(counted, value.to(tl.float64), 0.0)


@triton.jit
def _add(single, bins, m, z, n, a, v, c, f, counted, mass, first_tokens):
    """``single``, a tuple of [M] in the order of ``COLUMNS``, and ``bins``, one of [32], with these rows added."""
    seen = counted & (n > 0)
    finite = tl.abs(m + z) < float("inf")
    valid = seen & finite
    two = valid & (n > 1)
    beyond = valid & (n > first_tokens)
    log_n = tl.log(tl.where(seen, n, 1.0).to(tl.float64))
    entropy = tl.minimum((z + a).to(tl.float64), log_n)
    normalized = tl.where(two, entropy / tl.where(two, log_n, 1.0), 0.0)
    single = (
        single[0] + _number(valid),
        single[1] + _number(counted & (n == 0)),
        single[2] + _number(seen & (finite == 0)),
        tl.maximum(single[3], tl.where(valid, m, -float("inf")).to(tl.float64)),
        single[4] + _of(entropy, valid),
        single[5] + _of(normalized, two),
        single[6] + _of(1.0 / tl.where(valid, c, 1.0).to(tl.float64), valid),
        single[7] + _of(softmax.exponential(-z), valid),
        single[8] + _of(v, valid),
        single[9] + _of(mass, valid),
        single[10] + _of(f, beyond),
        single[11] + _number(two),
        single[12] + _number(beyond),
    )
    share = tl.minimum(tl.maximum((normalized * 32).to(tl.int32), 0), 31)
    # n is a whole number in float32: its exponent is its bucket.
    bucket = tl.where(seen, (n.to(tl.int32, bitcast=True) >> 23) - 127, 0)
    one = tl.zeros_like(entropy) + 1.0
    bins = (
        bins[0] + _sums_by_bin(share, one, two),
        bins[1] + _sums_by_bin(bucket, one, valid),
        bins[2] + _sums_by_bin(bucket, entropy, valid),
        bins[3] + _sums_by_bin(bucket, normalized, two),
        bins[4] + _sums_by_bin(bucket, f.to(tl.float64), beyond),
    )
    return single, bins


# Numbers of rows differ from call to call: kernels that differ by what divides them would be compiled again and again.
@triton.jit(do_not_specialize=["batches", "rows", "chunks"])
def chunk_sums_kernel(
    state, included, sink, flag, partial, batches, heads, rows, chunks, first_tokens,
    INCLUDED: tl.constexpr, SINK: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of one chunk of the rows of one head, to ``partial`` [chunks, heads, WIDTH]."""
    if tl.load(flag) == 0:
        return
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    plane = tl.cast(batches, tl.int64) * heads * rows
    blocks = tl.cdiv(rows, BLOCK)
    each = tl.cdiv(batches * blocks, chunks)
    none, empty = tl.zeros([BLOCK], tl.float64), tl.zeros([32], tl.float64)
    single = (none, none, none, none - float("inf"), none, none, none, none, none, none, none, none, none)
    bins = (empty, empty, empty, empty, empty)
    for number in range(chunk * each, tl.minimum((chunk + 1) * each, batches * blocks)):
        batch = number // blocks
        row = number % blocks * BLOCK + tl.arange(0, BLOCK)
        counted = row < rows
        if INCLUDED:
            at = included.pointer + batch * included.batch + row.to(tl.int64) * included.column
            counted = counted & (tl.load(at, mask=counted, other=0) != 0)
        source = state + (tl.cast(batch, tl.int64) * heads + head) * rows + row
        m, z, n, a, v, c, f, _, _, _ = softmax.load(source, plane, counted, STATE)
        mass = tl.zeros_like(z) + 1.0
        if SINK:
            mass = softmax.share(m + z, tl.load(sink + head).to(tl.float32))
        single, bins = _add(single, bins, m, z, n, a, v, c, f, counted, mass, first_tokens)
    target = partial + (chunk.to(tl.int64) * heads + head) * WIDTH
    for column in tl.static_range(SINGLE):
        if column == MAXIMUM:
            tl.store(target + column, tl.max(single[column], 0))
        else:
            tl.store(target + column, tl.sum(single[column], 0))
    for group in tl.static_range(5):
        tl.store(target + SINGLE + group * 32 + tl.arange(0, 32), bins[group])


@triton.jit(do_not_specialize=["chunks"])
def accumulate_kernel(
    partial, flag, sums, heads, chunks, WIDTH: tl.constexpr, COLUMNS_BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):
    """Adds the chunks of one head to its ``sums``, TOGETHER at a time."""
    if tl.load(flag) == 0:
        return
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS_BLOCK)
    inside = column < WIDTH
    total = tl.load(sums + head * WIDTH + column, mask=inside, other=0.0)
    greatest = total
    for begin in range(0, chunks, TOGETHER):
        chunk = begin + tl.arange(0, TOGETHER)
        there = (chunk < chunks)[:, None] & inside[None, :]
        source = partial + (chunk.to(tl.int64) * heads + head)[:, None] * WIDTH + column[None, :]
        more = tl.load(source, mask=there, other=0.0)
        total += tl.sum(more, 0)
        greatest = tl.maximum(greatest, tl.max(tl.where(there, more, -float("inf")), 0))
    tl.store(sums + head * WIDTH + column, tl.where(column == MAXIMUM, greatest, total), mask=inside)


def add(
    state: Tensor, included: Any, sink: Tensor | None, flag: Tensor, sums: Tensor, first_tokens: int, bits: int
) -> None:
    """Adds the rows of ``state`` [F, B, H, R] to ``sums`` [H, WIDTH]; ``included``: which count, as ``View``, or None."""
    _, batch, heads, rows = state.shape
    chunks = min(batch * -(-rows // BLOCK), max(1, PROGRAMS // heads))
    partial = state.new_empty((chunks, heads, WIDTH), dtype=sums.dtype)
    chunk_sums_kernel[(heads, chunks)](
        state,
        View(state) if included is None else included,
        state if sink is None else sink,
        flag,
        partial,
        batch,
        heads,
        rows,
        chunks,
        first_tokens,
        INCLUDED=included is not None,
        SINK=sink is not None,
        STATE=bits,
        WIDTH=WIDTH,
        BLOCK=BLOCK,
        enable_fp_fusion=False,
    )
    accumulate_kernel[(heads,)](
        partial, flag, sums, heads, chunks, WIDTH=WIDTH, COLUMNS_BLOCK=256, TOGETHER=8, enable_fp_fusion=False
    )
