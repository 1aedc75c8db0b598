r"""What the backward kernels of the rowwise normalizers share: what is known of a row, and the gradient of a block of scores.

With p = omega / Omega, l = log omega, dP = dO V^T, X = d + a, and g the gradients of the state columns::

    b = -g_h l + 2 g_c p - g_a d + g_v X^2 + g_f [first] + g_t distance + g_o [own key] + g_b [span] + g_p [j = winner]
    ds = r (dP + b - along),   along = sum r (dP + b) / sum r                    (docs/design/0008 and normalizers.py)
    entmax    ds = r (G - sum r G / sum r),   G = dP + b less that of the key of the largest r, where it is exactly 0
    sigmoid   ds = (1 - w) (w (dP + g_w) + p (b - sum p b))
    all       ds += p (2 g_v X - g_a) + [j = winner] (g_m + g_a)

What is the same for all keys in b cancels, so l may stand for log p. ``along`` (of entmax: what G is less by), Omega, a and
sum p b (of entmax: sum r G / sum r) are computed once per row, by the kernel that holds rows. A key without weight has
exactly 0; only the last term may fall on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.normalizers import ENTMAX, SIGMOID, gradient_weights, parameters, shares, sigmoid
from attemper.backends.triton.rowwise.state import OWN, SPAN, A, C, F, H, P, T, V, load
from attemper.backends.triton.rowwise.tiles import below
from attemper.backends.triton.scores import distance_of, first_of, own_of, product, span_of, tile_zeros

NUMBERS, PLACES = 5, 3
"""Planes of float32 and of int32 that the kernel of queries leaves for the others."""


class Rows(NamedTuple):
    """What is known of every row: planes of [B, H, Q]."""

    state: Any
    above: Any
    """Gradients of the state."""
    numbers: Any
    """1 / Omega, log Omega, a, along, sum p b (of entmax: sum r G / sum r): float32."""
    places: Any
    """The first key whose tie does not count (top-k), where the maximum stands, and the largest r of entmax: int32."""
    plane: int
    """Numbers in a plane."""


class Facts(NamedTuple):
    """What is known of M rows, [M] each; ``above`` is a tuple of gradients in the state's order."""

    m: Any
    first: Any
    second: Any
    number: Any
    inverse: Any
    log_total: Any
    mean: Any
    along: Any
    mean_gradient: Any
    winner: Any
    steepest: Any
    above: Any


@triton.jit
def row_facts(rows, at, exists, number, CALL: tl.constexpr):
    """The facts of the rows ``at`` [M], places in a plane, and their visible keys."""
    plane = tl.cast(rows.plane, tl.int64)
    m = tl.load(rows.state + at, mask=exists, other=-float("inf"))
    n = tl.load(rows.state + plane + at, mask=exists, other=0.0)
    x = tl.load(rows.state + 2 * plane + at, mask=exists, other=0.0)
    above = load(rows.above + at, plane, exists, CALL.STATE)
    limit = tl.load(rows.places + at, mask=exists, other=0)
    winner = tl.load(rows.places + plane + at, mask=exists, other=0)
    steepest = tl.load(rows.places + 2 * plane + at, mask=exists, other=0)
    inverse = tl.load(rows.numbers + at, mask=exists, other=0.0)
    log_total = tl.load(rows.numbers + plane + at, mask=exists, other=0.0)
    mean = tl.load(rows.numbers + 2 * plane + at, mask=exists, other=0.0)
    along = tl.load(rows.numbers + 3 * plane + at, mask=exists, other=0.0)
    mean_gradient = tl.load(rows.numbers + 4 * plane + at, mask=exists, other=0.0)
    first, second = parameters(tl.where(n > 0, x, 1.0), m, limit, number, CALL, CALL.RELATIVE)
    return Facts(m, first, second, number, inverse, log_total, mean, along, mean_gradient, winner, steepest, above), n


@triton.jit
def weights_of(s, visible, place, facts, CALL: tl.constexpr):
    """``(p, d, logs, inside)`` of a block; ``inside``: a key has weight, or its row has a score that is not finite."""
    d = below(s, visible, facts.m)
    LOGS: tl.constexpr = ((H & CALL.STATE) > 0) | (CALL.NORMALIZER == ENTMAX)
    one, two = facts.first, facts.second
    omega, logs = shares(s, d, visible, place, one, two, facts.number, CALL, LOGS, CALL.RELATIVE)
    inside = visible & ((omega > 0) | (facts.inverse != facts.inverse)[:, None])
    return omega * facts.inverse[:, None], d, logs, inside


@triton.jit
def statistics_gradient(p, d, logs, place, tile, call, facts, CALL: tl.constexpr):
    """b [M, N]."""
    above = facts.above
    b = 0.0 * p
    if H & CALL.STATE:
        b -= above[7][:, None] * logs
    if C & CALL.STATE:
        b += 2.0 * above[9][:, None] * p
    if A & CALL.STATE:
        b -= above[6][:, None] * d
    if V & CALL.STATE:
        x = d + facts.mean[:, None]
        b += above[8][:, None] * x * x
    if F & CALL.STATE:
        b += tl.where(first_of(tile, place, call, CALL), above[10][:, None], 0.0)
    if T & CALL.STATE:
        b += above[11][:, None] * distance_of(tile, place)
    if OWN & CALL.STATE:
        b += tl.where(own_of(tile, place), above[12][:, None], 0.0)
    if SPAN & CALL.STATE:
        b += tl.where(span_of(tile, place, call), above[13][:, None], 0.0)
    if CALL.MAXIMUM and (P & CALL.STATE):
        b += tl.where(place[None, :] == facts.winner[:, None], above[5][:, None], 0.0)
    return b


@triton.jit
def weight_gradient(upstream, values, CALL: tl.constexpr):
    """dP [M, N]; 0 without values."""
    total = tile_zeros(CALL.BLOCK_M, CALL.BLOCK_N, tl.float32)
    if CALL.E > 0:
        total = product(upstream, tl.trans(values), total)
    return total


@triton.jit
def score_gradients(s, visible, place, upstream, values, tile, call, facts, CALL: tl.constexpr):
    """ds of a block [M, N], before the softcap, and the weights that meet values."""
    p, d, logs, inside = weights_of(s, visible, place, facts, CALL)
    b = statistics_gradient(p, d, logs, place, tile, call, facts, CALL)
    gradient = weight_gradient(upstream, values, CALL)
    applied = p
    if CALL.NORMALIZER == SIGMOID:
        z = s + facts.number
        applied = tl.where(inside, sigmoid(z) + (facts.inverse * 0.0)[:, None], 0.0)
        ds = sigmoid(-z) * (applied * (gradient + facts.along[:, None]) + p * (b - facts.mean_gradient[:, None]))
    else:
        r = gradient_weights(p, logs, facts.log_total, facts.number, CALL)
        relative = gradient + b - facts.along[:, None]
        if CALL.NORMALIZER == ENTMAX:
            # Products in another order may differ in their last digit, and r there has no limit above alpha = 2.
            relative = tl.where(place[None, :] == facts.steepest[:, None], 0.0, relative) - facts.mean_gradient[:, None]
        ds = r * relative
    if (A | V) & CALL.STATE:
        direct = 0.0 * d
        if A & CALL.STATE:
            direct -= facts.above[6][:, None]
        if V & CALL.STATE:
            direct += 2.0 * facts.above[8][:, None] * (d + facts.mean[:, None])
        ds += p * direct
    ds = tl.where(inside, ds, 0.0)
    if CALL.MAXIMUM:
        peak = facts.above[0]
        if A & CALL.STATE:
            peak += facts.above[6]
        ds += tl.where(visible & (place[None, :] == facts.winner[:, None]), peak[:, None], 0.0)
    return ds, tl.where(inside, applied, 0.0)
