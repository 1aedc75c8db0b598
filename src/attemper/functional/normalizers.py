"""Normalizers: softmax with a sink or scaled by log n, sigmoid, and those with weights of exactly 0: sparsemax, entmax,
and softmax over the largest scores or weights alone.

``softmax`` itself stands in ``measures.py``. For all of them a row with nothing visible is all 0, and a row with a
visible NaN or +inf is NaN. All are twice differentiable.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.call import normalizer, row_operator
from attemper.call.transforms import SOFTMAX_INSTEAD, refuse_onnx
from attemper.errors import InputError
from attemper.functional.measures import ScoreRow, divisor_of, keys_last, of_each_row, quotient, softmax

_SINK_ADVICE = "A sink is one logit for each row, such as [H, 1] for scores [B, H, Q, K]."
_BIAS_ADVICE = "It is added to the scores: one for each row, such as [H, 1] for scores [B, H, Q, K]."
_SCALE_ADVICE = "It multiplies log n: one for each row, such as [H, 1] for scores [B, H, Q, K]; 1 is a common start."
_ALPHA_ADVICE = "1 is softmax, 1.5 entmax15, 2 sparsemax; larger is sparser. One for each row: [H, 1] for heads."


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
    row = ScoreRow.of("softmax_with_sink", scores, dim, temperature)
    sink = per_row("softmax_with_sink", "sink_logits", sink_logits, row.weights, _SINK_ADVICE)
    return _beside_sink(row, sink).movedim(-1, dim).to(dtype or scores.dtype)


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
    row = ScoreRow.of("softmax_plus_one", scores, dim, temperature)
    return _beside_sink(row, 0.0).movedim(-1, dim).to(dtype or scores.dtype)


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
    weights = torch.where(visible, torch.sigmoid(z), 0.0)
    if x.shape[-1]:
        weights = torch.where(x.detach().amax(-1, keepdim=True) < math.inf, weights, math.nan)
    return weights.movedim(-1, dim).to(dtype or scores.dtype)


def sparsemax(
    scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    r"""The point of the simplex nearest to the scores: weights of low scores are exactly 0.

    .. math:: w_j = [z_j - \tau]_+, \quad \sum_j w_j = 1, \quad z = x / T

    A key whose score is 1 (times the temperature) or more below the largest has no weight, and no gradient.

    Args:
        scores: x, floating; ``-inf`` hides a key.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; rows sum to 1 up to the rounding of ``dtype``. Differentiable, twice.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, a number temperature is NaN or not above 0, or a
            tensor of them does not fit.

    Source:
        Martins and Astudillo 2016, "From Softmax to Sparsemax"; tau is found by the iteration of Michelot 1986.

    Example:
        >>> sparsemax(torch.tensor([1.0, 0.5, -1.0]))
        tensor([0.7500, 0.2500, 0.0000])
    """
    z = tempered_scores("sparsemax", keys_last("sparsemax", scores, dim), temperature)
    return _weights("sparsemax", "sparsemax", z, dim, dtype or scores.dtype)


def entmax15(
    scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Half way from softmax to sparsemax: weights of low scores are exactly 0, and reach it smoothly.

    .. math:: w_j = [z_j / 2 - \tau]_+^2, \quad \sum_j w_j = 1, \quad z = x / T

    A key whose score is 2 (times the temperature) or more below the largest has no weight, and no gradient.

    Args and errors as :func:`sparsemax`. Returns weights in the shape of ``scores``, differentiable twice.

    Source:
        Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models".

    Example:
        >>> entmax15(torch.tensor([1.0, 1.0, -1.0]))
        tensor([0.5000, 0.5000, 0.0000])
    """
    z = tempered_scores("entmax15", keys_last("entmax15", scores, dim), temperature)
    return _weights("entmax15", "entmax15", z, dim, dtype or scores.dtype)


def entmax(
    scores: Tensor,
    alpha: float | Tensor = 1.5,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""alpha-entmax, from softmax (alpha = 1) over sparsemax (2) towards the largest score alone.

    .. math:: w_j = [(\alpha - 1) z_j - \tau]_+^{1 / (\alpha - 1)}, \quad \sum_j w_j = 1, \quad z = x / T

    It maximises :math:`w \cdot z` plus the Tsallis entropy :math:`(1 - \sum_j w_j^\alpha) / (\alpha (\alpha - 1))`.

    Args:
        scores: x, floating; ``-inf`` hides a key.
        alpha: at least 1, a number or broadcastable to ``scores`` without ``dim``, such as [H, 1] for heads. A tensor
            is differentiated, exactly, down to 1; its numbers are not checked: a row where it is below 1 is NaN.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; rows sum to 1 up to the rounding of ``dtype``. Differentiable, twice. Above
        alpha = 2 a weight that is nearly 0 moves arbitrarily fast with its score, and so does its gradient.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, alpha is below 1, infinite or NaN, a number
            temperature is NaN or not above 0, or a tensor of them does not fit.

    Source:
        Peters, Niculae and Martins 2019, "Sparse Sequence-to-Sequence Models"; alpha learned: Correia, Niculae and
        Martins 2019, "Adaptively Sparse Transformers". Its gradient: docs/derivations/normalizers.md.

    Example:
        >>> entmax(torch.tensor([1.0, 0.5, -1.0]), 2.0)
        tensor([0.7500, 0.2500, 0.0000])
    """
    x = keys_last("entmax", scores, dim)
    each = _alphas("entmax", alpha, x)
    z = tempered_scores("entmax", x, temperature)
    name = normalizer.entmax(each).name
    if name == "softmax":
        return softmax(z).movedim(-1, dim).to(dtype or scores.dtype)
    return _weights("entmax", name, z, dim, dtype or scores.dtype, each)


def entmax_iterations(
    scores: Tensor, alpha: float | Tensor = 1.5, *, dim: int = -1, temperature: float | Tensor = 1.0
) -> Tensor:
    """How often the iteration for any alpha adds up the weights of each row before they sum to 1.

    This is the iteration in PyTorch. Sparsemax and entmax15 have another, and so have the native kernels. 0 where there
    is nothing to search: alpha = 1, nothing visible, a score that is not finite.

    Args and errors as :func:`entmax`.

    Returns:
        [...] without ``dim``, int64.

    Example:
        >>> int(entmax_iterations(torch.tensor([3.0, 0.0]), 1.3)) < 10
        True
    """
    x = keys_last("entmax_iterations", scores, dim)
    each = _alphas("entmax_iterations", alpha, x)
    return row_operator.entmax_iterations(
        tempered_scores("entmax_iterations", x, temperature), *_number_or_tensor(each)
    )


def topk_softmax(
    scores: Tensor, k: int, *, dim: int = -1, temperature: float | Tensor = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Softmax over the ``k`` largest scores of each row; every other weight is 0.

    .. math:: w_j = \frac{e^{z_j} \, [j \in K]}{\sum_{i \in K} e^{z_i}}, \quad z = x / T, \ |K| = \min(k, n)

    Among equal scores at the border those of lower index are in K. K follows from the scores before they are divided,
    so an infinite temperature does not change it. Scores outside K have no gradient.

    Args:
        scores: x, floating; ``-inf`` hides a key.
        k: at least 1. Above the number of visible keys n it is softmax.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; rows sum to 1 up to the rounding of ``dtype``.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, k is not an int of at least 1, a number
            temperature is NaN or not above 0, or a tensor of them does not fit.

    Source:
        Gupta et al. 2021, "Memory-efficient Transformers via Top-k Attention".

    Example:
        >>> topk_softmax(torch.tensor([0.0, 2.0, 2.0, 1.0]), 2)
        tensor([0.0000, 0.5000, 0.5000, 0.0000])
    """
    normalizer.topk(k, "topk_softmax")
    x = keys_last("topk_softmax", scores, dim)
    k = min(k, max(x.shape[-1], 1))
    z = tempered_scores("topk_softmax", x, temperature)
    if z is not x:  # two scores may have become one
        z = torch.where(row_operator.largest_keys(x.detach(), k), z, -math.inf)
    return _weights("topk_softmax", "topk", z, dim, dtype or scores.dtype, k)


def threshold_softmax(
    scores: Tensor,
    min_weight: float,
    *,
    dim: int = -1,
    temperature: float | Tensor = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Softmax over the keys whose softmax weight is at least ``min_weight``; every other weight is 0.

    .. math:: w_j = \frac{p_j \, [j \in K]}{\sum_{i \in K} p_i}, \quad p = \mathrm{softmax}(x / T),
        \ K = \{j : p_j \ge \mathrm{min\_weight}\} \cup \arg\max p

    The keys of the largest weight stay, however small it is: a row that sees anything sums to 1. Scores outside K have
    no gradient.

    Args:
        scores: x, floating; ``-inf`` hides a key.
        min_weight: from 0, which is softmax, to below 1.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. A tensor is differentiated.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; rows sum to 1 up to the rounding of ``dtype``.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, min_weight is not a number from 0 to below 1, a
            number temperature is NaN or not above 0, or a tensor of them does not fit.

    Example:
        >>> threshold_softmax(torch.tensor([3.0, 3.0, 0.0]), 0.1)
        tensor([0.5000, 0.5000, 0.0000])
    """
    normalizer.threshold(min_weight, "threshold_softmax")
    z = tempered_scores("threshold_softmax", keys_last("threshold_softmax", scores, dim), temperature)
    return _weights("threshold_softmax", "threshold", z, dim, dtype or scores.dtype, min_weight)


def _beside_sink(row: ScoreRow, sink: float | Tensor) -> Tensor:
    """Weights beside a sink of this logit."""
    # The maximum and the sink first: their difference is exact where both are far from 0.
    mass = torch.sigmoid((row.maximum - sink) + row.log_total)
    return row.weights * mass[..., None]


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


def _alphas(where: str, alpha: float | Tensor, x: Tensor) -> float | Tensor:
    each = per_row(where, "alpha", alpha, x, _ALPHA_ADVICE)
    if not isinstance(each, Tensor) and not 1 <= each < math.inf:
        raise InputError(f"{where}(alpha) must be finite and at least 1, got {alpha}. {_ALPHA_ADVICE}")
    return each


def _number_or_tensor(alpha: float | Tensor) -> tuple[float, Tensor | None]:
    return (0.0, alpha) if isinstance(alpha, Tensor) else (alpha, None)


def _weights(where: str, name: str, z: Tensor, dim: int, dtype: torch.dtype, parameter: float | Tensor = 0.0) -> Tensor:
    """Weights of scores ``z`` [..., n] in ``dtype``, with the dimension of the keys at ``dim`` again."""
    refuse_onnx(where, SOFTMAX_INSTEAD)
    return row_operator.row_weights(z, name, *_number_or_tensor(parameter)).movedim(-1, dim).to(dtype)
