r"""Statistics from the state that a kernel leaves, and the one law by which two states merge.

The state of a row is relative to its maximum m (``kernels/blocked`` lists it), so these formulas add small numbers of
one
sign: ``lse = m + z``, ``H = z + a``, ``effective = 1 / c``, ``max_weight = exp(-z)``, ``mu = m - a``. Autograd
    differentiates them; the kernel differentiates the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]
"""Letter -> [B, H, Q]."""

VANISHED = -1000.0
"""exp(VANISHED) is 0: a finite distance for a part that sees nothing, so that 0 times it stays 0."""


def derived(state: State, names: Iterable[str], sink: Tensor | None) -> dict[str, Tensor]:
    """The statistics ``names`` of rows in this state, each [B, H, Q]. ``sink`` [H] or None."""
    n = state["n"]
    seen = n > 0
    maximum, log_total = state["m"], state["z"]
    lse = maximum + log_total
    values: dict[str, Tensor] = {"lse": lse, "max_logit": maximum}
    names = tuple(names)
    if "mass" in names or "entropy_with_sink" in names:
        values["mass"] = _mass(lse, seen, sink)
    if "a" in state:
        entropy = at_most(log_total + state["a"], log_count(n))
        values["entropy"] = entropy
        values["normalized_entropy"] = at_most(entropy / torch.where(n > 1, n, 2.0).log(), torch.ones_like(n))
        values["mean_logit"] = torch.where(seen, maximum, 0.0) - state["a"]
        if "entropy_with_sink" in names:
            values["entropy_with_sink"] = _with_sink(entropy, values["mass"], lse, seen, sink)
    values["max_weight"] = torch.where(seen, torch.exp(-log_total), 0.0)
    values["visible_keys"] = values["support_size"] = n.to(torch.int64)
    for letter, name in (("v", "logit_variance"), ("f", "first_token_mass"), ("t", "mean_distance"), ("g", "gini")):
        if letter in state:
            values[name] = state[letter]
    if "c" in state:
        values["effective_tokens"] = torch.where(seen, 1.0 / torch.where(seen, state["c"], 1.0), 0.0)
    return {name: values[name] for name in names if name in values}


def _mass(lse: Tensor, seen: Tensor, sink: Tensor | None) -> Tensor:
    """Weight applied to values: 1, or sigmoid(lse - sink); 0 where nothing is seen, NaN where a score is not finite."""
    finite = torch.where(seen, lse, 0.0)
    if sink is None:
        return torch.where(seen, finite - finite + 1.0, 0.0)
    return torch.where(seen, torch.sigmoid(finite - sink.to(lse.dtype)[:, None]), 0.0)


def _with_sink(entropy: Tensor, mass: Tensor, lse: Tensor, seen: Tensor, sink: Tensor | None) -> Tensor:
    """mass H + h(mass), h the binary entropy: the sink counted as one more outcome."""
    if sink is None:
        return entropy
    gap = torch.where(seen, lse, 0.0) - sink.to(lse.dtype)[:, None]
    log_sigmoid = torch.nn.functional.logsigmoid
    binary = -mass * log_sigmoid(gap) - (1 - mass) * log_sigmoid(-gap)
    return torch.where(seen, mass * entropy + binary, 0.0)


def log_count(n: Tensor) -> Tensor:
    """log n of counts given as floats, rounded down (0 for n = 0), so that no entropy exceeds the true bound by a
    rounding.
    """
    wide = torch.float32 if n.device.type == "mps" else torch.float64
    exact = torch.where(n > 0, n, 1.0).to(wide).log()
    rounded = exact.to(n.dtype)
    # In the widest type the logarithm itself may have been rounded up: one step down is below it for certain.
    above = rounded.to(wide) > exact if n.dtype != wide else torch.ones_like(n, dtype=torch.bool)
    return torch.where(above, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded)


def at_most(value: Tensor, bound: Tensor) -> Tensor:
    """``value`` cut at ``bound`` without touching its gradient: only rounding ever exceeds it."""
    return value - (value - bound).detach().clamp(min=0.0)


def merged(one: State, two: State) -> dict[str, Tensor]:
    """The state over the keys of both parts, ``two`` holding the later keys. Associative; the empty row is the
    identity.

    With base = max(m1, m2), t = m_i - base, w_i = exp(t_i + z_i), p_i = w_i / (w_1 + w_2) and d_i = t_i - a_i::

        z = log(w_1 + w_2)     a = -sum p_i d_i     v = sum p_i (v_i + (d_i + a)^2)     c = sum p_i^2 c_i
    """
    wide = torch.float32 if one["m"].device.type == "mps" else torch.float64
    parts = [{letter: value.to(wide) for letter, value in part.items()} for part in (one, two)]
    maximum = torch.maximum(parts[0]["m"], parts[1]["m"])
    base = torch.where(maximum == -math.inf, 0.0, maximum)
    steps = [torch.where(part["n"] > 0, part["m"] - base, VANISHED).clamp(min=VANISHED) for part in parts]
    shares = [
        torch.where(part["n"] > 0, torch.exp(step + part["z"]), 0.0) for part, step in zip(parts, steps, strict=True)
    ]
    total = shares[0] + shares[1]
    n = parts[0]["n"] + parts[1]["n"]
    total = torch.where(n > 0, total, 1.0)
    p = [share / total for share in shares]
    result = {"m": maximum, "z": total.log(), "n": n}
    if "a" in one:
        d = [step - part["a"] for part, step in zip(parts, steps, strict=True)]
        result["a"] = -(p[0] * d[0] + p[1] * d[1])
        if "v" in one:
            spread = [part["v"] + (x + result["a"]) ** 2 for part, x in zip(parts, d, strict=True)]
            result["v"] = p[0] * spread[0] + p[1] * spread[1]
    if "c" in one:
        result["c"] = p[0] ** 2 * parts[0]["c"] + p[1] ** 2 * parts[1]["c"]
    if "f" in one:
        # The first token stands in the first part, unless no row of the sequence sees that part: then it is padding.
        padding = ~(parts[0]["n"] > 0).flatten(1).any(1)[:, None, None]
        result["f"] = p[0] * parts[0]["f"] + torch.where(padding, p[1] * parts[1]["f"], 0.0)
    return {letter: value.to(one["m"].dtype) for letter, value in result.items()}


def joined_output(
    outputs: tuple[Tensor, Tensor], states: tuple[State, State], sinks: tuple[Tensor | None, ...]
) -> Tensor:
    """The output over the keys of both parts: each weighted by its denominator, a sink counted where it was given."""
    sink = next((s for s in sinks if s is not None), None)
    base = torch.maximum(states[0]["m"], states[1]["m"])
    if sink is not None:
        base = torch.maximum(base, sink.to(base.dtype)[:, None])
    base = torch.where(base == -math.inf, 0.0, base)
    shares = []
    for state, own in zip(states, sinks, strict=True):
        step = torch.where(state["n"] > 0, state["m"] - base, VANISHED)
        share = torch.where(state["n"] > 0, torch.exp(step + state["z"]), 0.0)
        shares.append(share if own is None else share + torch.exp(own.to(base.dtype)[:, None] - base))
    total = shares[0] + shares[1]
    total = torch.where(total > 0, total, 1.0)
    dtype = torch.promote_types(outputs[0].dtype, total.dtype)
    parts = [o.to(dtype) * (share / total)[..., None] for o, share in zip(outputs, shares, strict=True)]
    return (parts[0] + parts[1]).to(outputs[0].dtype)


def divided(x: Tensor | float, temperature: Tensor) -> Tensor:
    """x / T, with the gradient of T taken as -(dx . x / T) / T: x / T^2 would overflow at a T of 1e-20. inf gives 0."""
    fixed = temperature.detach()
    infinite = torch.isinf(fixed)
    ratio = torch.where(infinite, 1.0, fixed) / torch.where(infinite, 1.0, temperature)
    return x / fixed * ratio
