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

from attemper.backends.triton.rowwise.gradient import (
    Facts,
    score_gradients,
    statistics_gradient,
    weight_gradient,
    weights_of,
)
from attemper.backends.triton.rowwise.normalizers import (
    ENTMAX,
    EVERY,
    SIGMOID,
    TOPK,
    alpha_terms,
    gradient_weights,
    largest,
    number_of,
    parameters,
    shares,
    sigmoid,
)
from attemper.backends.triton.rowwise.search import first_without
from attemper.backends.triton.rowwise.state import SMALLEST, V, W, load
from attemper.backends.triton.rowwise.tiles import below, scores_at, span_of, values_at
from attemper.backends.triton.scores import (
    LENGTHS,
    Call,
    Structure,
    any_of,
    product,
    row_zeros,
    rows_of,
    tile_of,
    tile_zeros,
)
from attemper.backends.triton.softmax.state import add, log_of


@triton.jit
def _cut_ties(tile, call, m, n, x, number, start, count, listed, CALL: tl.constexpr):
    """The first key whose tie with x does not count, of rows in which more than k keys have d >= x; EVERY elsewhere."""
    over, tied = row_zeros(CALL.BLOCK_M, tl.int32), row_zeros(CALL.BLOCK_M, tl.int32)
    left = 0
    for block in range(count):
        at = start + block * CALL.BLOCK_N
        s, visible, _, _, _ = scores_at(tile, call, at, CALL)
        d = below(s, visible, m)
        equal = visible & (d == x[:, None])
        over += tl.sum((visible & (d > x[:, None])).to(tl.int32), 1)
        tied += tl.sum(equal.to(tl.int32), 1)
        tl.store(listed + left, at)
        left += any_of(equal)
    tl.debug_barrier()
    k = tl.minimum(n, number).to(tl.int32)
    room = tl.where(over + tied > k, k - over, EVERY)
    limit = row_zeros(CALL.BLOCK_M, tl.int32) + EVERY
    if tl.max((room < EVERY).to(tl.int32), 0) > 0:
        limit = first_without(tile, call, m, x, room, listed, left, CALL)
    tl.debug_barrier()
    return limit


@triton.jit
def _totals(tile, call, m, first, second, number, start, count, listed, marks, CALL: tl.constexpr):
    """``(Omega as a pair, sum omega d, winner, how many blocks have support)``; they are ``listed`` and marked."""
    z, zl = row_zeros(CALL.BLOCK_M, tl.float32), row_zeros(CALL.BLOCK_M, tl.float32)
    a, top = z, z - float("inf")
    winner = row_zeros(CALL.BLOCK_M, tl.int32)
    left = 0
    for block in range(count):
        at = start + block * CALL.BLOCK_N
        s, visible, place, _, _ = scores_at(tile, call, at, CALL)
        d = below(s, visible, m)
        omega, logs = shares(s, d, visible, place, first, second, number, CALL, False, CALL.RELATIVE)
        best, where = tl.max(s, 1, return_indices=True)
        winner = tl.where(best > top, where + at, winner)
        top = tl.maximum(top, best)
        z, zl = add(z, zl, tl.sum(omega, 1))
        if V & CALL.STATE:
            a += tl.sum(omega * d, 1)
        wanted = any_of((omega > 0) | (visible & (m != m)[:, None]))
        tl.store(listed + left, at)
        tl.store(marks + at // CALL.BLOCK_N, wanted.to(tl.uint8))
        left += wanted
    tl.debug_barrier()
    return z, zl, a, winner, left


@triton.jit
def _row_sums(tile, call, above, facts, count, listed, CALL: tl.constexpr, PER_HEAD: tl.constexpr):
    """``(along, sum p b, the row's part of what is given per head, the place of the largest r)``; of entmax, along is
    the gradient there and the second the mean of all relative to it.
    """
    zero = row_zeros(CALL.BLOCK_M, tl.float32)
    base, most, steepest = zero, zero, row_zeros(CALL.BLOCK_M, tl.int32)
    r_sum, rg_sum, b_sum, e_sum, g_sum, gb_sum, gy_sum = zero, zero, zero, zero, zero, zero, zero
    for block in range(count):
        at = tl.load(listed + block)
        s, visible, place, _, _ = scores_at(tile, call, at, CALL)
        values = tile.query
        if CALL.E > 0:
            values = values_at(tile, call, at, CALL)
        p, d, logs, inside = weights_of(s, visible, place, facts, CALL)
        b = statistics_gradient(p, d, logs, place, tile, call, facts, CALL)
        g = weight_gradient(above, values, CALL)
        if CALL.NORMALIZER == SIGMOID:
            z = s + facts.number
            rest, w = sigmoid(-z), sigmoid(z)
            b_sum += tl.sum(tl.where(inside, p * b, 0.0), 1)
            if PER_HEAD:
                r_sum += tl.sum(tl.where(inside, rest * w, 0.0), 1)
                rg_sum += tl.sum(tl.where(inside, rest * (w * g + p * b), 0.0), 1)
                e_sum += tl.sum(tl.where(inside, rest * p, 0.0), 1)
        else:
            g += b
            r = gradient_weights(p, logs, facts.log_total, facts.number, CALL)
            relative = g
            if CALL.NORMALIZER == ENTMAX:
                largest_r, where = tl.max(tl.where(inside, r, 0.0), 1, return_indices=True)
                there = tl.sum(tl.where(tl.arange(0, CALL.BLOCK_N)[None, :] == where[:, None], g, 0.0), 1)
                newer = largest_r > most
                # What was summed relative to the base so far moves to the new one: smaller by far, it costs no digit.
                rg_sum += tl.where(newer, (base - there) * r_sum, 0.0)
                base = tl.where(newer, there, base)
                steepest = tl.where(newer, where + at, steepest)
                most = tl.where(newer, largest_r, most)
                relative = g - base[:, None]
            r_sum += tl.sum(tl.where(inside, r, 0.0), 1)
            rg_sum += tl.sum(tl.where(inside, r * relative, 0.0), 1)
            if (CALL.NORMALIZER == ENTMAX) & PER_HEAD:
                y, curve = alpha_terms(p, logs, facts.log_total, facts.number)
                weighted = tl.where(inside, p * g, 0.0)
                b_sum += tl.sum(tl.where(inside, p * curve, 0.0), 1)
                e_sum -= tl.sum(tl.where(inside, p * y, 0.0), 1)
                g_sum += tl.sum(weighted, 1)
                gb_sum += tl.sum(weighted * curve, 1)
                gy_sum += tl.sum(weighted * y, 1)
    if CALL.NORMALIZER == SIGMOID:
        along = facts.above[3]
        return along, b_sum, rg_sum + along * r_sum - b_sum * e_sum, steepest
    # A sum that is NaN stays: its row has a score that is not finite.
    total = tl.where(r_sum == 0, 1.0, r_sum)
    e = facts.number
    part = (b_sum * g_sum - gb_sum - e * (b_sum * gy_sum + e_sum * gb_sum)) / total
    if CALL.NORMALIZER == ENTMAX:
        return base, rg_sum / total, part, steepest
    return rg_sum / total, zero, part, steepest


@triton.jit(do_not_specialize=[*LENGTHS, "places"])
def rowwise_query_kernel(
    query, key, value, upstream, multiplier, mask, first, per_head, query_grad, multiplier_rows, per_head_rows, rows,
    listed, marks,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap, given, places,
    CALL: tl.constexpr, QUERY: tl.constexpr, MULTIPLIER: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """QUERY, MULTIPLIER, PER_HEAD: which gradients are wanted. ``marks``: uint8, ``places`` of each program, all 0."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    call = Call(query, key, value, upstream, multiplier, mask, first, structure, heads, repeats, first_tokens, softcap)
    per = tl.cdiv(structure.rows, CALL.BLOCK_M)
    program = tl.program_id(0)
    head = (program // per) % heads
    batch = program // per // heads
    block = per - 1 - program % per
    here = block * CALL.BLOCK_M + tl.arange(0, CALL.BLOCK_M)
    exists = here < structure.rows
    row = tl.minimum(here, structure.rows - 1)
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + here
    plane = tl.cast(rows.plane, tl.int64)
    m = tl.load(rows.state + at_rows, mask=exists, other=-float("inf"))
    n = tl.load(rows.state + plane + at_rows, mask=exists, other=0.0)
    x = tl.load(rows.state + 2 * plane + at_rows, mask=exists, other=0.0)
    # An empty row is read as 0: 0 times an inf of its would be NaN.
    read = tl.where(exists & (n > 0), row, structure.rows)
    tile = tile_of(call, row, batch, head, read, CALL, True)
    number = number_of(per_head, head, given, CALL)
    listed += program.to(tl.int64) * places
    marks += ((batch.to(tl.int64) * heads + head) * per + block) * places
    start, count = span_of(tile, CALL)
    limit = row_zeros(CALL.BLOCK_M, tl.int32) + EVERY
    if CALL.NORMALIZER == TOPK:
        limit = _cut_ties(tile, call, m, n, x, number, start, count, listed, CALL)
    one, two = parameters(tl.where(n > 0, x, 1.0), m, limit, number, CALL, CALL.RELATIVE)
    z, zl, a, winner, count = _totals(tile, call, m, one, two, number, start, count, listed, marks, CALL)
    z, zl = add(z, 0.0, zl)
    some = n > 0
    if CALL.NORMALIZER == SIGMOID:
        mass = z
        if CALL.RELATIVE:
            mass = largest(m, number) * z
        some = some & (mass >= SMALLEST)
    spoiled = tl.where(m != m, float("nan"), 0.0)
    inverse = tl.where(some, 1.0 / z, 0.0) + spoiled
    log_total = tl.where(some, log_of(tl.where(some, z, 1.0), tl.where(some, zl, 0.0)), 0.0)
    zero = 0.0 * n
    above = load(rows.above + at_rows, plane, exists & (n > 0), CALL.STATE)
    facts = Facts(m, one, two, number, inverse, log_total, 0.0 - a * inverse, zero, zero, winner, winner, above)
    dout = tile.query
    if CALL.E > 0:
        dout = rows_of(upstream, batch, head, read, CALL.E, CALL, True, structure.rows)
    along, mean_gradient, part, steepest = zero, zero, zero, winner
    if (CALL.NORMALIZER != SIGMOID) | PER_HEAD | (CALL.STATE > W):
        along, mean_gradient, part, steepest = _row_sums(tile, call, dout, facts, count, listed, CALL, PER_HEAD)
    else:
        along = above[3]
    facts = Facts(m, one, two, number, inverse, log_total, facts.mean, along, mean_gradient, winner, steepest, above)
    tl.store(rows.numbers + at_rows, inverse, mask=exists)
    tl.store(rows.numbers + plane + at_rows, log_total, mask=exists)
    tl.store(rows.numbers + 2 * plane + at_rows, facts.mean, mask=exists)
    tl.store(rows.numbers + 3 * plane + at_rows, along, mask=exists)
    tl.store(rows.numbers + 4 * plane + at_rows, mean_gradient, mask=exists)
    tl.store(rows.places + at_rows, limit, mask=exists)
    tl.store(rows.places + plane + at_rows, winner, mask=exists)
    tl.store(rows.places + 2 * plane + at_rows, steepest, mask=exists)
    if PER_HEAD:
        tl.store(per_head_rows + at_rows, tl.where(n > 0, part, 0.0), mask=exists)
    if QUERY | MULTIPLIER:
        dq = tile_zeros(CALL.BLOCK_M, CALL.BLOCK_D, tl.float32)
        for number_of_block in range(count):
            at = tl.load(listed + number_of_block)
            s, visible, place, k, bend = scores_at(tile, call, at, CALL)
            values = k
            if CALL.E > 0:
                values = values_at(tile, call, at, CALL)
            ds, applied = score_gradients(s, visible, place, dout, values, tile, call, facts, CALL)
            dq = product((ds * bend).to(k.dtype), k, dq)
        if MULTIPLIER:
            tl.store(multiplier_rows + at_rows, tl.sum(dq * tile.query.to(tl.float32), 1), mask=exists)
        if QUERY:
            column = tl.arange(0, CALL.BLOCK_D)
            written = (dq * tile.scale[:, None]).to(query_grad.dtype.element_ty)
            pointers = query_grad + at_rows[:, None] * CALL.D + column[None, :]
            tl.store(pointers, written, mask=exists[:, None] & (column < CALL.D)[None, :])
