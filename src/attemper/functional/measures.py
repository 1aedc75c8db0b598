"""Measures of one distribution: of scores (before the softmax) or of weights (after it).

Scores may hold -inf: a key that the query may not see. Every function is differentiable, twice, with no NaN
under masks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.call.formulas import VANISHED, at_most, log_count
from attemper.call.temperature import divide_by_temperature
from attemper.checks import index_of, one_of, positive_number, refuse_nested
from attemper.errors import InputError

TEMPERATURE_ADVICE = "Temperature divides the scores: below 1 sharpens, above 1 flattens."
_UNITS = {"nats": 1.0, "bits": 1.0 / math.log(2.0)}


class ScoreStatistics(NamedTuple):
    """Row statistics of scores, each [...] without ``dim``; the names are those of ``attention(stats=...)``."""

    lse: Tensor
    entropy: Tensor
    normalized_entropy: Tensor
    effective_tokens: Tensor
    max_weight: Tensor
    max_logit: Tensor
    mean_logit: Tensor
    logit_variance: Tensor
    visible_keys: Tensor


def softmax(
    scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    r"""``softmax(scores / temperature)`` along ``dim``; a row with nothing visible is all 0, not NaN.

    .. math:: p_j = \frac{e^{x_j / T - m}}{\sum_k e^{x_k / T - m}}, \quad m = \max_k x_k / T

    Args:
        scores: floating; ``-inf`` hides a key.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. inf gives uniform weights.
        dtype: of the result; None for that of ``scores``. The arithmetic is float32 at least.

    Returns:
        Weights in the shape of ``scores``; rows sum to 1 up to the rounding of ``dtype``.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, a number temperature is NaN or not above 0, or a
            tensor of them does not fit.
    """
    row = ScoreRow.of("softmax", scores, dim, temperature)
    return row.weights.movedim(-1, dim).to(dtype or scores.dtype)


def entropy(scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0, unit: str = "nats") -> Tensor:
    r"""Shannon entropy of ``softmax(scores / temperature)`` along ``dim``.

    .. math:: H = -\sum_j p_j \log p_j = \log Z - \sum_j p_j z_j, \quad z_j = x_j / T - m

    0 when one key takes all the weight, log(n) when n keys share it equally.

    Args:
        scores: floating; ``-inf`` marks a key the query may not see.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. Below 1 sharpens.
            A tensor is differentiated.
        unit: "nats" or "bits".

    Returns:
        [...] without ``dim``, float32, or float64 for float64 scores. A row with nothing visible gives 0.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, a number temperature is NaN or not above 0, a
            tensor of them does not fit, or the unit is unknown.

    Source:
        Zhai et al. 2023, "Preventing Attention Entropy Collapse", Ent(A_i).

    Example:
        >>> entropy(torch.zeros(4)), math.log(4)
        (tensor(1.3863), 1.3862943611198906)
    """
    one_of("entropy(unit=...)", unit, _UNITS)
    return ScoreRow.of("entropy", scores, dim, temperature).entropy * _UNITS[unit]


def logit_variance(scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Variance of ``scores / temperature`` under their own softmax: how fast entropy moves, ``dH/d log T``.

    .. math:: \mathrm{Var}_p(s) = \sum_j p_j (s_j - \mu)^2, \quad s = x / T

    Args and errors as :func:`entropy`. Returns [...] without ``dim``, logit^2; 0 where nothing is visible.
    """
    return ScoreRow.of("logit_variance", scores, dim, temperature).variance


def statistics(scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0) -> ScoreStatistics:
    """Every row statistic of ``scores / temperature``, under the names that ``attention(stats=...)`` uses.

    Args and errors as :func:`entropy`. A row with nothing visible has lse and max_logit -inf, and 0 elsewhere.
    """
    row = ScoreRow.of("statistics", scores, dim, temperature)
    seen, zero = row.seen, torch.zeros((), dtype=row.d.dtype, device=scores.device)
    n = row.count.clamp(min=2).to(row.d.dtype)
    return ScoreStatistics(
        lse=torch.where(seen, row.maximum + row.log_total, -math.inf),
        entropy=row.entropy,
        normalized_entropy=at_most(torch.where(row.count > 1, row.entropy / n.log(), zero), torch.ones_like(zero)),
        effective_tokens=torch.where(seen, 1 / torch.where(seen, (row.weights**2).sum(-1), 1.0), zero),
        max_weight=torch.where(seen, torch.exp(-row.log_total), zero),
        max_logit=torch.where(seen, row.maximum, -math.inf),
        mean_logit=torch.where(seen, row.maximum + row.mean, zero),
        logit_variance=row.variance,
        visible_keys=row.count,
    )


def softmax_jacobian(scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Derivative of ``softmax(scores / temperature)`` with respect to the scores.

    .. math:: J_{ij} = \frac{\partial p_i}{\partial x_j} = \frac{1}{T} (p_i \delta_{ij} - p_i p_j)

    Symmetric; rows and columns sum to 0. It vanishes as one weight approaches 1: a saturated softmax passes
    no gradient.

    Args and errors as :func:`entropy`. Returns [..., n, n]: ``dim`` moved to the end, then doubled.
    """
    row = ScoreRow.of("softmax_jacobian", scores, dim, temperature)
    p = row.weights
    products = p[..., :, None] * p[..., None, :]
    apart = products - torch.diag_embed(products.diagonal(dim1=-2, dim2=-1))
    # p_i - p_i^2 would be 0 for a weight that rounds to 1; as the sum of the others it keeps every digit.
    jacobian = torch.diag_embed(apart.sum(-1)) - apart
    if isinstance(temperature, Tensor):
        return jacobian / of_each_row("softmax_jacobian", temperature, p)[..., None, None]
    return jacobian / temperature


def entropy_of(weights: Tensor, *, dim: int = -1, unit: str = "nats") -> Tensor:
    r"""Shannon entropy of weights, renormalised to sum 1: ``-sum p log p`` with ``0 log 0 = 0``.

    Prefer :func:`entropy` where the scores are at hand: weights that have underflowed to 0 have lost their share.

    Args:
        weights: floating, not negative; need not sum to 1.
        dim: the dimension of the keys.
        unit: "nats" or "bits".

    Returns:
        [...] without ``dim``, float32 or float64; 0 for a row of zeros. The gradient at a weight of exactly 0 is
        taken as 0.

    Raises:
        InputError: weights are not floating, there is no such ``dim``, or the unit is unknown.
    """
    one_of("entropy_of(unit=...)", unit, _UNITS)
    p = _shares("entropy_of", weights, dim)
    # Below the normal numbers -1/p of the second derivative overflows; such a weight has no entropy to speak of.
    positive = ~(p < torch.finfo(p.dtype).tiny)  # NaN stays, and shows
    # 0 less the sum, and not minus the sum, which is -0 for a one-hot row.
    return (0.0 - torch.where(positive, p * torch.where(positive, p, 1.0).log(), 0.0).sum(-1)) * _UNITS[unit]


def effective_tokens(weights: Tensor, *, dim: int = -1) -> Tensor:
    r"""Inverse participation ratio, ``(sum w)^2 / sum w^2``: how many keys the weights amount to, from 1 to n.

    Args and errors as :func:`entropy_of`. 0 for a row of zeros. Its logarithm is the 2-Renyi entropy.
    """
    squares = (_shares("effective_tokens", weights, dim) ** 2).sum(-1)
    return torch.where(squares == 0, 0.0, 1 / torch.where(squares == 0, 1.0, squares))


def max_weight(weights: Tensor, *, dim: int = -1) -> Tensor:
    """The largest share, from 1/n to 1; 0 for a row of zeros. Args and errors as :func:`entropy_of`."""
    p = _shares("max_weight", weights, dim)
    return p.amax(-1) if p.shape[-1] else p.new_zeros(p.shape[:-1])


def gini(weights: Tensor, *, dim: int = -1) -> Tensor:
    r"""Gini coefficient of weights: 0 when all are equal, (n - 1)/n when one has all.

    .. math:: G = \frac{1}{n} \sum_i (2i - n - 1)\, p_{(i)}, \quad p \text{ ascending}

    n is the size of ``dim``: weights of hidden keys count as keys of weight 0. ``attention(stats=("gini",))`` counts
    visible keys only.

    Args and errors as :func:`entropy_of`. Costs a sort.
    """
    p = _shares("gini", weights, dim)
    n = p.shape[-1]
    rank = 2 * torch.arange(1, n + 1, device=p.device, dtype=p.dtype) - n - 1
    return (p.sort(-1).values * rank).sum(-1) / max(n, 1)


def _shares(where: str, weights: Tensor, dim: int) -> Tensor:
    """Weights along the last dimension, summing to 1 (a row of zeros stays)."""
    w = keys_last(where, weights, dim, "weights")
    total = w.sum(-1, keepdim=True)
    return w / torch.where(total == 0, 1.0, total)


def floating(where: str, name: str, tensor: Tensor) -> Tensor:
    """``tensor`` in float32 at least."""
    refuse_nested(where, {name: tensor})
    if not isinstance(tensor, Tensor) or not tensor.dtype.is_floating_point:
        came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise InputError(f"{where}({name}) must be a floating tensor, got {came}.")
    if tensor.dim() == 0:
        raise InputError(f"{where}({name}) must have a dimension of keys, got a tensor without dimensions.")
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def keys_last(where: str, tensor: Tensor, dim: int, name: str = "scores") -> Tensor:
    """``tensor`` in float32 at least, with the dimension of the keys at the end."""
    tensor = floating(where, name, tensor)
    count = tensor.dim()
    axis = index_of(dim)
    if axis is None or not -count <= axis < count:
        raise InputError(
            f"{where}(dim=...) must be an int from {-count} to {count - 1} for a tensor {list(tensor.shape)}, got "
            f"{dim!r}. It is the dimension of the keys."
        )
    return tensor.movedim(axis, -1)


def of_each_row(
    where: str, value: Tensor, x: Tensor, name: str = "temperature", advice: str = TEMPERATURE_ADVICE
) -> Tensor:
    """``value`` for each row of ``x`` [..., n], in the type of ``x``: [...]."""
    try:
        return value.to(x.dtype).expand(x.shape[:-1])
    except RuntimeError as error:
        raise InputError(
            f"{where}({name}) must be broadcastable to {list(x.shape[:-1])}, the scores without their keys, got "
            f"{list(value.shape)}. {advice}"
        ) from error


def divisor_of(where: str, temperature: float | Tensor, x: Tensor) -> float | Tensor:
    """A temperature as a number above 0, or as a tensor [..., 1] for the rows of ``x`` [..., n]."""
    if isinstance(temperature, Tensor):
        return of_each_row(where, temperature, x)[..., None]
    return positive_number(f"{where}(temperature=...)", temperature, TEMPERATURE_ADVICE, infinite=True)


def quotient(x: Tensor, divisor: float | Tensor) -> Tensor:
    """``x`` [..., n], finite, over what :func:`divisor_of` gave."""
    return divide_by_temperature(x, divisor) if isinstance(divisor, Tensor) else x / divisor


class ScoreRow:
    """Scores along the last dimension relative to their maximum, and what measures and normalizers need of them."""

    def __init__(self, x: Tensor, temperature: Tensor | float) -> None:
        visible = x != -math.inf
        # Hidden scores are taken out before anything touches them: inf / T would leave 0 * inf in the gradient of T.
        s = torch.where(visible, x, 0.0)
        self.count = visible.sum(-1)
        self.seen = self.count > 0
        largest = _maximum(torch.where(visible, s, -math.inf), s)
        self.maximum = quotient(largest[..., None], temperature).squeeze(-1)
        # The maximum is part of the graph, though it cancels in entropy and variance: the gradient of the largest score
        # is then minus the sum of the others, exact where float32 would keep no digit of it (a row such as [20, 0, 0]).
        # Scores of 1e5 that differ by 1 keep every digit if what is divided is their distance. Where that is so large
        # that exp is 0 it no longer counts, and neither its quotient nor its square must overflow.
        distance = torch.where(visible, s - largest[..., None], 0.0)
        self.d = quotient(_within(distance, temperature), temperature)
        e = torch.where(visible, torch.exp(self.d), 0.0)
        total = torch.where(self.seen, e.sum(-1), 1.0)
        self.weights = e / total[..., None]
        self.log_total = total.log()
        self.mean = (self.weights * self.d).sum(-1)

    @classmethod
    def of(cls, where: str, scores: Tensor, dim: int, temperature: float | Tensor) -> ScoreRow:
        x = keys_last(where, scores, dim)
        return cls(x, divisor_of(where, temperature, x))

    @property
    def entropy(self) -> Tensor:
        """Both terms are >= 0: no cancellation, however sharp the row."""
        return at_most(self.log_total - self.mean, log_count(self.count.to(self.d.dtype)))

    @property
    def variance(self) -> Tensor:
        return (self.weights * (self.d - self.mean[..., None]) ** 2).sum(-1)


def _within(distance: Tensor, temperature: Tensor | float) -> Tensor:
    """``distance`` <= 0, at least VANISHED temperatures and the lowest number."""
    lowest = torch.finfo(distance.dtype).min
    if isinstance(temperature, Tensor):
        return torch.maximum(distance, (VANISHED * temperature.detach()).clamp(min=lowest))
    return distance.clamp(min=max(VANISHED * temperature, lowest))


def _maximum(hidden: Tensor, s: Tensor) -> Tensor:
    """The largest visible score; among ties the gradient goes to the lowest index. 0 where nothing is visible."""
    if hidden.shape[-1] == 0:
        return s.new_zeros(s.shape[:-1])
    return s.gather(-1, hidden.argmax(-1, keepdim=True)).squeeze(-1)
