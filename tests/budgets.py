r"""How far a result may be from the oracle: twice the error of eager PyTorch in the same type, plus counted roundings.

u is the unit roundoff of the compute type (2^-24, 2^-53). Beyond what eager code does, the blocked kernel rounds

- the scores: scale / T (1), query * scale / T (1), s - m (1), and exp, whose result is off by up to 2 u, as if its argument
  were (2): a perturbation ``delta = u (3 S + 2)`` of every score, with S a bound of sum_d |q_d k_d| |scale / T| + |bias|;
- each state number when it leaves (1) and what is derived from two of them (2): ``3 u |value|``, for lse of |m| and |z|.

A perturbation of the scores of at most delta moves a statistic by at most L delta, L the sup-norm Lipschitz constants below
(X = s - mu, E|X| <= sd by Jensen). Roundings average half of what they can reach: the mean error gets half the allowance.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.oracle import FLOAT, INTEGERS, Array, Inputs, numbers

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff of the type that the scores of such inputs are computed in."""
    return UNIT[torch.float64 if dtype == torch.float64 else torch.float32]


def score_bound(call: Inputs) -> float:
    """S: no visible score's absolute terms add up to more."""
    repeats = call.query.shape[1] // call.key.shape[1]
    key = np.abs(np.repeat(call.key, repeats, axis=1))
    terms = np.einsum("bhqd,bhkd->bhqk", np.abs(call.query), key) * (abs(call.scale) / call.temperature)[..., None]
    if call.bias is not None:
        terms = terms + np.abs(np.where(call.visible, call.bias, 0))
    return float((terms * call.visible).max(initial=0))


def perturbation(call: Inputs, dtype: torch.dtype) -> float:
    """delta: how far the kernel's own roundings move a score."""
    return unit(dtype) * (3 * score_bound(call) + 2)


def lipschitz(name: str, answer: dict[str, Array]) -> float:
    """How much a statistic moves when no score moves by more than 1."""
    variance = float(answer["logit_variance"].max(initial=0))
    sd = variance**0.5
    most = float(answer["effective_tokens"].max(initial=0))
    table = {
        "lse": 1.0,  # sum p
        "max_logit": 1.0,
        "mean_logit": 1 + sd,  # sum p |1 + X|
        "entropy": sd,  # sum p |X|
        "normalized_entropy": sd / np.log(2.0),
        "entropy_with_sink": sd + 1.0,  # mass H + h(mass): sd, and |H + h'| mass (1 - mass) <= max of x log x terms < 1 a nat
        "logit_variance": 2 * variance + 2 * sd,  # sum p |X^2 + 2 X - Var|
        "effective_tokens": 4 * most,  # 2 eff^2 sum p |p - c| <= 4 eff^2 c
        "max_weight": 2.0,  # 2 p (1 - p) <= 1/2, and the weight's own exponent
        "mass": 0.25,
        "first_token_mass": 0.5,  # 2 f (1 - f)
        "mean_distance": 2 * float(answer["mean_distance"].max(initial=0)) + 1,  # sum p |t - E t| <= 2 E t
        "gini": 2.0,  # |rank weights| <= 1, sum p |rank - mean| <= 2
        "key_mass": 0.5 * answer["lse"].shape[2],  # 2 p (1 - p) a query
    }
    return table[name]


def statistic_slack(name: str, answer: dict[str, Array], call: Inputs, dtype: torch.dtype) -> float:
    if name in INTEGERS:
        return 0.0
    finite = answer[name][np.isfinite(answer[name])]
    size = float(np.abs(finite).max(initial=0))
    if name == "lse":
        m = answer["max_logit"]
        size += 2 * float(np.abs(m[np.isfinite(m)]).max(initial=0))
    if name == "mean_logit":
        size += float(np.abs(answer["max_logit"][np.isfinite(answer["max_logit"])]).max(initial=0))
    return lipschitz(name, answer) * perturbation(call, dtype) + 3 * unit(dtype) * size


def output_slack(call: Inputs, dtype: torch.dtype) -> float:
    """|do| <= 2 delta max|v| (sum p |X| with X <= delta), two roundings in the compute type, one in the output's."""
    assert call.value is not None
    largest = float(np.abs(call.value).max(initial=0))
    return largest * (2 * perturbation(call, dtype) + 2 * unit(dtype) + _storage(dtype))


def gradient_slack(magnitude: Array, call: Inputs, dtype: torch.dtype) -> float:
    """Every term of dL/ds is a product with weights (2 delta relative, p / Z) and at most 8 further factors or sums; the output
    that enters D = dO . O and the gradient itself are rounded to the input's type (2)."""
    relative = 4 * perturbation(call, dtype) + 8 * unit(dtype) + 2 * _storage(dtype)
    return float(magnitude.max(initial=0)) * relative


def _storage(dtype: torch.dtype) -> float:
    return UNIT[dtype] if dtype in (torch.float16, torch.bfloat16) else 0.0


def assert_within(name: str, got: torch.Tensor, want: Array, eager: torch.Tensor, slack: float) -> None:
    """``got`` is finite where ``want`` is, equal to it where it is not, and within the budget in the maximum and the mean."""
    mine, base = numbers(got), numbers(eager)
    assert mine.shape == want.shape, f"{name}: shape {mine.shape}, oracle {want.shape}"
    finite = np.isfinite(want)
    assert np.isfinite(mine[finite]).all(), f"{name}: {int((~np.isfinite(mine[finite])).sum())} results are not finite"
    strange = mine[~finite], want[~finite]
    assert np.array_equal(*strange, equal_nan=True), f"{name}: {strange[0][:4]} where the oracle has {strange[1][:4]}"
    error = np.abs(mine - want)[finite]
    yardstick = np.abs(base - want)[finite]
    yardstick = yardstick[np.isfinite(yardstick)]
    worst, mean = float(error.max(initial=0)), float(error.mean()) if error.size else 0.0
    worst_budget = 2 * float(yardstick.max(initial=0)) + slack
    mean_budget = 2 * float(yardstick.mean() if yardstick.size else 0.0) + slack / 2
    figures = f"max error {worst:.3e} of {worst_budget:.3e}, mean {mean:.3e} of {mean_budget:.3e} (slack {slack:.3e})"
    assert worst <= worst_budget, f"{name}: {figures}"
    assert mean <= mean_budget, f"{name}: {figures}"


__all__ = ["FLOAT", "assert_within", "gradient_slack", "output_slack", "statistic_slack"]
