r"""Information that attention carries: divergence from uniform, mutual information, rate and distortion, a bound.

Divergences are summed in a form whose terms are all at least 0,

.. math:: \mathrm{KL}(p \| q) = \sum_j p_j \log \frac{p_j}{q_j} - p_j + q_j = \sum_j p_j (\delta_j + e^{-\delta_j} - 1),
          \quad \delta = \log p - \log q

so that little information keeps its digits: the difference of two entropies would round it to 0, or below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attemper.call.formulas import VANISHED, at_most, log_count
from attemper.checks import positive_number, whole_number
from attemper.errors import InputError
from attemper.functional.measures import TEMPERATURE_ADVICE, ScoreRow, floating, softmax


class RateDistortion(NamedTuple):
    """A curve with temperature as its parameter."""

    temperature: Tensor
    """[m]"""
    rate: Tensor
    """[..., m], nats"""
    distortion: Tensor
    """[..., m], no unit: 0 at temperature 1"""


def kl_to_uniform(scores: Tensor, *, dim: int = -1, temperature: float | Tensor = 1.0) -> Tensor:
    r"""Divergence of ``softmax(scores / temperature)`` from equal weights on the keys that the row sees.

    .. math:: \mathrm{KL}(p \| u) = \sum_j p_j \log (n p_j) = \log n - H

    0 for equal scores, log(n) when one of n visible keys takes all the weight: a *low* entropy is far from uniform.

    Args:
        scores: floating; ``-inf`` marks a key the query may not see.
        dim: the dimension of the keys.
        temperature: positive, no unit; broadcastable to ``scores`` without ``dim``. inf gives 0.

    Returns:
        [...] without ``dim``, in nats, float32, or float64 for float64 scores. A row with nothing visible gives 0.

    Raises:
        InputError: scores are not floating, there is no such ``dim``, a number temperature is NaN or not above 0, or a
            tensor of them does not fit.

    Source:
        Cover and Thomas 2006, "Elements of Information Theory", equation 2.94.

    Example:
        >>> kl_to_uniform(torch.tensor([0.0, -math.inf, 0.0])), kl_to_uniform(torch.tensor([99.0, 0.0]))
        (tensor(0.), tensor(0.6931))
    """
    log_p, row = _log_weights("kl_to_uniform", scores, dim, temperature)
    n = torch.where(row.seen, row.count, 1)[..., None].to(log_p.dtype)
    visible = scores.movedim(dim, -1) != -math.inf
    divergence = _divergence(row.weights, torch.where(visible, log_p + n.log(), 0.0), torch.where(visible, 1 / n, 0.0))
    return at_most(divergence, log_count(row.count.to(log_p.dtype)))


def mutual_information(scores: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
    r"""How much knowing the query tells of the key that attention picks: mutual information of the two.

    .. math:: I = H\Big(\frac{1}{Q} \sum_i p_i\Big) - \frac{1}{Q} \sum_i H(p_i) = \frac{1}{Q} \sum_i
              \mathrm{KL}\Big(p_i \Big\| \frac{1}{Q} \sum_k p_k\Big), \quad p_i = \mathrm{softmax}(s_i / T)

    0 when all queries weigh the keys alike (whatever their entropy), log(n) when each of n queries picks a key of its
    own. Never more than log(queries) or log(keys).

    Every query counts alike, and all are taken to see the same keys. Where they do not (under a causal mask), the
    formula holds still, but its value includes what the mask alone tells of the key: causal rows of equal scores have
    I above 0. A query that sees nothing is left out.

    Args:
        scores: [..., Q, K], floating; ``-inf`` marks a key the query may not see.
        temperature: positive, no unit; broadcastable to [..., Q]. inf gives what the mask tells, or 0.

    Returns:
        [...], in nats, float32, or float64 for float64 scores; 0 where no query sees a key.

    Raises:
        InputError: scores are not floating, have no dimension of queries, a number temperature is NaN or not above 0,
            or a tensor of them does not fit.

    Source:
        Cover and Thomas 2006, "Elements of Information Theory", section 2.4, with a uniform choice of the query.

    Example:
        >>> mutual_information(99 * torch.eye(4)), math.log(4), mutual_information(torch.zeros(4, 4))
        (tensor(1.3863), 1.3862943611198906, tensor(0.))
    """
    _check_pairs("mutual_information", scores)
    log_p, row = _log_weights("mutual_information", scores, -1, temperature)
    seen = row.seen.sum(-1)
    rows = seen.clamp(min=1).to(log_p.dtype)
    log_mean = _log_sum(log_p, -2) - rows[..., None].log()
    divergence = _divergence(row.weights, log_p - log_mean[..., None, :], log_mean.exp()[..., None, :])
    information = torch.where(row.seen, divergence, 0.0).sum(-1) / rows
    keys = (scores != -math.inf).any(-2).sum(-1)
    return at_most(information, log_count(torch.minimum(seen, keys).to(log_p.dtype)))


def rate_distortion(scores: Tensor, value: Tensor, temperatures: Sequence[float] | Tensor) -> RateDistortion:
    r"""What attention transmits at each temperature, and how far its output is then from that at temperature 1.

    .. math:: R(T) = I(T), \quad D(T) = \frac{\sum_i |o_i(T) - o_i(1)|^2}{\sum_i |o_i(1)|^2},
              \quad o_i(T) = \sum_j p_{ij}(T)\, v_j

    R is :func:`mutual_information`, with its assumptions. D grows on both sides of T = 1: a sharper attention, too,
    gives another output. So this is the path of one model through the plane, not the lowest rate for a distortion
    that Shannon's function gives.

    Args:
        scores: [..., Q, K], floating; ``-inf`` marks a key the query may not see.
        value: [..., K, E], floating; leading dimensions broadcast with those of ``scores``.
        temperatures: m numbers above 0 (inf for uniform), or a tensor [m], which is differentiated and not checked.

    Returns:
        ``RateDistortion(temperature [m], rate [..., m] in nats, distortion [..., m])`` over the leading dimensions of
        ``scores`` (and of ``value`` for the distortion); float32, or float64 if either tensor is. Where the output at
        temperature 1 is 0, the distortion is 0 if nothing moved, and inf otherwise.

    Raises:
        InputError: shapes do not fit, a tensor is not floating, there is no temperature, or one is not above 0.

    Example:
        >>> rate_distortion(99 * torch.eye(4), torch.eye(4), [1.0, math.inf]).distortion
        tensor([0.0000, 0.7500])
    """
    dtype = _check_value(scores, value)
    points = _points(temperatures)
    scores, value = scores.to(dtype), value.to(dtype)
    at_one = softmax(scores) @ value
    size = at_one.square().sum((-1, -2))
    rates, distortions = [], []
    for point in points:
        moved = (softmax(scores, temperature=point) @ value - at_one).square().sum((-1, -2))
        rates.append(mutual_information(scores, temperature=point))
        # A size of NaN fails the comparison: then `moved` is NaN, too, and stays.
        from_nothing = torch.where(moved.detach() > 0, math.inf, moved)
        distortions.append(torch.where(size > 0, moved / torch.where(size > 0, size, 1.0), from_nothing))
    axis = torch.stack([torch.as_tensor(point, dtype=dtype, device=scores.device) for point in points])
    return RateDistortion(axis, torch.stack(rates, -1), torch.stack(distortions, -1))


def pac_bayes_bound(empirical_loss: float | Tensor, kl: float | Tensor, rows: int, *, delta: float = 0.05) -> Tensor:
    r"""Upper bound of an expected loss, from its mean on ``rows`` examples and a divergence from the prior.

    .. math:: L \le \hat L + \sqrt{\frac{\mathrm{KL} + \log(2 \sqrt m / \delta)}{2 m}}

    With probability 1 - delta over m independent examples, for all posteriors at once. The prior must be chosen before
    the examples are seen. With the uniform prior KL is :func:`kl_to_uniform`: there a *low* entropy costs more.

    Args:
        empirical_loss: mean loss on the examples, each in [0, 1]; a number, or a tensor (which is not checked).
        kl: divergence of the posterior from the prior in nats, at least 0; broadcasts with ``empirical_loss``. A
            tensor is not checked: far enough below 0 the bound is NaN.
        rows: m, the number of examples, at least 1.
        delta: probability with which the bound may fail, above 0 and below 1.

    Returns:
        The bound, of the broadcast shape: in the type of the tensors (float32 at least), float64 for numbers. It may
        exceed 1, and then says nothing.

    Raises:
        InputError: a number is out of its range.

    Source:
        McAllester 1999, "PAC-Bayesian Model Averaging", with the constant of Maurer 2004, "A Note on the PAC Bayesian
        Theorem", by Pinsker's inequality.

    Example:
        >>> pac_bayes_bound(0.1, math.log(64), 1000)
        tensor(0.1752, dtype=torch.float64)
    """
    where = "pac_bayes_bound"
    tensors = [value.dtype for value in (empirical_loss, kl) if isinstance(value, Tensor)]
    dtype = torch.float64 if torch.float64 in tensors or not tensors else torch.float32
    loss = _check_range(f"{where}(empirical_loss=...)", empirical_loss, 1.0, dtype, "It is a mean of losses in [0, 1].")
    divergence = _check_range(f"{where}(kl=...)", kl, math.inf, dtype, "It is in nats.")
    whole_number(f"{where}(rows=...)", rows)
    if isinstance(delta, bool) or not isinstance(delta, (int, float)) or not 0 < delta < 1:
        raise InputError(
            f"{where}(delta=...) must be a probability above 0 and below 1, got {delta!r}. 0.05 gives a bound that "
            "holds 95 times in 100."
        )
    return loss + ((divergence + math.log(2 * math.sqrt(rows) / delta)) / (2 * rows)) ** 0.5


def _log_weights(where: str, scores: Tensor, dim: int, temperature: float | Tensor) -> tuple[Tensor, ScoreRow]:
    """Logarithms of the weights, keys last; finite for hidden keys, so that nothing after them meets 0 * inf."""
    row = ScoreRow.of(where, scores, dim, temperature)
    visible = scores.movedim(dim, -1) != -math.inf
    return torch.where(visible, row.d - row.log_total[..., None], VANISHED), row


def _divergence(p: Tensor, delta: Tensor, q: Tensor) -> Tensor:
    r""":math:`\sum_j p_j \log(p_j / q_j) - p_j + q_j`, with delta = log(p / q): every term is at least 0."""
    near = delta > -1
    # Where p is the smaller one, q = p e^-delta would overflow.
    small = torch.where(near, delta, 0.0)
    terms = torch.where(near, p * (small + torch.expm1(-small)), p * delta - p + q)
    total = terms.sum(-1)
    return total - total.detach().clamp(max=0.0)


def _log_sum(x: Tensor, dim: int) -> Tensor:
    """log sum exp; of nothing it is that of nothing but hidden keys."""
    if x.shape[dim] == 0:
        return x.new_full((*x.shape[:-2], x.shape[-1]), VANISHED)
    return torch.logsumexp(x, dim)


def _check_pairs(where: str, scores: Tensor) -> None:
    if floating(where, "scores", scores).dim() < 2:
        raise InputError(
            f"{where}(scores) must be [..., queries, keys], got {list(scores.shape)}. One query alone has no "
            "information to share: kl_to_uniform and entropy describe it."
        )


def _check_value(scores: Tensor, value: Tensor) -> torch.dtype:
    """The type to compute in."""
    _check_pairs("rate_distortion", scores)
    wide = floating("rate_distortion", "value", value)
    advice = f"rate_distortion(value) must be [..., {scores.shape[-1]}, size] to match scores {list(scores.shape)}"
    if value.dim() < 2 or value.shape[-2] != scores.shape[-1]:
        raise InputError(f"{advice}, got {list(value.shape)}.")
    try:
        torch.broadcast_shapes(scores.shape[:-2], value.shape[:-2])
    except RuntimeError as error:
        raise InputError(f"{advice}: the leading dimensions of {list(value.shape)} do not broadcast.") from error
    return torch.promote_types(wide.dtype, floating("rate_distortion", "scores", scores).dtype)


def _points(temperatures: Sequence[float] | Tensor) -> list[float] | list[Tensor]:
    where = "rate_distortion(temperatures=...)"
    if isinstance(temperatures, Tensor):
        if temperatures.dim() != 1 or not temperatures.dtype.is_floating_point or len(temperatures) == 0:
            raise InputError(
                f"{where} must be a floating tensor [m] with m of at least 1, got {list(temperatures.shape)} "
                f"{temperatures.dtype}."
            )
        return list(temperatures.unbind())
    if isinstance(temperatures, str) or not isinstance(temperatures, Sequence) or not temperatures:
        raise InputError(f"{where} must be a sequence of numbers, e.g. (0.5, 1.0, 2.0), got {temperatures!r}.")
    return [positive_number(where, number, TEMPERATURE_ADVICE, infinite=True) for number in temperatures]


def _check_range(where: str, value: float | Tensor, most: float, dtype: torch.dtype, advice: str) -> Tensor:
    """A tensor, or a number that must be in [0, most], in this type."""
    if isinstance(value, Tensor):
        if not value.dtype.is_floating_point:
            raise InputError(f"{where} must be a number or a floating tensor, got {value.dtype}.")
        return value.to(dtype)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where} must be a number or a floating tensor, got {type(value).__name__}. {advice}")
    if not 0 <= value <= most or math.isinf(value):
        span = "finite and at least 0" if math.isinf(most) else f"from 0 to {most:g}"
        raise InputError(f"{where} must be {span}, got {value}. {advice}")
    return torch.tensor(float(value), dtype=dtype)
