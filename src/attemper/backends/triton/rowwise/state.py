r"""What a row of a rowwise normalizer gathers, and the state that it leaves (docs/design/0008).

With omega the weights relative to the largest, l = log omega and d = s - m, in one sweep over the blocks of keys::

    Z = sum omega    H = sum omega l    A = sum omega d    B = sum omega (d - A/Z)^2    C = sum omega^2
    F, T: omega on first tokens, times distance            S: keys with weight
    OWN, SPAN: omega on the query's own key, on marked keys

    w = omega_max Z    p = 1/Z    h = log Z - H/Z    a = -A/Z    v = B/Z    c = C/Z^2    f = F/Z    t = T/Z

As in ``softmax/state.py``, sums over blocks are pairs of float32, and the spread is kept about its own mean.
"""

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.normalizers import SIGMOID, largest
from attemper.backends.triton.scores import distance_of, first_of, own_of, span_of
from attemper.backends.triton.softmax.state import add, log_of, spread
from attemper.statistics import Column

W, S, P, A, H, V, C, F, T, OWN, SPAN = (tl.constexpr(1 << bit) for bit in range(11))
"""Bits of STATE: the state columns w, s, p, a, h, v, c, f, t, o, b beyond m, n and x that the call needs."""
_COLUMNS = (
    Column.MASS,
    Column.SUPPORT,
    Column.LARGEST_WEIGHT,
    Column.MEAN_DEPTH,
    Column.ENTROPY,
    Column.VARIANCE,
    Column.SQUARED_WEIGHTS,
    Column.FIRST_TOKENS,
    Column.DISTANCE,
    Column.OWN_KEY,
    Column.SPAN,
)
"""The same by name, in the order of their bits."""

SMALLEST = tl.constexpr(1.1754943508222875e-38)
"""Weights whose sum is below it count as none."""


def bits(columns: Iterable[Column]) -> int:
    """The bits of state columns."""
    return sum(1 << _COLUMNS.index(column) for column in columns if column in _COLUMNS)


def relative(columns: Iterable[Column]) -> bool:
    """Whether weights of sigmoid are wanted relative to the largest: for what shares of their sum decide about."""
    return not {*_COLUMNS[2:]}.isdisjoint(columns)


@triton.jit
def no_sums(BLOCK_M: tl.constexpr):
    """``(z, z_low, h, h_low, a, a_low, b, b_low, c, c_low, f, t, s, own, span)`` of no key."""
    zero = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    return zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, count, zero, zero


@triton.jit
def gather(sums, omega, logs, d, tile, call, place, CALL: tl.constexpr):
    """``sums`` with a block of weights [M, N]."""
    z, zl, h, hl, a, al, b, bl, c, cl, f, t, s, own, span = sums
    block_z = tl.sum(omega, 1)
    if H & CALL.STATE:
        h, hl = add(h, hl, tl.sum(omega * logs, 1))
    if (A | V) & CALL.STATE:
        block_a = tl.sum(omega * d, 1)
        if V & CALL.STATE:
            x = d - (block_a / tl.where(block_z > 0, block_z, 1.0))[:, None]
            # In this order, for 0 times a square that overflows would be NaN.
            b, bl = add(b, bl, tl.sum(omega * x * x, 1))
            b, bl = add(b, bl, spread(z, a, 0.0, block_z, block_a, 0.0))
        a, al = add(a, al, block_a)
    if C & CALL.STATE:
        c, cl = add(c, cl, tl.sum(omega * omega, 1))
    if F & CALL.STATE:
        f += tl.sum(tl.where(first_of(tile, place, call, CALL), omega, 0.0), 1)
    if T & CALL.STATE:
        t += tl.sum(omega * distance_of(tile, place), 1)
    if OWN & CALL.STATE:
        own += tl.sum(tl.where(own_of(tile, place), omega, 0.0), 1)
    if SPAN & CALL.STATE:
        span += tl.sum(tl.where(span_of(tile, place, call), omega, 0.0), 1)
    if S & CALL.STATE:
        s += tl.sum((omega > 0).to(tl.int32), 1)
    z, zl = add(z, zl, block_z)
    return z, zl, h, hl, a, al, b, bl, c, cl, f, t, s, own, span


@triton.jit
def finish(sums, m, n, number, CALL: tl.constexpr):
    """``(w, s, p, a, h, v, c, f, t, o, b)`` and what the product with values is multiplied by, [M]; all 0 without weight."""
    z, zl, h, hl, a, al, b, bl, c, cl, f, t, s, own, span = sums
    z, zl = add(z, 0.0, zl)
    mass = tl.where(n > 0, 1.0, 0.0)
    some = n > 0
    if CALL.NORMALIZER == SIGMOID:
        top = 1.0
        if CALL.RELATIVE:
            top = largest(m, number)
        mass = top * z
        some = some & (mass >= SMALLEST)
        mass = tl.where(some, mass, 0.0)
    z = tl.where(some, z, 1.0)
    zl = tl.where(some, zl, 0.0)
    inverse = tl.where(some, 1.0 / z, 0.0)
    scale = inverse
    if CALL.NORMALIZER == SIGMOID:
        scale = 0.0 * z + top
    entropy = tl.where(some, log_of(z, zl) - (h + hl) / z, 0.0) if H & CALL.STATE else 0.0 * z
    # -0.0 and what rounding leaves below 0 are no entropies.
    entropy = tl.maximum(entropy, 0.0)
    mean = 0.0 - (a + al) * inverse
    support = tl.where(some, s, 0).to(tl.float32)
    variance, concentration = (b + bl) * inverse, (c + cl) * inverse * inverse
    marked = (f * inverse, t * inverse, own * inverse, span * inverse)
    return (mass, support, inverse, mean, entropy, variance, concentration) + marked, scale


@triton.jit
def store(m, n, x, left, bad, target, plane, exists, STATE: tl.constexpr):
    """Writes m, n, x and the columns asked for, one plane after another; NaN but for n where a score is not finite."""
    spoiled = tl.where(bad, float("nan"), 0.0)
    tl.store(target, m + spoiled, mask=exists)
    tl.store(target + plane, n.to(tl.float32), mask=exists)
    tl.store(target + 2 * plane, tl.where(n > 0, x, 0.0) + spoiled, mask=exists)
    target += 3 * plane
    for bit in tl.static_range(11):
        if (1 << bit) & STATE:
            tl.store(target, left[bit] + spoiled, mask=exists)
            target += plane


@triton.jit
def load(source, plane, exists, STATE: tl.constexpr):
    """``(m, n, x, w, s, p, a, h, v, c, f, t, o, b)`` of rows (or their gradients); 0 where STATE has none."""
    m = tl.load(source, mask=exists, other=-float("inf"))
    n = tl.load(source + plane, mask=exists, other=0.0)
    x = tl.load(source + 2 * plane, mask=exists, other=0.0)
    rest = (n * 0.0,)
    place = source + 3 * plane
    for bit in tl.static_range(11):
        if (1 << bit) & STATE:
            rest = rest + (tl.load(place, mask=exists, other=0.0),)
            place += plane
        else:
            rest = rest + (n * 0.0,)
    weights = (rest[1], rest[2], rest[3], rest[4], rest[5], rest[6], rest[7], rest[8], rest[9], rest[10], rest[11])
    return (m, n, x) + weights
