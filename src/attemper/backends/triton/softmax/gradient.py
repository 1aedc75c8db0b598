r"""What the kernels of the backward pass share: the numbers of a row, and the gradient of a block of scores.

With P and d = s - m of recomputed scores, dP = dO V^T, D = rowsum(dO O), the mass that a sink leaves to the keys (1
without), and g the gradients of the state columns::

    dS = P (mass (dP - D) + constant_gradient + varying_gradient + g_f [first] + g_t distance
        + g_o [own key] + g_b [span])
       + [j = winner] at_maximum

What of it is the same along a row, ``constant_gradient - mass D``, is computed once per row, before all else. A key that is
hidden has exactly 0, so a row that sees nothing has 0 everywhere, whatever comes from above.

Scores lie as [M, N] in all kernels, also in those that hold keys: [N, M] would give dK and dV their operands as they lie,
but each of a dozen numbers per row would take a register for every few columns, and registers are what is short.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attemper.backends.triton.scores import distance_of, first_of, own_of, product, rows_of, scores, span_of, visibility
from attemper.backends.triton.softmax.state import (
    OWN,
    SPAN,
    F,
    T,
    at_maximum,
    constant_gradient,
    load,
    share,
    varying_gradient,
    weights,
)


class Rows(NamedTuple):
    """What is known of every row: planes of [B, H, Q], float32, and where its maximum stands, int32."""

    state: Any
    above: Any
    """Gradients of the state."""
    constant: Any
    winner: Any
    sink: Any
    """[H] logits."""
    plane: int
    """Numbers in a plane."""


@triton.jit
def _mass(state, sink, head, CALL: tl.constexpr):
    mass = 1.0
    if CALL.SINK:
        mass = share(state[0] + state[1], tl.load(sink + head).to(tl.float32))
    return mass


@triton.jit
def row_facts(rows, at, exists, head, CALL: tl.constexpr):
    """``(state, above, constant, mass, winner, peak)`` of the rows ``at`` [M], places in a plane."""
    plane = tl.cast(rows.plane, tl.int64)
    state = load(rows.state + at, plane, exists, CALL.STATE)
    above = load(rows.above + at, plane, exists, CALL.STATE)
    constant = tl.load(rows.constant + at, mask=exists, other=0.0)
    winner = 0
    if CALL.MAXIMUM:
        winner = tl.load(rows.winner + at, mask=exists, other=0)
    return state, above, constant, _mass(state, rows.sink, head, CALL), winner, at_maximum(above, CALL.STATE)


@triton.jit
def without_noise(terms, CALL: tl.constexpr):
    """Rows whose weight is all on one key, to the last digit of Z, and ``terms`` with nothing from the output there.

    Moving scores does not move such an output; its gradient would be the difference of two orders of summing, which a
    tiny temperature multiplies by 1 / T^2. The caller reads dO as 0 on these rows.
    """
    state, above, constant, mass, winner, peak = terms
    settled = state[1] == 0.0
    if CALL.SINK:
        settled &= mass == 1.0
    constant = tl.where(settled, constant_gradient(state, above, CALL.STATE), constant)
    return settled, (state, above, constant, mass, winner, peak)


@triton.jit
def score_gradients(tile, block, upstream, values, terms, place, call, CALL: tl.constexpr, EDGE: tl.constexpr):
    """dS of a block [M, N], its weights times the mass, and the softcap's gradient.

    EDGE: some row may not see some key (or the block reaches past the end), and the masks are asked.
    """
    state, above, constant, mass, winner, peak = terms
    s, bend = scores(tile, block, call, CALL)
    visible = True
    if EDGE:
        visible, bias = visibility(tile, place, call, CALL)
        s += bias
    p, d = weights(s, visible, state, EDGE)
    gradient = varying_gradient(p, d, state, above, CALL.STATE) + constant[:, None]
    applied = p
    if CALL.E > 0:
        reached = product(upstream, tl.trans(values), tl.zeros(p.shape, tl.float32))
        if CALL.SINK:
            reached *= mass[:, None]
            applied = p * mass[:, None]
        gradient += reached
    if F & CALL.STATE:
        gradient += tl.where(first_of(tile, place, call, CALL), above[6][:, None], 0.0)
    if T & CALL.STATE:
        gradient += above[7][:, None] * distance_of(tile, place)
    if OWN & CALL.STATE:
        gradient += tl.where(own_of(tile, place), above[8][:, None], 0.0)
    if SPAN & CALL.STATE:
        gradient += tl.where(span_of(tile, place, call), above[9][:, None], 0.0)
    ds = p * gradient
    if CALL.MAXIMUM:
        ds += tl.where(place[None, :] == winner[:, None], peak[:, None], 0.0)
    if EDGE:
        ds = tl.where(visible, ds, 0.0)
    return ds, applied, bend


@triton.jit(do_not_specialize=["row_count"])
def constants_kernel(output, upstream, constant, sink_rows, rows, row_count, heads, CALL: tl.constexpr):
    """Of every row: what of dS is constant along it, and its part of the sink's gradient, (mass - 1) D."""
    per_head = tl.cdiv(row_count, CALL.BLOCK_M)
    program = tl.program_id(0)
    head = (program // per_head) % heads
    batch = program // per_head // heads
    places = program % per_head * CALL.BLOCK_M + tl.arange(0, CALL.BLOCK_M)
    exists = places < row_count
    row = tl.minimum(places, row_count - 1)
    at = (batch.to(tl.int64) * heads + head) * row_count + places
    plane = tl.cast(rows.plane, tl.int64)
    state = load(rows.state + at, plane, exists, CALL.STATE)
    above = load(rows.above + at, plane, exists, CALL.STATE)
    full = exists & (state[2] > 0)
    along = constant_gradient(state, above, CALL.STATE)
    if CALL.E > 0:
        out = rows_of(output, batch, head, row, CALL.E, CALL, False, 0).to(tl.float32)
        out *= rows_of(upstream, batch, head, row, CALL.E, CALL, False, 0).to(tl.float32)
        dot = tl.sum(out, 1)
        mass = _mass(state, rows.sink, head, CALL)
        along -= mass * dot
        if CALL.SINK:
            tl.store(sink_rows + at, tl.where(full, (mass - 1.0) * dot, 0.0), mask=exists)
    tl.store(constant + at, tl.where(full, along, 0.0), mask=exists)
