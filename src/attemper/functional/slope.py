"""How fast entropy moves with temperature, in closed form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.call.formulas import divided
from attemper.checks import positive_number
from attemper.errors import InputError
from attemper.functional.score_rows import ADVICE, floating, of_each_row, with_keys_last


def entropy_slope(
    scores: Tensor, temperature: float | Tensor = 1.0, *, dim: int = -1, bias: Tensor | None = None
) -> Tensor:
    r"""Derivative of the entropy of ``softmax(scores / temperature + bias)`` with respect to the temperature.

    .. math::
        \frac{dH}{dT} = \frac{1}{T} \mathrm{Cov}_p(s, x)
                      = \frac{1}{T} \sum_j p_j (s_j - E_p[s]) (x_j - E_p[x]), \quad x = y / T, \ s = x + b

    Without a bias s is x, so it is :math:`\mathrm{Var}_p(y) / T^3 \ge 0`: entropy only rises with temperature. With a
    bias, which temperature does not divide, it can fall.

    Args:
        scores: y, floating; ``-inf`` hides a key.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. inf gives a slope of 0.
        dim: the dimension of the keys.
        bias: b in logits, floating, broadcastable to ``scores``: a position bias, ALiBi. ``-inf`` hides a key.

    Returns:
        [...] without ``dim``, nats per unit of temperature, float32, or float64 for float64 scores. A row with nothing
        visible gives 0. Differentiable, twice.

    Raises:
        InputError: scores or bias are not floating, they or a tensor of temperatures do not fit together, there is no
            such ``dim``, or a number temperature is NaN or not above 0.

    Source:
        dH/ds_j = -p_j (s_j - E_p[s]) and ds_j/dT = -x_j / T; derived in docs/lab/temperature.md.

    Example:
        >>> entropy_slope(torch.tensor([0.0, 1.0])).item() > 0
        True
    """
    y = floating("entropy_slope", "scores", scores)
    b = (
        None
        if bias is None
        else with_keys_last("entropy_slope", fitting_bias("entropy_slope", bias, y).to(y.dtype), dim)
    )
    y = with_keys_last("entropy_slope", y, dim)
    visible = y != -math.inf
    if b is not None:
        visible = visible & (b != -math.inf)
        b = torch.where(visible, b, 0.0)
    hidden = torch.where(visible, y, 0.0)
    if isinstance(temperature, Tensor):
        each = of_each_row("entropy_slope", temperature, y)
        divisor: float | Tensor = each[..., 0]
        x = divided(hidden, each)
    else:
        divisor = positive_number("entropy_slope(temperature=...)", temperature, ADVICE, infinite=True)
        x = hidden / divisor
    return covariance(x, x if b is None else x + b, visible) / divisor


def fitting_bias(where: str, bias: Tensor, scores: Tensor) -> Tensor:
    """``bias`` in the shape of the scores.

    Raises:
        InputError: it is not floating, or does not fit.
    """
    try:
        return floating(where, "bias", bias).expand(scores.shape)
    except RuntimeError as error:
        raise InputError(
            f"{where}(bias) must be broadcastable to the scores {list(scores.shape)}, got {list(bias.shape)}."
        ) from error


def covariance(x: Tensor, s: Tensor, visible: Tensor) -> Tensor:
    """Cov_p(s, x) under p = softmax(s) of the visible keys, along the last dimension; 0 where there are none."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    top = torch.where(visible, s, -math.inf).argmax(-1, keepdim=True)
    # Relative to the key of the largest score: a covariance is free of shifts, and large offsets would cost digits.
    near, above = s - s.gather(-1, top).detach(), x - x.gather(-1, top).detach()
    e = torch.where(visible, torch.exp(near), 0.0)
    p = e / torch.where(visible.any(-1, keepdim=True), e.sum(-1, keepdim=True), 1.0)
    # A key without weight counts for nothing, however far it is: its distance squared may overflow. NaN stays.
    counts = ~(p == 0)
    near, above = torch.where(counts, near, 0.0), torch.where(counts, above, 0.0)
    near, above = (part - (p * part).sum(-1, keepdim=True) for part in (near, above))
    return (p * near * above).sum(-1)
