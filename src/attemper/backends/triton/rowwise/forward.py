r"""The forward kernel of the rowwise normalizers: state, and output where there is a value.

A program takes M query rows of one head, and goes over the blocks of keys that they can see::

    once                m, n, and the list of blocks that some row sees         (search.surveyed)
    a few times         what is found on each row, x; the list shrinks          (search.found)
    once                omega, the row's sums, O += omega V; blocks without weight cost no product with values

Sigmoid finds nothing, and where no statistic is asked for that needs the maximum it goes over its keys once.
Registers: query tile [M, D], O [M, E], scores [M, N], numbers of a row. No weight is kept; no sum depends on the order
in which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attemper.backends.triton.rowwise.normalizers import EVERY, SIGMOID, number_of, parameters, shares
from attemper.backends.triton.rowwise.search import bounds_of_nothing, find, survey, widen
from attemper.backends.triton.rowwise.state import H, finish, gather, no_sums, store
from attemper.backends.triton.rowwise.tiles import below, scores_at, span_of, values_at
from attemper.backends.triton.scores import LENGTHS, Call, Structure, any_of, product, row_zeros, tile_of, tile_zeros


@triton.jit(do_not_specialize=[*LENGTHS, "places"])
def rowwise_forward_kernel(
    query, key, value, multiplier, mask, first, per_head, output, state, listed,
    row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps,
    heads, repeats, first_tokens, softcap, given, places, CALL: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """``listed``: int32 for the lists, ``places`` of each program. ``given``: k or min_weight."""
    structure = Structure(row_count, key_count, left, right, offset, positions, starts_q, starts_k, documents, steps)
    call = Call(query, key, value, query, multiplier, mask, first, structure, heads, repeats, first_tokens, softcap)
    per = tl.cdiv(structure.rows, CALL.BLOCK_M)
    program = tl.program_id(0)
    head = (program // per) % heads
    batch = program // per // heads
    # The last rows of a causal head see the most keys: they start first.
    begin = (per - 1 - program % per) * CALL.BLOCK_M
    # Rows past the end repeat the last one; what they find is not stored.
    row = begin + tl.minimum(tl.arange(0, CALL.BLOCK_M), structure.rows - 1 - begin)
    if GATHER:
        row = tl.load(structure.positions + row).to(tl.int32)
    tile = tile_of(call, row, batch, head, row, CALL, False)
    number = number_of(per_head, head, given, CALL)
    listed += program.to(tl.int64) * places
    start, count = span_of(tile, CALL)
    bounds = bounds_of_nothing(CALL.BLOCK_M)
    x, limit = row_zeros(CALL.BLOCK_M, tl.float32), row_zeros(CALL.BLOCK_M, tl.int32) + EVERY
    SURVEY: tl.constexpr = (CALL.NORMALIZER != SIGMOID) | CALL.RELATIVE
    if SURVEY:
        bounds, count = survey(tile, call, start, count, listed, CALL)
    if CALL.NORMALIZER != SIGMOID:
        x, limit, count = find(tile, call, bounds, number, listed, count, CALL)
    one, two = parameters(x, bounds[0], limit, number, CALL, CALL.RELATIVE)
    sums = no_sums(CALL.BLOCK_M)
    out = tile_zeros(CALL.BLOCK_M, CALL.BLOCK_E, tl.float32)
    for block in range(count):
        at = start + block * CALL.BLOCK_N
        if SURVEY:
            at = tl.load(listed + block)
        s, visible, place, _, _ = scores_at(tile, call, at, CALL)
        if SURVEY:
            d = below(s, visible, bounds[0])
        else:
            bounds = widen(bounds, s, visible)
            d = s
        omega, logs = shares(s, d, visible, place, one, two, number, CALL, (H & CALL.STATE) > 0, CALL.RELATIVE)
        if any_of(omega > 0) > 0:
            sums = gather(sums, omega, logs, d, tile, call, place, CALL)
            if CALL.E > 0:
                values = values_at(tile, call, at, CALL)
                out = product(omega.to(values.dtype), values, out)
    m, lowest, n, bad = bounds
    left_over, scale = finish(sums, m, n, number, CALL)
    places_here = begin + tl.arange(0, CALL.BLOCK_M)
    exists = places_here < structure.rows
    at_rows = (batch.to(tl.int64) * heads + head) * structure.rows + places_here
    plane = tl.num_programs(0).to(tl.int64) // per * structure.rows
    store(m, n, x, left_over, bad > 0, state + at_rows, plane, exists, CALL.STATE)
    if CALL.E > 0:
        scale = scale + tl.where(bad > 0, float("nan"), 0.0)
        column = tl.arange(0, CALL.BLOCK_E)
        pointers = output + at_rows[:, None] * CALL.E + column[None, :]
        written = (out * scale[:, None]).to(output.dtype.element_ty)
        tl.store(pointers, written, mask=exists[:, None] & (column < CALL.E)[None, :])
