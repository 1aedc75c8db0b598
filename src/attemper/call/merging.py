"""The law by which two states of the same rows merge, each over a part of the keys; docs/design/0002."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.call.formulas import VANISHED
from attemper.call.state import State
from attemper.statistics import Column

Pair = tuple[Tensor, Tensor]
"""A quantity of both parts."""


def merge(one: State, two: State) -> dict[Column, Tensor]:
    """The state over the keys of both parts, of which ``two`` holds the later ones.

    Associative; the empty row is the identity.

    With base = max(m1, m2), t = m_i - base, w_i = exp(t_i + z_i), p_i = w_i / (w_1 + w_2) and d_i = t_i - a_i::

        z = log(w_1 + w_2)     a = -sum p_i d_i     v = sum p_i (v_i + (d_i + a)^2)     c = sum p_i^2 c_i

    The depth and the variance without weights, as a and v with n_i / n in the place of p_i.
    """
    wide = torch.float32 if one[Column.MAXIMUM].device.type == "mps" else torch.float64
    parts = [{column: value.to(wide) for column, value in part.items()} for part in (one, two)]

    def both(column: Column) -> Pair:
        return parts[0][column], parts[1][column]

    maxima, counts = both(Column.MAXIMUM), both(Column.VISIBLE_KEYS)
    maximum, n = torch.maximum(*maxima), counts[0] + counts[1]
    base = torch.where(maximum == -math.inf, 0.0, maximum)
    steps = [torch.where(k > 0, m - base, VANISHED).clamp(min=VANISHED) for k, m in zip(counts, maxima, strict=True)]
    sums = zip(counts, steps, both(Column.LOG_SUM), strict=True)
    shares = [torch.where(k > 0, torch.exp(step + z), 0.0) for k, step, z in sums]
    total = torch.where(n > 0, shares[0] + shares[1], 1.0)
    p = shares[0] / total, shares[1] / total
    result = {Column.MAXIMUM: maximum, Column.LOG_SUM: total.log(), Column.VISIBLE_KEYS: n}
    if Column.MEAN_DEPTH in one:
        a = both(Column.MEAN_DEPTH)
        spread = both(Column.VARIANCE) if Column.VARIANCE in one else None
        mean, variance = _moments(p, (steps[0] - a[0], steps[1] - a[1]), spread)
        result[Column.MEAN_DEPTH] = mean
        if variance is not None:
            result[Column.VARIANCE] = variance
    if Column.SQUARED_WEIGHTS in one:
        c = both(Column.SQUARED_WEIGHTS)
        result[Column.SQUARED_WEIGHTS] = p[0] ** 2 * c[0] + p[1] ** 2 * c[1]
    if Column.PLAIN_VARIANCE in one:
        # Not cut at VANISHED: a key without weight counts here.
        depths = zip(counts, maxima, both(Column.PLAIN_DEPTH), strict=True)
        d = [torch.where(k > 0, m - base, 0.0) - u for k, m, u in depths]
        each = counts[0] / n.clamp(min=1.0), counts[1] / n.clamp(min=1.0)
        mean, variance = _moments(each, (d[0], d[1]), both(Column.PLAIN_VARIANCE))
        assert variance is not None
        result |= {Column.PLAIN_DEPTH: mean, Column.PLAIN_VARIANCE: variance}
    if Column.SPAN in one:
        f = both(Column.SPAN)
        result[Column.SPAN] = p[0] * f[0] + p[1] * f[1]
    if Column.FIRST_TOKENS in one:
        # The first token stands in the first part, unless no row of the sequence sees that part: then it is padding.
        padding = ~(counts[0] > 0).flatten(1).any(1)[:, None, None]
        f = both(Column.FIRST_TOKENS)
        result[Column.FIRST_TOKENS] = p[0] * f[0] + torch.where(padding, p[1] * f[1], 0.0)
    return {column: value.to(one[Column.MAXIMUM].dtype) for column, value in result.items()}


def _moments(shares: Pair, d: Pair, variances: Pair | None) -> tuple[Tensor, Tensor | None]:
    """How far the mean of both parts lies below the base, and their variance, from each part's mean d and variance."""
    depth = -(shares[0] * d[0] + shares[1] * d[1])
    if variances is None:
        return depth, None
    spread = variances[0] + (d[0] + depth) ** 2, variances[1] + (d[1] + depth) ** 2
    return depth, shares[0] * spread[0] + shares[1] * spread[1]


def joined_output(
    outputs: tuple[Tensor, Tensor], states: tuple[State, State], sinks: tuple[Tensor | None, ...]
) -> Tensor:
    """The output over the keys of both parts: each weighted by its denominator, a sink counted where it was given."""
    sink = next((s for s in sinks if s is not None), None)
    base = torch.maximum(states[0][Column.MAXIMUM], states[1][Column.MAXIMUM])
    if sink is not None:
        base = torch.maximum(base, sink.to(base.dtype)[:, None])
    base = torch.where(base == -math.inf, 0.0, base)
    shares = []
    for state, own in zip(states, sinks, strict=True):
        step = torch.where(state[Column.VISIBLE_KEYS] > 0, state[Column.MAXIMUM] - base, VANISHED)
        share = torch.where(state[Column.VISIBLE_KEYS] > 0, torch.exp(step + state[Column.LOG_SUM]), 0.0)
        shares.append(share if own is None else share + torch.exp(own.to(base.dtype)[:, None] - base))
    total = shares[0] + shares[1]
    total = torch.where(total > 0, total, 1.0)
    dtype = torch.promote_types(outputs[0].dtype, total.dtype)
    parts = [o.to(dtype) * (share / total)[..., None] for o, share in zip(outputs, shares, strict=True)]
    return (parts[0] + parts[1]).to(outputs[0].dtype)
