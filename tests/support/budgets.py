r"""How far a result may be from the oracle: twice the error of eager PyTorch in the same type, plus counted roundings.

u is the unit roundoff of the compute type (2^-24, 2^-53). What the blocked kernel rounds beyond eager code, on score j
of a row:

- scale / T, and query times that (2), relative to ``sum_d |q_d k_d| |scale / T|``, through the softcap's derivative;
- s - m (1), and exp, whose result is off by up to 2 u as if its argument were (2):

.. math:: \delta_j = u \, (2 \, \mathrm{derivative}_j \, \mathrm{terms}_j + |s_j - m| + 2)

which moves a statistic by at most ``sum_j |d statistic / d s_j| delta_j`` (the oracle's own derivative, to first
order), a weight by ``delta_j + sum_k p_k delta_k`` relative to itself. Each state number is rounded when it leaves
(1), and what follows from two of them (2): ``3 u |value|``, for lse of |m| and |z|. A result in a narrower type is
rounded to it (1). Roundings average half of what they can reach: the mean error gets half the allowance.

The Triton kernel, and the native one where processors multiply bfloat16, multiply values with weights of the values'
own type, as every fast attention does; each weight is rounded to it once, relative to itself:
``u_type sum_j p_j |v_j|``, the entry ``rounded weights``.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.support import oracle_gradients
from tests.support.oracle import INTEGERS, ROW_STATISTICS, Array, Inputs, Row, numbers, statistic_gradients

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
SMOOTH = tuple(name for name in ROW_STATISTICS if name not in INTEGERS)


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff of the type that the scores of such inputs are computed in."""
    return UNIT[torch.float64 if dtype == torch.float64 else torch.float32]


def score_roundings(row: Row, u: float) -> Array:
    """delta [n]."""
    return u * (2 * row.derivative * row.terms + np.abs(row.scores - row.scores.max()) + 2)


def weight_roundings(row: Row, u: float) -> Array:
    """How far each weight may be off, relative to itself, [n]."""
    delta = score_roundings(row, u)
    return delta + (row.p * delta).sum()


def result_slacks(call: Inputs, answer: dict[str, Array], dtype: torch.dtype) -> dict[str, Array]:
    """What the counted roundings may add to the error of each entry of ``output`` and of each statistic."""
    u = unit(dtype)
    slacks = {name: np.zeros_like(answer[name]) for name in (*SMOOTH, "key_mass")}
    if call.value is not None:
        slacks["output"] = np.abs(answer["output"]) * _storage(dtype, dtype)
        slacks["rounded weights"] = np.zeros_like(answer["output"])
    for b, h, i in np.ndindex(*call.query.shape[:3]):
        row = call.row(b, h, i)
        if row.n == 0 or not row.finite:
            continue
        delta, relative, top = score_roundings(row, u), weight_roundings(row, u), abs(row.scores.max())
        moved = (np.abs(statistic_gradients(row, SMOOTH)) * delta).sum(-1)
        for place, name in enumerate(SMOOTH):
            own = abs(answer[name][b, h, i]) + {"lse": 2 * top, "mean_logit": top}.get(name, 0)
            slacks[name][b, h, i] = moved[place] + 3 * u * own
        slacks["key_mass"][b, h, row.places] += row.p * (relative + 3 * u)
        if call.value is not None:
            sizes = np.abs(call.values(b, h, row))
            slacks["output"][b, h, i] += (row.p * row.share * (relative + 3 * u)) @ sizes
            slacks["rounded weights"][b, h, i] = _storage(dtype, dtype) * (row.p * row.share) @ sizes
    return slacks


def gradient_slacks(
    call: Inputs, upstream: dict[str, Array], dtype: torch.dtype
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The oracle's gradients, and what the counted roundings may add to the error of each of their entries.

    A term is a product with one weight or two (2 relative errors of a weight) and at most 8 further factors and sums;
    D = dO . O uses an output that was rounded to its type.
    """
    u = unit(dtype)

    def relative(row: Row) -> Array:
        return 2 * weight_roundings(row, u) + 8 * u + _storage(dtype, dtype)

    return oracle_gradients.gradients(call, upstream, relative)


def stored(slack: Array, want: Array, own: torch.dtype, dtype: torch.dtype) -> Array:
    """``slack`` and one rounding to ``own``, where that is narrower than the compute type."""
    return slack + np.abs(want) * _storage(own, dtype)


def _storage(own: torch.dtype, dtype: torch.dtype) -> float:
    return UNIT[own] if UNIT[own] > unit(dtype) else 0.0


def assert_within(name: str, got: torch.Tensor, want: Array, eager: torch.Tensor, slack: Array) -> None:
    """``got`` is finite where ``want`` is, equal to it elsewhere, and within the budget in the maximum and the mean."""
    mine, base = numbers(got), numbers(eager)
    assert mine.shape == want.shape, f"{name}: shape {mine.shape}, oracle {want.shape}"
    finite = np.isfinite(want)
    assert np.isfinite(mine[finite]).all(), f"{name}: {int((~np.isfinite(mine[finite])).sum())} results are not finite"
    strange = mine[~finite], want[~finite]
    assert np.array_equal(*strange, equal_nan=True), f"{name}: {strange[0][:4]} where the oracle has {strange[1][:4]}"
    if not finite.any():
        return
    error, slack = np.abs(mine[finite] - want[finite]), slack[finite]
    yardstick = np.abs(base[finite] - want[finite])
    yardstick = np.where(np.isfinite(yardstick), yardstick, 0)
    budget = 2 * yardstick.max() + slack
    worst = int(np.argmax(error - budget))
    assert error[worst] <= budget[worst], (
        f"{name}: error {error[worst]:.3e} at entry {worst}, budget {budget[worst]:.3e} = 2 x {yardstick.max():.3e} of "
        f"eager + {slack[worst]:.3e} of roundings"
    )
    mean_budget = 2 * yardstick.mean() + slack.mean() / 2
    assert error.mean() <= mean_budget, (
        f"{name}: mean error {error.mean():.3e}, budget {mean_budget:.3e} = 2 x {yardstick.mean():.3e} of eager + "
        f"{slack.mean() / 2:.3e} of roundings"
    )
