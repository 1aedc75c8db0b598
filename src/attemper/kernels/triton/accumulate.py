"""Statistics of one call added to a site's running sums, all on the device: nothing is read back, nothing waits.

Two kernels: the forward kernel without values leaves the state of the measured rows, then one program per head walks
over them in a fixed order and adds. Both return at once when the flag is down, so that a CUDA graph that was captured
once serves sampled steps and others. One program owns a head's sums: no atomics, the same bits every time.

``kernels/sums.py`` has the layout of the sums.

Registers: [M] rows in float64, [M, 32] while they are sorted into bins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.kernels.sums import BINNED, BINS, COLUMNS, FIELDS, WIDTH, empty_sums
from attemper.kernels.triton import softmax

__all__ = ["BINNED", "BINS", "COLUMNS", "FIELDS", "WIDTH", "accumulate_kernel", "empty_sums", "positions_kernel"]


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
def _binned(bin, value, counted):
    """Sums of ``value`` by bin, [32] float64."""
    place = tl.arange(0, 32)
    return tl.sum(tl.where((bin[:, None] == place[None, :]) & counted[:, None], value[:, None], 0.0), 0)


@triton.jit
def _plus(target, value):
    tl.store(target, tl.load(target) + value)


@triton.jit
def _sum_of(target, value, counted):
    _plus(target, tl.sum(tl.where(counted, value, 0.0), 0))


@triton.jit
def accumulate_kernel(
    state, included, sink, flag, sums, batches, heads, rows, first_tokens,
    INCLUDED: tl.constexpr, SINK: tl.constexpr, LETTERS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(flag) == 0:
        return
    head = tl.program_id(0)
    total = sums + head.to(tl.int64) * WIDTH
    plane = tl.cast(batches, tl.int64) * heads * rows
    place = tl.arange(0, 32)
    for number in range(batches * tl.cdiv(rows, BLOCK)):
        batch = number // tl.cdiv(rows, BLOCK)
        row = number % tl.cdiv(rows, BLOCK) * BLOCK + tl.arange(0, BLOCK)
        counted = row < rows
        if INCLUDED:
            at = included.pointer + batch * included.batch + row.to(tl.int64) * included.column
            counted = counted & (tl.load(at, mask=counted, other=0) != 0)
        source = state + (tl.cast(batch, tl.int64) * heads + head) * rows + row
        m, z, n, a, v, c, f, _ = softmax.loaded(source, plane, counted, LETTERS)
        seen = counted & (n > 0)
        lse = m + z
        finite = tl.abs(lse) < float("inf")
        valid = seen & finite
        two = valid & (n > 1)
        beyond = valid & (n > first_tokens)
        log_n = tl.log(tl.where(seen, n, 1.0).to(tl.float64))
        entropy = tl.minimum((z + a).to(tl.float64), log_n)
        normalized = tl.where(two, entropy / tl.where(two, log_n, 1.0), 0.0)
        mass = tl.zeros_like(z) + 1.0
        if SINK:
            mass = softmax.share(lse, tl.load(sink + head).to(tl.float32))
        _sum_of(total, 1.0 + 0.0 * entropy, valid)
        _sum_of(total + 1, (counted & (n == 0)).to(tl.float64), counted)
        _sum_of(total + 2, (seen & (finite == 0)).to(tl.float64), counted)
        tl.store(total + 3, tl.maximum(tl.load(total + 3), tl.max(tl.where(valid, m, -float("inf")), 0).to(tl.float64)))
        _sum_of(total + 4, entropy, valid)
        _sum_of(total + 5, normalized, two)
        _sum_of(total + 6, 1.0 / tl.where(valid, c, 1.0).to(tl.float64), valid)
        _sum_of(total + 7, softmax.exponential(-z).to(tl.float64), valid)
        _sum_of(total + 8, v.to(tl.float64), valid)
        _sum_of(total + 9, mass.to(tl.float64), valid)
        _sum_of(total + 10, f.to(tl.float64), beyond)
        _sum_of(total + 11, two.to(tl.float64), counted)
        _sum_of(total + 12, beyond.to(tl.float64), counted)
        one = tl.zeros_like(entropy) + 1.0
        share = tl.minimum(tl.maximum((normalized * 32).to(tl.int32), 0), 31)
        # n is a whole number in float32: its exponent is its bucket.
        bucket = tl.where(seen, (n.to(tl.int32, bitcast=True) >> 23) - 127, 0)
        bins = total + 13 + place
        _plus(bins, _binned(share, one, two))
        _plus(bins + 32, _binned(bucket, one, valid))
        _plus(bins + 64, _binned(bucket, entropy, valid))
        _plus(bins + 96, _binned(bucket, normalized, two))
        _plus(bins + 128, _binned(bucket, f.to(tl.float64), beyond))
