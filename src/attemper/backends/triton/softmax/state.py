r"""All that belongs to softmax: what a row carries, how a block of scores joins it, what it leaves, and gradients.

Another normalizer is another file with these functions. A row carries, relative to its maximum m, with d = s - m in
bits, for the hardware's exponential is 2^d::

    Z = sum 2^d    A = sum 2^d d    B = sum 2^d (d - A/Z)^2    C = sum 4^d    F, T: 2^d on first tokens, times distance
    OWN, SPAN: 2^d on the query's own key, on marked keys

Scores come as they leave the product, and m is kept so: d = (s - m) unit, where unit [M] is what one of them is in bits.
At the maximum d is 0 whatever is rounded, and no score is multiplied but to find its distance. ``in_nats`` and ``finish``
turn m, A and B into nats.

Joining a block whose maximum raises m by t = m' - m and shrinks by r = 2^-t, where 1 is the row and 2 the block::

    Z = r Z1 + Z2      A = r (A1 - t Z1) + A2      C = r^2 C1 + C2
    B = r B1 + B2 + r Z1 Z2 / (r Z1 + Z2) (A1/Z1 - t - A2/Z2)^2

The spread is kept about its own mean: about the maximum it would be the difference of two numbers that are larger than
it. Z, A, B and C are pairs of float32 whose sum is exact to twice the digits: blocks added in plain float32 lose those
of a row that is nearly one-hot. Everything is [M], in registers; what STATE leaves out is a constant, which
compilers drop.
"""

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl

from attemper.backends.triton.scores import INTERPRETED, VANISHED
from attemper.statistics import Column

A, V, C, F, T, OWN, SPAN = (tl.constexpr(bit) for bit in (1, 2, 4, 8, 16, 32, 64))
"""Bits of STATE: the state columns a, v, c, f, t, o, b (docs/design/0002) beyond m, z and n that the call needs."""

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LN2_HIGH, LN2_LOW = tl.constexpr(0.693145751953125), tl.constexpr(1.42860682030941723212e-6)
"""log 2 in two parts; the first has so few digits that a whole number times it is exact."""


_BITS = {
    Column.MEAN_DEPTH: A,
    Column.VARIANCE: V,
    Column.SQUARED_WEIGHTS: C,
    Column.FIRST_TOKENS: F,
    Column.DISTANCE: T,
    Column.OWN_KEY: OWN,
    Column.SPAN: SPAN,
}


def bits(columns: Iterable[Column]) -> int:
    """The bits of state columns."""
    return sum(int(_BITS[column].value) for column in columns if column in _BITS)


@triton.jit
def nothing(BLOCK_M: tl.constexpr):
    """Rows that have seen no key: the identity of joining.

    ``(m, z, z_low, a, a_low, b, b_low, c, c_low, f, t, n, own, span)``.
    """
    zero = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    return zero - float("inf"), zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, count, zero, zero


@triton.jit
def add(high, low, more):
    """``more`` added to a pair: the rounding of the sum goes to the pair's low part."""
    total = high + more
    part = total - high
    return total, low + ((high - (total - part)) + (more - part))


@triton.jit
def exponential(d):
    return tl.exp2(d * LOG2E)


@triton.jit
def step(old, new, unit):
    """From one maximum to a higher one: (finite base of the new one, old - new in bits, 2 to that). Empty rows give 0."""
    base = tl.where(new == -float("inf"), 0.0, new)
    # An empty row's maximum is -inf: its sums are 0, and a finite step keeps 0 times it at 0.
    down = tl.where(old == -float("inf"), VANISHED, tl.maximum((old - base) * unit, VANISHED))
    return base, down, tl.exp2(down)


@triton.jit
def spread(z, a, b, block_z, block_a, block_b):
    """What the distance of two means adds to the sum of both spreads."""
    both = (z > 0) & (block_z > 0)
    apart = a / tl.where(both, z, 1.0) - block_a / tl.where(both, block_z, 1.0)
    # A NaN must pass: it marks a row with a score that is not finite.
    return tl.where(both, z * block_z / tl.where(both, z + block_z, 1.0) * apart * apart, (z + block_z) * 0.0)


@triton.jit
def lower(rows, down, shrink, STATE: tl.constexpr):
    """The sums of rows moved to a maximum that is ``-down`` higher."""
    m, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = rows
    if A & STATE:
        a, al = add(a, al, down * z)
        a, al = a * shrink, (al + down * zl) * shrink
    if V & STATE:
        b, bl = b * shrink, bl * shrink
    if C & STATE:
        c, cl = c * (shrink * shrink), cl * (shrink * shrink)
    if F & STATE:
        f = f * shrink
    if T & STATE:
        t = t * shrink
    if OWN & STATE:
        own = own * shrink
    if SPAN & STATE:
        span = span * shrink
    return m, z * shrink, zl * shrink, a, al, b, bl, c, cl, f, t, n, own, span


@triton.jit
def hide(s, visible):
    """Scores with -inf where a key is hidden, whatever stood there, and NaN where a visible one is -inf: such a row is
    not valid, and every sum of it shall say so."""
    return tl.where(visible, tl.where(s == -float("inf"), float("nan"), s), -float("inf"))


@triton.jit
def absorb(rows, s, unit, more, STATE: tl.constexpr, MASKED: tl.constexpr):
    """``rows`` after a block of scores [M, N], its weights relative to the maximum, and how far sums before it shrank.

    ``unit`` [M]: what a score of 1 is in bits, at least 0. ``more``: visible keys of each row in the block. MASKED: the
    block has hidden keys, and comes from ``hide``.
    """
    new = tl.maximum(rows[0], tl.max(s, 1))
    base, down, shrink = step(rows[0], new, unit)
    _, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = lower(rows, down, shrink, STATE)
    d = (s - base[:, None]) * unit[:, None]
    if MASKED:
        d = tl.where(s == -float("inf"), VANISHED, d)
    e = tl.exp2(d)
    # A score of -inf has a weight of 0 like a hidden key, but its row is not valid: 0 times it is NaN. With A, A is.
    block_z = tl.sum(e if A & STATE else d * 0.0 + e, 1)
    if A & STATE:
        weighted = e * d
        block_a = tl.sum(weighted, 1)
        if V & STATE:
            x = d - (block_a / tl.where(block_z > 0, block_z, 1.0))[:, None]
            # In this order, for 0 times a square that overflows would be NaN.
            block_b = tl.sum(e * x * x, 1)
            apart = spread(z, a, b, block_z, block_a, block_b)
            b, bl = add(b, bl, block_b)
            b, bl = add(b, bl, apart)
        a, al = add(a, al, block_a)
    if C & STATE:
        c, cl = add(c, cl, tl.sum(e * e, 1))
    z, zl = add(z, zl, block_z)
    return (new, z, zl, a, al, b, bl, c, cl, f, t, n + more, own, span), e, shrink


@triton.jit
def with_first(rows, e, first):
    """Adds a block's weight on first tokens. ``first`` [M or 1, N] bool."""
    m, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = rows
    return m, z, zl, a, al, b, bl, c, cl, f + tl.sum(tl.where(first, e, 0.0), 1), t, n, own, span


@triton.jit
def with_distance(rows, e, distance):
    """Adds a block's weight times its distance [M, N]."""
    m, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = rows
    return m, z, zl, a, al, b, bl, c, cl, f, t + tl.sum(e * distance, 1), n, own, span


@triton.jit
def with_own(rows, e, same):
    """Adds a block's weight on the query's own key. ``same`` [M, N] bool."""
    m, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = rows
    return m, z, zl, a, al, b, bl, c, cl, f, t, n, own + tl.sum(tl.where(same, e, 0.0), 1), span


@triton.jit
def with_span(rows, e, marked):
    """Adds a block's weight on marked keys. ``marked`` [1, N] bool."""
    m, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = rows
    return m, z, zl, a, al, b, bl, c, cl, f, t, n, own, span + tl.sum(tl.where(marked, e, 0.0), 1)


@triton.jit
def in_nats(rows, nats):
    """``rows`` with the maximum in nats; ``nats`` [M]: what a score of 1 is."""
    m, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = rows
    # -inf times 0, which an endless temperature gives, would be NaN.
    return tl.where(m == -float("inf"), m, m * nats), z, zl, a, al, b, bl, c, cl, f, t, n, own, span


@triton.jit
def join(rows, other, STATE: tl.constexpr):
    """The rows over the keys of both, their maxima in nats: the same law, for two parts that were computed apart."""
    new = tl.maximum(rows[0], other[0])
    _, down, shrink = step(rows[0], new, LOG2E)
    _, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = lower(rows, down, shrink, STATE)
    _, down, shrink = step(other[0], new, LOG2E)
    _, z2, zl2, a2, al2, b2, bl2, c2, cl2, f2, t2, n2, own2, span2 = lower(other, down, shrink, STATE)
    if V & STATE:
        b, bl = add(b, bl + bl2, spread(z, a, b, z2, a2, b2))
        b, bl = add(b, bl, b2)
    if A & STATE:
        a, al = add(a, al + al2, a2)
    if C & STATE:
        c, cl = add(c, cl + cl2, c2)
    z, zl = add(z, zl + zl2, z2)
    return new, z, zl, a, al, b, bl, c, cl, f + f2, t + t2, n + n2, own + own2, span + span2


@triton.jit
def _remainder(total, x, y):
    """total - x y, which is near 0, to the last digit: by one multiply-add, or by halves of 12 bits whose products are
    exact, for the interpreter rounds twice."""
    if INTERPRETED:
        wide_x, wide_y = x * 4097.0, y * 4097.0
        top_x, top_y = wide_x - (wide_x - x), wide_y - (wide_y - y)
        rest_x, rest_y = x - top_x, y - top_y
        product = x * y
        rounding = ((top_x * top_y - product) + top_x * rest_y + rest_x * top_y) + rest_x * rest_y
        left = (total - product) - rounding
    else:
        left = tl.fma(-x, y, total)
    return left


@triton.jit
def log_of(high, low):
    """log(high + low), high at least 1, to 0.6 units in the last place: a hardware logarithm has no digits near 1.

    high = 2^k f with f in [3/4, 3/2); log f = 2 atanh(u) with u = (f - 1) / (f + 1) as a pair.
    """
    bits = high.to(tl.int32, bitcast=True)
    k = (bits - 0x3F400000) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True)
    x = f - 1.0
    below = 2.0 + x
    lost = x - (below - 2.0)
    u = x / below
    small = low * ((127 - k) << 23).to(tl.float32, bitcast=True)
    # The low part stands above the line and below it.
    u_low = (_remainder(x, u, below) - u * (lost + small) + small) / below
    w = u * u
    series = u * w * (2.0 / 3 + w * (2.0 / 5 + w * (2.0 / 7 + w * (2.0 / 9 + w * (2.0 / 11 + w * (2.0 / 13))))))
    whole = k.to(tl.float32)
    total, rest = add(whole * LN2_HIGH, 0.0, 2.0 * u)
    return total + (rest + (2.0 * u_low + (series + whole * LN2_LOW)))


@triton.jit
def finish(rows, STATE: tl.constexpr):
    """The state that rows leave, their maximum being in nats: ``(m, z, n, a, v, c, f, t, o, b)``, 0 where STATE has none; NaN
    but for n where a visible score is not finite. And Z, to divide the output by (1 on an empty row)."""
    m, z, zl, a, al, b, bl, c, cl, f, t, n, own, span = rows
    bad = (z != z) | (m == float("inf"))
    if A & STATE:
        bad = bad | (a != a)
    bad = bad & (n > 0)
    z, zl = add(z, 0.0, zl)
    full = z > 0
    z = tl.where(full, z, 1.0)
    zl = tl.where(full, zl, 0.0)
    log_z = tl.where(n > 0, tl.maximum(log_of(z, zl), 0.0), 0.0)
    not_a_number = tl.where(bad, float("nan"), 0.0)
    zero = tl.zeros_like(z)
    mean, variance, square, on_first, distance, on_own, on_span = zero, zero, zero, zero, zero, zero, zero
    if A & STATE:
        mean = -(a + al) / z * LN2 + not_a_number
        # -0.0 is no number to show.
        mean = tl.where(mean == 0, 0.0, mean)
    if V & STATE:
        variance = (b + bl) / z * (LN2 * LN2) + not_a_number
    if C & STATE:
        square = (c + cl) / z / z + not_a_number
    if F & STATE:
        on_first = f / z + not_a_number
    if T & STATE:
        distance = t / z + not_a_number
    if OWN & STATE:
        on_own = own / z + not_a_number
    if SPAN & STATE:
        on_span = span / z + not_a_number
    of_scores = (m + not_a_number, log_z + not_a_number, n.to(tl.float32), mean, variance, square)
    return of_scores + (on_first, distance, on_own, on_span), z


@triton.jit
def store(state, target, plane, exists, STATE: tl.constexpr):
    """Writes the columns that were asked for, one plane of ``plane`` numbers after another, in the operator's order."""
    m, z, n, a, v, c, f, t, own, span = state
    tl.store(target, m, mask=exists)
    tl.store(target + plane, z, mask=exists)
    tl.store(target + 2 * plane, n, mask=exists)
    place = target + 3 * plane
    if A & STATE:
        tl.store(place, a, mask=exists)
        place += plane
    if V & STATE:
        tl.store(place, v, mask=exists)
        place += plane
    if C & STATE:
        tl.store(place, c, mask=exists)
        place += plane
    if F & STATE:
        tl.store(place, f, mask=exists)
        place += plane
    if T & STATE:
        tl.store(place, t, mask=exists)
        place += plane
    if OWN & STATE:
        tl.store(place, own, mask=exists)
        place += plane
    if SPAN & STATE:
        tl.store(place, span, mask=exists)


@triton.jit
def share(lse, sink):
    """The weight that a sink leaves to the keys, sigmoid(lse - sink); 0 on an empty row."""
    gap = lse - sink
    small = tl.exp2(-tl.abs(gap) * LOG2E)
    return tl.where(lse == -float("inf"), 0.0, tl.where(gap > 0, 1.0, small) / (1.0 + small))


@triton.jit
def load(source, plane, exists, STATE: tl.constexpr):
    """``(m, z, n, a, v, c, f, t, o, b)`` of rows, as ``store`` left them; 0 where STATE has none."""
    m = tl.load(source, mask=exists, other=-float("inf"))
    z = tl.load(source + plane, mask=exists, other=0.0)
    n = tl.load(source + 2 * plane, mask=exists, other=0.0)
    place = source + 3 * plane
    a, v, c, f, t, own, span = 0.0 * n, 0.0 * n, 0.0 * n, 0.0 * n, 0.0 * n, 0.0 * n, 0.0 * n
    if A & STATE:
        a = tl.load(place, mask=exists, other=0.0)
        place += plane
    if V & STATE:
        v = tl.load(place, mask=exists, other=0.0)
        place += plane
    if C & STATE:
        c = tl.load(place, mask=exists, other=0.0)
        place += plane
    if F & STATE:
        f = tl.load(place, mask=exists, other=0.0)
        place += plane
    if T & STATE:
        t = tl.load(place, mask=exists, other=0.0)
        place += plane
    if OWN & STATE:
        own = tl.load(place, mask=exists, other=0.0)
        place += plane
    if SPAN & STATE:
        span = tl.load(place, mask=exists, other=0.0)
    return m, z, n, a, v, c, f, t, own, span


@triton.jit
def weights(s, visible, state, MASKED: tl.constexpr):
    """P [M, N] of recomputed scores, and d = s - m (VANISHED where hidden)."""
    m = state[0]
    d = s - tl.where(m == -float("inf"), 0.0, m)[:, None]
    # Scores so far below that their square would overflow have no weight either way. None is above: where another tile
    # found the maximum, a huge score may round to one that is.
    d = tl.minimum(tl.maximum(d, VANISHED), 0.0)
    if MASKED:
        d = tl.where(visible, d, VANISHED)
    return exponential(d - state[1][:, None]), d


@triton.jit
def constant_gradient(state, above, STATE: tl.constexpr):
    """What of a score's gradient is the same along a row, without the output's: g_z - g_a - g_v v - 2 g_c c - ..."""
    constant = above[1]
    if A & STATE:
        constant -= above[3]
    if V & STATE:
        constant -= above[4] * state[4]
    if C & STATE:
        constant -= 2.0 * above[5] * state[5]
    if F & STATE:
        constant -= above[6] * state[6]
    if T & STATE:
        constant -= above[7] * state[7]
    if OWN & STATE:
        constant -= above[8] * state[8]
    if SPAN & STATE:
        constant -= above[9] * state[9]
    return constant


@triton.jit
def varying_gradient(p, d, state, above, STATE: tl.constexpr):
    """What of a score's gradient differs from key to key, as P: -g_a X + g_v (X^2 + 2X) + 2 g_c P, with X = d + a.

    With ``constant_gradient`` and mass (dP - D), times P, it is the gradient of a score before the softcap; first tokens,
    distance, own key and span add ``above[6]`` where first, ``above[7]`` times the distance, ``above[8]`` and ``above[9]``.
    """
    gradient = 0.0 * p
    if A & STATE:
        x = d + state[3][:, None]
        line = -above[3][:, None]
        if V & STATE:
            line = x * above[4][:, None] + (2.0 * above[4] - above[3])[:, None]
        gradient += x * line
    if C & STATE:
        gradient += 2.0 * above[5][:, None] * p
    return gradient


@triton.jit
def at_maximum(above, STATE: tl.constexpr):
    """What falls on the row's maximum alone, g_m - g_z + g_a: 0 for entropy, and for whatever a shift leaves alone."""
    if A & STATE:
        return above[0] - above[1] + above[3]
    return above[0] - above[1]
