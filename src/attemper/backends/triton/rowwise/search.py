r"""What a normalizer finds on a row, x, by going over the blocks of keys: a bounded number of times, until every row has it.

- Entmax family: the largest weight pi in [1/n, 1]. Sum w = pi Omega(pi) grows with pi, and for e <= 1 it is convex:
  Newton's iteration from pi = 1 falls to the root and never crosses it. For e > 1 the derivative has no bound: a bracket is kept,
  and halved wherever Newton's step leaves it, and every fourth time. Where no float32 is near enough it is the end whose
  sum is nearer to 1.
- Top-k: the k-th largest score, as the bits of m - s, which ascend with it as integers. Three pivots at a time (the middle of
  the bits, the middle of the values, and where the counts point), until one splits off exactly k keys or two neighbours are
  left: 31 times at most. Of ties the first ones count: ``first_without``.
- Threshold: the least exp(d) that stays, min_weight Z.

Weights only shrink while pi falls from 1, so a block in which no row has weight leaves the list for good.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.normalizers import (
    EVERY,
    LARGEST,
    MIN_WEIGHT_SLACK,
    THRESHOLD,
    TOPK,
    growth,
    parameters,
    shares,
)
from attemper.backends.triton.rowwise.tiles import below, scores_at
from attemper.backends.triton.scores import any_of, row_zeros
from attemper.backends.triton.softmax.state import add, exponential

CLOSE = tl.constexpr(1e-6)
"""Of the sum of weights to 1: the step that follows leaves an error of its square."""
ENOUGH = tl.constexpr(5e-7)
"""Where no step follows: the weights are divided by their sum."""
SWEEPS = tl.constexpr(100)
"""More than any row needs."""
UNSEEN = tl.constexpr(0x7F800000)
"""The bits of infinity: hidden keys."""


@triton.jit
def bounds_of_nothing(BLOCK_M: tl.constexpr):
    """``(m, lowest, n, bad)`` of rows without keys."""
    zero = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    return zero - float("inf"), zero + float("inf"), count, count


@triton.jit
def widen(bounds, s, visible):
    """``bounds`` with a block: greatest and least visible score, visible keys, visible scores that are not finite."""
    m, lowest, n, bad = bounds
    finite = tl.abs(s) < float("inf")
    known = visible & finite
    return (
        tl.maximum(m, tl.max(tl.where(known, s, -float("inf")), 1)),
        tl.minimum(lowest, tl.min(tl.where(known, s, float("inf")), 1)),
        n + tl.sum(visible.to(tl.int32), 1),
        bad + tl.sum((visible & (finite == 0)).to(tl.int32), 1),
    )


@triton.jit
def survey(tile, call, start, number, listed, CALL: tl.constexpr):
    """The bounds of the rows over ``number`` blocks from ``start`` on, and how many blocks some row sees, now ``listed``."""
    bounds = bounds_of_nothing(CALL.BLOCK_M)
    count = 0
    for block in range(number):
        at = start + block * CALL.BLOCK_N
        s, visible, _, _, _ = scores_at(tile, call, at, CALL)
        bounds = widen(bounds, s, visible)
        tl.store(listed + count, at)
        count += any_of(visible)
    tl.debug_barrier()
    return bounds, count


@triton.jit
def find(tile, call, bounds, number, listed, count, CALL: tl.constexpr):
    """``(x, limit, count)``: what the normalizer finds on each row, the first key whose tie does not count (top-k), and
    how many blocks are still listed."""
    m, _, n, bad = bounds
    limit = row_zeros(CALL.BLOCK_M, tl.int32) + EVERY
    if CALL.NORMALIZER == TOPK:
        x, room = _kth(tile, call, bounds, number, listed, count, CALL)
        if tl.max((room < EVERY).to(tl.int32), 0) > 0:
            limit = first_without(tile, call, m, x, room, listed, count, CALL)
    elif CALL.NORMALIZER == THRESHOLD:
        x, count = _least(tile, call, m, number, listed, count, CALL)
    else:
        x, count = _largest_weight(tile, call, m, n, bad, number, listed, count, CALL)
    return x, limit, count


@triton.jit
def _largest_weight(tile, call, m, n, bad, number, listed, count, CALL: tl.constexpr):
    """pi of each row, and how many blocks are left in the list."""
    none = row_zeros(CALL.BLOCK_M, tl.int32)
    pi = row_zeros(CALL.BLOCK_M, tl.float32) + 1.0
    low, high = 1.0 / tl.maximum(n, 1).to(tl.float32), pi
    short, over = -pi, pi * LARGEST
    done = (n < 2) | (bad > 0)
    steep = number > 1.0
    sweep = 0
    while (tl.min(done.to(tl.int32), 0) == 0) & (sweep < SWEEPS):
        first, second = parameters(pi, m, none, number, CALL, True)
        z, zl, rate = 0.0 * pi, 0.0 * pi, 0.0 * pi
        left = 0
        for block in range(count):
            at = tl.load(listed + block)
            s, visible, place, _, _ = scores_at(tile, call, at, CALL)
            omega, logs = shares(s, below(s, visible, m), visible, place, first, second, number, CALL, False, True)
            z, zl = add(z, zl, tl.sum(omega, 1))
            rate += tl.sum(growth(omega, logs, number, CALL), 1)
            tl.store(listed + left, at)
            wanted = any_of(omega > 0)
            if steep:
                # From below the root nothing can be said of what is above it, and pi = 1 is the only sure place there.
                wanted = tl.where(sweep > 0, 1, wanted)
            left += wanted
        count = left
        excess = (pi * z - 1.0) + pi * zl
        low, high = tl.where(excess < 0, pi, low), tl.where(excess < 0, high, pi)
        short, over = tl.where(excess < 0, excess, short), tl.where(excess < 0, over, excess)
        after = pi - excess / tl.maximum(rate, 1.0)
        if steep:
            outside = (after <= low) | (after >= high) | (sweep % 4 == 3)
            after = tl.where(outside, tl.sqrt(low * high), after)
            narrow = high - low <= 2.4e-7 * high
            last = (tl.abs(excess) <= ENOUGH) | narrow
            nearer = tl.where(over < -short, high, low)
            after = tl.where(tl.abs(excess) <= ENOUGH, pi, tl.where(narrow, nearer, after))
        else:
            after = tl.minimum(tl.maximum(after, low), 1.0)
            last = (excess <= CLOSE) | (after >= pi)
        pi = tl.where(done, pi, after)
        done = done | last
        sweep += 1
        tl.debug_barrier()
    return pi, count


@triton.jit
def _least(tile, call, m, min_weight, listed, count, CALL: tl.constexpr):
    """The least exp(d) that stays on each row: min_weight Z, and never more than the largest."""
    total, low = row_zeros(CALL.BLOCK_M, tl.float32), row_zeros(CALL.BLOCK_M, tl.float32)
    left = 0
    for block in range(count):
        at = tl.load(listed + block)
        s, visible, _, _, _ = scores_at(tile, call, at, CALL)
        e = exponential(below(s, visible, m))
        total, low = add(total, low, tl.sum(e, 1))
        tl.store(listed + left, at)
        # Z is at least 1.
        left += any_of(visible & (e >= min_weight * MIN_WEIGHT_SLACK))
    tl.debug_barrier()
    return tl.minimum(min_weight * (total + low) * MIN_WEIGHT_SLACK, 1.0), left


@triton.jit
def _bits(value):
    """The bits of a float32 that is not negative, as an integer: it ascends with the value."""
    return tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def _value(bits):
    return tl.maximum(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def _pivots(low, high, count_low, count_high, k):
    """Three places strictly between ``low`` and ``high``, where there are any: by bits, by values, by counts."""
    near, far = _value(low), _value(high)
    part = (k - count_low).to(tl.float32) / tl.maximum(count_high - count_low, 1).to(tl.float32)
    by_value = _bits(near + (far - near) * 0.5)
    by_count = _bits(near + (far - near) * part)
    least, most = low + 1, tl.maximum(high - 1, low + 1)
    return (
        low + (high - low) // 2,
        tl.minimum(tl.maximum(by_value, least), most),
        tl.minimum(tl.maximum(by_count, least), most),
    )


@triton.jit
def _narrow(pivot, count, low, high, count_low, count_high, k, open_):
    """The bracket after so many keys were counted up to a pivot."""
    enough = open_ & (count >= k) & (pivot < high)
    short = open_ & (count < k) & (pivot > low)
    low, count_low = tl.where(short, pivot, low), tl.where(short, count, count_low)
    return low, tl.where(enough, pivot, high), count_low, tl.where(enough, count, count_high)


@triton.jit
def _kth(tile, call, bounds, number, listed, count, CALL: tl.constexpr):
    """x with exactly k keys of d >= x, or with d = x where the k-th ties: then how many of those count (EVERY elsewhere)."""
    m, lowest, n, bad = bounds
    k = tl.minimum(n, tl.minimum(number, 1e9).to(tl.int32))
    seen = (n > 0) & (m - lowest < float("inf"))
    low = row_zeros(CALL.BLOCK_M, tl.int32) - 1
    # A key may be so far below that the distance is cut there, in ``below``, too.
    high = tl.where(seen, _bits(tl.maximum(tl.where(seen, lowest - m, 0.0), -1e18)), _bits(0.0 * m + 1e18))
    high = tl.where(n > 0, high, 0)
    count_low, count_high = low + 1, n
    open_ = (count_high > k) & (high - low > 1) & (bad == 0)
    while tl.max(open_.to(tl.int32), 0) > 0:
        first, second, third = _pivots(low, high, count_low, count_high, k)
        one, two, three = low * 0, low * 0, low * 0
        for block in range(count):
            at = tl.load(listed + block)
            s, visible, _, _, _ = scores_at(tile, call, at, CALL)
            bits = tl.where(visible, _bits(below(s, visible, m)), UNSEEN)
            one += tl.sum((bits <= first[:, None]).to(tl.int32), 1)
            two += tl.sum((bits <= second[:, None]).to(tl.int32), 1)
            three += tl.sum((bits <= third[:, None]).to(tl.int32), 1)
        low, high, count_low, count_high = _narrow(first, one, low, high, count_low, count_high, k, open_)
        low, high, count_low, count_high = _narrow(second, two, low, high, count_low, count_high, k, open_)
        low, high, count_low, count_high = _narrow(third, three, low, high, count_low, count_high, k, open_)
        open_ = open_ & (count_high > k) & (high - low > 1)
    return 0.0 - _value(high), tl.where((count_high > k) & (bad == 0), k - count_low, EVERY)


@triton.jit
def first_without(tile, call, m, x, room, listed, count, CALL: tl.constexpr):
    """Of each row the key from which on ties of x do not count, where only the first ``room`` do; listed blocks ascend."""
    met = row_zeros(CALL.BLOCK_M, tl.int32)
    limit = row_zeros(CALL.BLOCK_M, tl.int32) + EVERY
    for block in range(count):
        at = tl.load(listed + block)
        s, visible, place, _, _ = scores_at(tile, call, at, CALL)
        tied = (visible & (below(s, visible, m) == x[:, None])).to(tl.int32)
        number = met[:, None] + tl.cumsum(tied, 1)
        late = (tied > 0) & (number > room[:, None])
        limit = tl.minimum(limit, tl.min(tl.where(late, place[None, :], EVERY), 1))
        met += tl.sum(tied, 1)
    return limit
