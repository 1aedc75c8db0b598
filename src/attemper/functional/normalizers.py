"""Normalizers that give every visible key a share: softmax with a sink or scaled by log n, and sigmoid.

``softmax`` itself stands in ``measures.py``, those that give a weight of exactly 0 in ``sparse.py``. For all of them a
row with nothing visible is all 0, and a row with a visible NaN or +inf is NaN. All are twice differentiable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.errors import InputError
from attemper.functional.measures import ScoreRow, divisor_of, keys_last, of_each_row, quotient

_SINK_ADVICE = "A sink is one logit for each row, such as [H, 1] for scores [B, H, Q, K]."
_BIAS_ADVICE = "It is added to the scores: one for each row, such as [H, 1] for scores [B, H, Q, K]."
_SCALE_ADVICE = "It multiplies log n: one for each row, such as [H, 1] for scores [B, H, Q, K]; 1 is a common start."


def softmax_with_sink(
    scores: Tensor,
    sink_logits: float | Tensor,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Softmax with one more outcome, the sink, which takes its share and has no key: rows sum to less than 1.

    .. math:: w_j = \frac{e^{z_j}}{e^b + \sum_k e^{z_k}} = \mathrm{softmax}(z)_j \, \sigma(\mathrm{lse}(z) - b),
        \quad z = x / T

    Args:
        scores: x, floating; ``-inf`` hides a key.
        sink_logits: b, a number or broadcastable to ``scores`` without ``dim``; differentiated. Temperature does not
            divide it. -inf is plain softmax.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; a row sums to what the sink leaves, its mass.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, a number temperature is NaN or not above 0, the
            sink is NaN, or a tensor of sinks or temperatures does not fit.

    Source:
        Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks"; learned per head as in gpt-oss.

    Example:
        >>> softmax_with_sink(torch.zeros(3), 0.0)
        tensor([0.2500, 0.2500, 0.2500])
    """
    return _with_sink("softmax_with_sink", scores, sink_logits, dim, temperature, dtype)


def softmax_plus_one(
    scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Softmax with 1 added to its denominator, a sink of logit 0: a row of low scores may attend to nothing.

    .. math:: w_j = \frac{e^{z_j}}{1 + \sum_k e^{z_k}}, \quad z = x / T

    An offset of the scores matters: far above 0 the weights are those of softmax, far below they are 0.

    Args:
        scores: x, floating; ``-inf`` hides a key.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; a row sums to less than 1, to its mass.

    Raises:
        InputError: as :func:`softmax_with_sink`.

    Source:
        Miller 2023, "Attention Is Off By One".

    Example:
        >>> softmax_plus_one(torch.zeros(3))
        tensor([0.2500, 0.2500, 0.2500])
    """
    return _with_sink("softmax_plus_one", scores, 0.0, dim, temperature, dtype)


def scalable_softmax(
    scores: Tensor,
    s: float | Tensor = 1.0,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Softmax of ``s log(n)`` times the scores, n the visible keys of the row: as sharp over many keys as over few.

    .. math:: w = \mathrm{softmax}(s \log(n) \, x / T)

    Args:
        scores: x, floating; ``-inf`` hides a key, which n then does not count.
        s: a number or broadcastable to ``scores`` without ``dim``; differentiated.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; rows sum to 1 up to the rounding of ``dtype``.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, a number temperature is NaN or not above 0, s is
            NaN, or a tensor of them does not fit.

    Source:
        Nakanishi 2025, "Scalable-Softmax Is Superior for Attention".

    Example:
        >>> scalable_softmax(torch.tensor([1.0, 0.0]))
        tensor([0.6667, 0.3333])
    """
    x = keys_last("scalable_softmax", scores, dim)
    z = tempered_scores("scalable_softmax", x, temperature, shifted=True)
    scale = per_row("scalable_softmax", "s", s, x, _SCALE_ADVICE)
    visible = x != -math.inf
    multiplier = scale * visible.sum(-1).clamp(min=1).to(x.dtype).log()
    row = ScoreRow(torch.where(visible, torch.where(visible, z, 0.0) * multiplier[..., None], -math.inf), 1.0)
    return row.weights.movedim(-1, dim).to(dtype or scores.dtype)


def sigmoid(
    scores: Tensor,
    bias: float | Tensor = 0.0,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Each key is weighed by itself, not against the others: a row may sum to anything from 0 to n.

    .. math:: w_j = \sigma(x_j / T + b) = \frac{1}{1 + e^{-x_j / T - b}}

    A bias near -log(n) starts training where a row sums to about 1.

    Args:
        scores: x, floating; ``-inf`` hides a key.
        bias: b, a number or broadcastable to ``scores`` without ``dim``; differentiated.
            Temperature does not divide it.
        dim: the dimension of the keys; its weights do not depend on one another.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; a row sums to its mass.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, a number temperature is NaN or not above 0, the
            bias is NaN, or a tensor of them does not fit.

    Source:
        Ramapuram et al. 2024, "Theory, Analysis, and Best Practices for Sigmoid Self-Attention".

    Example:
        >>> sigmoid(torch.tensor([0.0, -math.inf, 100.0]))
        tensor([0.5000, 0.0000, 1.0000])
    """
    x = keys_last("sigmoid", scores, dim)
    shift = per_row("sigmoid", "bias", bias, x, _BIAS_ADVICE)
    visible = x != -math.inf
    z = over_temperature("sigmoid", torch.where(visible, x, 0.0), temperature)
    z = z + (shift[..., None] if isinstance(shift, Tensor) else shift)
    weights = with_broken_rows(x, torch.where(visible, torch.sigmoid(z), 0.0))
    return weights.movedim(-1, dim).to(dtype or scores.dtype)


def _with_sink(
    where: str,
    scores: Tensor,
    sink_logits: float | Tensor,
    dim: int,
    temperature: float | Tensor,
    dtype: torch.dtype | None,
) -> Tensor:
    row = ScoreRow.of(where, scores, dim, temperature)
    sink = per_row(where, "sink_logits", sink_logits, row.weights, _SINK_ADVICE)
    # The maximum and the sink first: their difference is exact where both are far from 0.
    mass = torch.sigmoid((row.maximum - sink) + row.log_total)
    return (row.weights * mass[..., None]).movedim(-1, dim).to(dtype or scores.dtype)


def over_temperature(where: str, x: Tensor, temperature: float | Tensor) -> Tensor:
    """``x / temperature`` for finite ``x`` [..., n]: inf / T would leave 0 * inf in the gradient of T."""
    divisor = divisor_of(where, temperature, x)
    return x if not isinstance(divisor, Tensor) and divisor == 1 else quotient(x, divisor)


def tempered_scores(where: str, x: Tensor, temperature: float | Tensor, *, shifted: bool = False) -> Tensor:
    """``x / temperature`` for ``x`` [..., n], -inf where hidden, up to a constant of each row.

    With ``shifted`` it is always relative to the row's maximum. Without, it is ``x`` itself at a temperature of 1: the
    kernels of the normalizers subtract the maximum themselves.
    """
    one = not isinstance(temperature, Tensor) and temperature == 1 and not isinstance(temperature, bool)
    if one and not shifted:
        return x
    visible = x != -math.inf
    # Before the division, while the difference is exact: no offset of the scores costs digits. A row's own constant
    # changes no weight, so it needs no gradient.
    top = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(())
    below = torch.where(visible, x - torch.where(top == -math.inf, 0.0, top), 0.0)
    return torch.where(visible, over_temperature(where, below, temperature), -math.inf)


def per_row(where: str, name: str, value: float | Tensor, x: Tensor, advice: str) -> float | Tensor:
    """A number, or a tensor in the type of ``x`` [..., n] with one for each row, [...]."""
    if isinstance(value, Tensor):
        return of_each_row(where, value, x, name, advice)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}({name}) must be a number or a tensor, got {type(value).__name__}. {advice}")
    if math.isnan(value):
        raise InputError(f"{where}({name}) must be a number, got nan. {advice}")
    return float(value)


def with_broken_rows(x: Tensor, weights: Tensor) -> Tensor:
    """``weights``, but NaN in the rows of ``x`` with a visible NaN or +inf."""
    if not x.shape[-1]:
        return weights
    return torch.where(x.detach().amax(-1, keepdim=True) < math.inf, weights, math.nan)
