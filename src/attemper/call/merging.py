"""The law by which two states of the same rows merge, each over a part of the keys; docs/design/0002."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.call.formulas import VANISHED
from attemper.call.state import State
from attemper.statistics import Column


def merged(one: State, two: State) -> dict[Column, Tensor]:
    """The state over the keys of both parts, ``two`` holding the later keys. Associative; the empty row is
    the identity.

    With base = max(m1, m2), t = m_i - base, w_i = exp(t_i + z_i), p_i = w_i / (w_1 + w_2) and d_i = t_i - a_i::

        z = log(w_1 + w_2)     a = -sum p_i d_i     v = sum p_i (v_i + (d_i + a)^2)     c = sum p_i^2 c_i

    u and y, the mean and variance without weights, as a and v with n_i / n in the place of p_i.
    """
    wide = torch.float32 if one[Column.MAXIMUM].device.type == "mps" else torch.float64
    parts = [{column: value.to(wide) for column, value in part.items()} for part in (one, two)]
    maximum = torch.maximum(parts[0][Column.MAXIMUM], parts[1][Column.MAXIMUM])
    base = torch.where(maximum == -math.inf, 0.0, maximum)
    steps = [torch.where(part[Column.VISIBLE_KEYS] > 0, part[Column.MAXIMUM] - base, VANISHED).clamp(min=VANISHED) for part in parts]
    shares = [
        torch.where(part[Column.VISIBLE_KEYS] > 0, torch.exp(step + part[Column.LOG_SUM]), 0.0) for part, step in zip(parts, steps, strict=True)
    ]
    total = shares[0] + shares[1]
    n = parts[0][Column.VISIBLE_KEYS] + parts[1][Column.VISIBLE_KEYS]
    total = torch.where(n > 0, total, 1.0)
    p = [share / total for share in shares]
    result = {Column.MAXIMUM: maximum, Column.LOG_SUM: total.log(), Column.VISIBLE_KEYS: n}
    if Column.MEAN_DEPTH in one:
        d = [step - part[Column.MEAN_DEPTH] for part, step in zip(parts, steps, strict=True)]
        result[Column.MEAN_DEPTH] = -(p[0] * d[0] + p[1] * d[1])
        if Column.VARIANCE in one:
            spread = [part[Column.VARIANCE] + (x + result[Column.MEAN_DEPTH]) ** 2 for part, x in zip(parts, d, strict=True)]
            result[Column.VARIANCE] = p[0] * spread[0] + p[1] * spread[1]
    if Column.SQUARED_WEIGHTS in one:
        result[Column.SQUARED_WEIGHTS] = p[0] ** 2 * parts[0][Column.SQUARED_WEIGHTS] + p[1] ** 2 * parts[1][Column.SQUARED_WEIGHTS]
    if Column.PLAIN_VARIANCE in one:
        result |= _merged_moments(parts, base)
    if Column.FIRST_TOKENS in one:
        # The first token stands in the first part, unless no row of the sequence sees that part: then it is padding.
        padding = ~(parts[0][Column.VISIBLE_KEYS] > 0).flatten(1).any(1)[:, None, None]
        result[Column.FIRST_TOKENS] = p[0] * parts[0][Column.FIRST_TOKENS] + torch.where(padding, p[1] * parts[1][Column.FIRST_TOKENS], 0.0)
    return {column: value.to(one[Column.MAXIMUM].dtype) for column, value in result.items()}


def _merged_moments(parts: list[dict[Column, Tensor]], base: Tensor) -> dict[Column, Tensor]:
    """u and y of both parts' keys, each counted once."""
    n = (parts[0][Column.VISIBLE_KEYS] + parts[1][Column.VISIBLE_KEYS]).clamp(min=1.0)
    shares = [part[Column.VISIBLE_KEYS] / n for part in parts]
    # Not cut at VANISHED: a key without weight counts here.
    d = [torch.where(part[Column.VISIBLE_KEYS] > 0, part[Column.MAXIMUM] - base, 0.0) - part[Column.PLAIN_DEPTH] for part in parts]
    u = -(shares[0] * d[0] + shares[1] * d[1])
    spread = [part[Column.PLAIN_VARIANCE] + (x + u) ** 2 for part, x in zip(parts, d, strict=True)]
    return {Column.PLAIN_DEPTH: u, Column.PLAIN_VARIANCE: shares[0] * spread[0] + shares[1] * spread[1]}


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
