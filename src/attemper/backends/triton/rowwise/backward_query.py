r"""What a row needs for its gradients, and the gradients of queries, of the multiplier and of what is given per head.

A program takes M rows of one head and goes over the blocks of keys, first all that they see, then those with support::

    top-k, if ties are cut     the first key whose tie does not count
    once                       Omega, a, the winner; which blocks have support: the list, and ``marks`` for other kernels
    once                       sum r, sum r (dP + b), and the sums of the gradient of alpha or of the bias
    once                       dQ += (ds softcap') K    ...    dQ * multiplier; d multiplier = rowsum(dQ q)

Registers: dQ [M, D], scores and dP [M, N], numbers of a row. Shared memory: q, dO, and tiles of keys and values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.gradient import Facts, block_slopes, reached, statistics_slope, weights_of
from attemper.backends.triton.rowwise.maps import (
    ENTMAX,
    EVERY,
    SIGMOID,
    TOPK,
    alpha_terms,
    knobs,
    largest,
    number_of,
    shares,
    sigmoid,
    slope_of_map,
)
from attemper.backends.triton.rowwise.search import first_without
from attemper.backends.triton.rowwise.state import SMALLEST, V, W, loaded
from attemper.backends.triton.rowwise.tiles import Keys, any_of, below, scores_at, span_of, tile_of
from attemper.backends.triton.scores import LENGTHS, Structure, block_of, product, rows_of
from attemper.backends.triton.softmax.state import _added, log_of


@triton.jit
def _cut_ties(
    tile, keys, m, n, x, number, start, count, listed, MASK: tl.constexpr, LIMIT: tl.constexpr,
    SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The first key whose tie with x does not count, of rows in which more than k keys have d >= x; EVERY elsewhere."""
    over, tied = tl.zeros([BLOCK_M], tl.int32), tl.zeros([BLOCK_M], tl.int32)
    left = 0
    for block in range(count):
        at = start + block * BLOCK_N
        s, visible, _, _, _ = scores_at(tile, keys, at, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_N, WIDE)
        d = below(s, visible, m)
        equal = visible & (d == x[:, None])
        over += tl.sum((visible & (d > x[:, None])).to(tl.int32), 1)
        tied += tl.sum(equal.to(tl.int32), 1)
        tl.store(listed + left, at)
        left += any_of(equal)
    tl.debug_barrier()
    k = tl.minimum(n, number).to(tl.int32)
    room = tl.where(over + tied > k, k - over, EVERY)
    limit = tl.zeros([BLOCK_M], tl.int32) + EVERY
    if tl.max((room < EVERY).to(tl.int32), 0) > 0:
        limit = first_without(
            tile, keys, m, x, room, listed, left, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_M, BLOCK_N, WIDE
        )
    tl.debug_barrier()
    return limit


@triton.jit
def _totals(
    tile, keys, m, first, second, number, start, count, listed, marks, MAP: tl.constexpr, LETTERS: tl.constexpr,
    RELATIVE: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``(Omega as a pair, sum omega d, winner, how many blocks have support)``; they are ``listed`` and marked."""
    z, zl = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    a, top = z, z - float("inf")
    winner = tl.zeros([BLOCK_M], tl.int32)
    left = 0
    for block in range(count):
        at = start + block * BLOCK_N
        s, visible, place, _, _ = scores_at(tile, keys, at, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_N, WIDE)
        d = below(s, visible, m)
        omega, logs = shares(s, d, visible, place, first, second, number, MAP, False, RELATIVE)
        best, where = tl.max(s, 1, return_indices=True)
        winner = tl.where(best > top, where + at, winner)
        top = tl.maximum(top, best)
        z, zl = _added(z, zl, tl.sum(omega, 1))
        if V & LETTERS:
            a += tl.sum(omega * d, 1)
        wanted = any_of((omega > 0) | (visible & (m != m)[:, None]))
        tl.store(listed + left, at)
        tl.store(marks + at // BLOCK_N, wanted.to(tl.uint8))
        left += wanted
    tl.debug_barrier()
    return z, zl, a, winner, left


@triton.jit
def _row_sums(
    tile, keys, above, value, facts, count, listed, MAP: tl.constexpr, LETTERS: tl.constexpr, RELATIVE: tl.constexpr,
    PER_HEAD: tl.constexpr, FIRST: tl.constexpr, MAXIMUM: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr,
    SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """``(along, sum p b, the row's part of what is given per head, the place of the largest r)``; of entmax, along is
    the gradient there and the second the mean of all relative to it.
    """
    zero = tl.zeros([BLOCK_M], tl.float32)
    base, most, steepest = zero, zero, tl.zeros([BLOCK_M], tl.int32)
    r_sum, rg_sum, b_sum, e_sum, g_sum, gb_sum, gy_sum = zero, zero, zero, zero, zero, zero, zero
    for block in range(count):
        at = tl.load(listed + block)
        s, visible, place, _, _ = scores_at(tile, keys, at, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_N, WIDE)
        values = tile.query
        if E > 0:
            values = block_of(
                value, tile.batch, tile.group, at, tl.arange(0, BLOCK_N), BLOCK_E, E, WIDE, True, keys.structure.keys
            )
        p, d, logs, inside = weights_of(s, visible, place, facts, MAP, LETTERS, RELATIVE)
        b = statistics_slope(p, d, logs, place, tile, keys, facts, LETTERS, FIRST, MAXIMUM)
        g = reached(above, values, E, BLOCK_M, BLOCK_N)
        if MAP == SIGMOID:
            z = s + facts.number
            rest, w = sigmoid(-z), sigmoid(z)
            b_sum += tl.sum(tl.where(inside, p * b, 0.0), 1)
            if PER_HEAD:
                r_sum += tl.sum(tl.where(inside, rest * w, 0.0), 1)
                rg_sum += tl.sum(tl.where(inside, rest * (w * g + p * b), 0.0), 1)
                e_sum += tl.sum(tl.where(inside, rest * p, 0.0), 1)
        else:
            g += b
            r = slope_of_map(p, logs, facts.log_total, facts.number, MAP)
            relative = g
            if MAP == ENTMAX:
                largest_r, where = tl.max(tl.where(inside, r, 0.0), 1, return_indices=True)
                there = tl.sum(tl.where(tl.arange(0, BLOCK_N)[None, :] == where[:, None], g, 0.0), 1)
                newer = largest_r > most
                # What was summed relative to the base so far moves to the new one: smaller by far, it costs no digit.
                rg_sum += tl.where(newer, (base - there) * r_sum, 0.0)
                base = tl.where(newer, there, base)
                steepest = tl.where(newer, where + at, steepest)
                most = tl.where(newer, largest_r, most)
                relative = g - base[:, None]
            r_sum += tl.sum(tl.where(inside, r, 0.0), 1)
            rg_sum += tl.sum(tl.where(inside, r * relative, 0.0), 1)
            if (MAP == ENTMAX) & PER_HEAD:
                y, curve = alpha_terms(p, logs, facts.log_total, facts.number)
                weighted = tl.where(inside, p * g, 0.0)
                b_sum += tl.sum(tl.where(inside, p * curve, 0.0), 1)
                e_sum -= tl.sum(tl.where(inside, p * y, 0.0), 1)
                g_sum += tl.sum(weighted, 1)
                gb_sum += tl.sum(weighted * curve, 1)
                gy_sum += tl.sum(weighted * y, 1)
    if MAP == SIGMOID:
        along = facts.above[3]
        return along, b_sum, rg_sum + along * r_sum - b_sum * e_sum, steepest
    # A sum that is NaN stays: its row has a score that is not finite.
    total = tl.where(r_sum == 0, 1.0, r_sum)
    e = facts.number
    part = (b_sum * g_sum - gb_sum - e * (b_sum * gy_sum + e_sum * gb_sum)) / total
    if MAP == ENTMAX:
        return base, rg_sum / total, part, steepest
    return rg_sum / total, zero, part, steepest


@triton.jit(do_not_specialize=[*LENGTHS, "places"])
def row_query_kernel(
    query, key, value, upstream, multiplier, mask, first, per_head, query_grad, multiplier_rows, per_head_rows, rows,
    listed, marks,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap, given, places,
    MAP: tl.constexpr, RELATIVE: tl.constexpr, LETTERS: tl.constexpr, MASK: tl.constexpr, LIMIT: tl.constexpr,
    FIRST: tl.constexpr, SOFTCAP: tl.constexpr, MAXIMUM: tl.constexpr, QUERY: tl.constexpr, MULTIPLIER: tl.constexpr,
    PER_HEAD: tl.constexpr, POSITIONS: tl.constexpr, PACKED: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """QUERY, MULTIPLIER, PER_HEAD: which gradients are wanted. ``marks``: uint8, ``places`` of each program, all 0."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    per = tl.cdiv(structure.rows, BLOCK_M)
    program = tl.program_id(0)
    head = (program // per) % heads
    batch = program // per // heads
    block = per - 1 - program % per
    here = block * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = here < structure.rows
    row = tl.minimum(here, structure.rows - 1)
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + here
    plane = tl.cast(rows.plane, tl.int64)
    m = tl.load(rows.state + at_rows, mask=exists, other=-float("inf"))
    n = tl.load(rows.state + plane + at_rows, mask=exists, other=0.0)
    x = tl.load(rows.state + 2 * plane + at_rows, mask=exists, other=0.0)
    # An empty row is read as 0: 0 times an inf of its would be NaN.
    read = tl.where(exists & (n > 0), row, structure.rows)
    tile = tile_of(
        query, multiplier, structure, row, batch, head, repeats, read,
        POSITIONS, PACKED, BOTTOM_RIGHT, D, BLOCK_D, WIDE, True,
    )  # fmt: skip
    keys = Keys(key, mask, first, structure, first_tokens, softcap)
    number = number_of(per_head, head, given, MAP)
    listed += program.to(tl.int64) * places
    marks += ((batch.to(tl.int64) * heads + head) * per + block) * places
    start, count = span_of(tile, BLOCK_N)
    limit = tl.zeros([BLOCK_M], tl.int32) + EVERY
    if MAP == TOPK:
        limit = _cut_ties(
            tile, keys, m, n, x, number, start, count, listed, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_M, BLOCK_N, WIDE
        )
    one, two = knobs(tl.where(n > 0, x, 1.0), m, limit, number, MAP, RELATIVE)
    z, zl, a, winner, count = _totals(
        tile, keys, m, one, two, number, start, count, listed, marks, MAP, LETTERS, RELATIVE,
        MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_M, BLOCK_N, WIDE,
    )  # fmt: skip
    z, zl = _added(z, 0.0, zl)
    some = n > 0
    if MAP == SIGMOID:
        mass = z
        if RELATIVE:
            mass = largest(m, number) * z
        some = some & (mass >= SMALLEST)
    spoiled = tl.where(m != m, float("nan"), 0.0)
    inverse = tl.where(some, 1.0 / z, 0.0) + spoiled
    log_total = tl.where(some, log_of(tl.where(some, z, 1.0), tl.where(some, zl, 0.0)), 0.0)
    zero = 0.0 * n
    above = loaded(rows.above + at_rows, plane, exists & (n > 0), LETTERS)
    facts = Facts(m, one, two, number, inverse, log_total, 0.0 - a * inverse, zero, zero, winner, winner, above)
    dout = tile.query
    if E > 0:
        dout = rows_of(upstream, batch, head, read, BLOCK_E, E, WIDE, True, structure.rows)
    along, mean_slope, part, steepest = zero, zero, zero, winner
    if (MAP != SIGMOID) | PER_HEAD | (LETTERS > W):
        along, mean_slope, part, steepest = _row_sums(
            tile, keys, dout, value, facts, count, listed, MAP, LETTERS, RELATIVE, PER_HEAD, FIRST, MAXIMUM,
            MASK, LIMIT, SOFTCAP, D, BLOCK_D, E, BLOCK_E, BLOCK_M, BLOCK_N, WIDE,
        )  # fmt: skip
    else:
        along = above[3]
    facts = Facts(m, one, two, number, inverse, log_total, facts.mean, along, mean_slope, winner, steepest, above)
    tl.store(rows.numbers + at_rows, inverse, mask=exists)
    tl.store(rows.numbers + plane + at_rows, log_total, mask=exists)
    tl.store(rows.numbers + 2 * plane + at_rows, facts.mean, mask=exists)
    tl.store(rows.numbers + 3 * plane + at_rows, along, mask=exists)
    tl.store(rows.numbers + 4 * plane + at_rows, mean_slope, mask=exists)
    tl.store(rows.places + at_rows, limit, mask=exists)
    tl.store(rows.places + plane + at_rows, winner, mask=exists)
    tl.store(rows.places + 2 * plane + at_rows, steepest, mask=exists)
    if PER_HEAD:
        tl.store(per_head_rows + at_rows, tl.where(n > 0, part, 0.0), mask=exists)
    if QUERY | MULTIPLIER:
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for number_of_block in range(count):
            at = tl.load(listed + number_of_block)
            s, visible, place, k, bend = scores_at(tile, keys, at, MASK, LIMIT, SOFTCAP, D, BLOCK_D, BLOCK_N, WIDE)
            values = k
            if E > 0:
                values = block_of(
                    value, batch, tile.group, at, tl.arange(0, BLOCK_N), BLOCK_E, E, WIDE, True, structure.keys
                )
            ds, applied = block_slopes(
                s, visible, place, dout, values, tile, keys, facts, MAP, LETTERS, RELATIVE, FIRST, MAXIMUM, E,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
            dq = product((ds * bend).to(k.dtype), k, dq)
        if MULTIPLIER:
            tl.store(multiplier_rows + at_rows, tl.sum(dq * tile.query.to(tl.float32), 1), mask=exists)
        if QUERY:
            column = tl.arange(0, BLOCK_D)
            written = (dq * tile.scale[:, None]).to(query_grad.dtype.element_ty)
            pointers = query_grad + at_rows[:, None] * D + column[None, :]
            tl.store(pointers, written, mask=exists[:, None] & (column < D)[None, :])
