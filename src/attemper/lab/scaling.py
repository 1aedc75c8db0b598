r"""Why scores are divided by :math:`\sqrt d`: the variance of a dot product for every head size and divisor.

For independent entries of mean 0 and variance 1, :math:`\mathrm{Var}(q \cdot k) = d`; divided by c it is
:math:`d / c^2`: d, 1, 1/d and 1/d^3 for c = 1, sqrt(d), d, d^2. d is the size of one head, not of the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attemper.functional import softmax
from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings, one_thread

SIZES = (2, 4, 16, 64, 512, 1024)
DIVISORS = ("1", "sqrt(d)", "d", "d^2")
EXPONENTS = (0.0, 0.5, 1.0, 2.0)
SAMPLES = 20_000
"""Dot products drawn for each head size."""
HEAD_SIZE = 64
"""The common head size, for which the range of every divisor is told."""
SCORES = (12.0, 8.0, 10.0)
"""Three scores of a head of size 16, divided in four ways."""
SCORES_SIZE = 16


@one_thread()
def scaling(*, seed: int = 0) -> Experiment:
    """Variance of scores, exact and drawn, and what each divisor leaves of a softmax."""
    drawn = {size: sampled_variance(size, seed) for size in SIZES}
    return Experiment(
        name="scaling",
        question="why are scores divided by sqrt(d), and not by 1, d or d^2?",
        seed=seed,
        tables=(_variances(drawn), _two_sigma(), _three_sigma(), _weights()),
        charts=(_chart(drawn),),
    )


def exact_variance(size: int, exponent: float) -> float:
    """Variance of q.k / d^exponent: d^(1 - 2 exponent), logit^2."""
    return float(size) ** (1 - 2 * exponent)


def sampled_variance(size: int, seed: int) -> tuple[float, float]:
    r"""Variance of :data:`SAMPLES` dot products of normal vectors, and its standard error.

    With the mean known to be 0 it is the mean of squares, whose error is :math:`\sqrt{(m_4 - m_2^2) / N}`.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + size)
    squares = torch.cat([_products(size, 1000, generator) for _ in range(SAMPLES // 1000)]).square()
    return float(squares.mean()), float(squares.var(unbiased=True).sqrt() / math.sqrt(SAMPLES))


def _products(size: int, count: int, generator: torch.Generator) -> Tensor:
    query, key = (torch.randn(count, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return (query * key).sum(-1)


def _variances(drawn: dict[int, tuple[float, float]]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for size, (variance, error) in drawn.items():
        for divisor, exponent in zip(DIVISORS, EXPONENTS, strict=True):
            factor = float(size) ** (-2 * exponent)
            rows.append((size, divisor, exact_variance(size, exponent), variance * factor, error * factor))
    return Table(
        title="variance of a score",
        see=(
            "Only sqrt(d) leaves the same variance, 1, at every head size. It grows as d without a divisor, and falls "
            "with a larger one."
        ),
        columns=headings("d", "divided by", "exact [logit^2]", "drawn [logit^2]", "standard error [logit^2]"),
        rows=tuple(rows),
    )


def _two_sigma() -> Table:
    return Table(
        title="where 95% of the scores lie",
        see="Two standard deviations: the unscaled range grows as sqrt(d), the scaled one does not grow.",
        columns=headings("d", "unscaled, +- [logit]", "divided by sqrt(d), +- [logit]"),
        rows=tuple((size, 2 * math.sqrt(exact_variance(size, 0.0)), 2 * exact_variance(size, 0.5)) for size in SIZES),
    )


def _three_sigma() -> Table:
    rows = []
    for divisor, exponent in zip(DIVISORS, EXPONENTS, strict=True):
        variance = exact_variance(HEAD_SIZE, exponent)
        rows.append((divisor, variance, 3 * math.sqrt(variance)))
    factors = {divisor: math.exp(2 * range_) for divisor, _, range_ in rows}
    return Table(
        title=f"three standard deviations, d = {HEAD_SIZE}",
        see=(
            "Two keys at opposite ends of the range differ in weight by a factor of "
            f"{factors['sqrt(d)']:.0f} if scores are divided by sqrt(d), of {factors['d']:.1f} by d and of "
            f"{factors['d^2']:.2f} by d^2."
        ),
        columns=headings("divided by", "variance [logit^2]", "three sigma, +- [logit]"),
        rows=tuple(rows),
    )


def _weights() -> Table:
    scores = torch.tensor(SCORES, dtype=torch.float64)
    rows = []
    for divisor, exponent in zip(DIVISORS, EXPONENTS, strict=True):
        scaled = scores / SCORES_SIZE**exponent
        rows.append((divisor, *scaled.tolist(), *softmax(scaled).tolist()))
    most = {row[0]: max(row[4:]) for row in rows}
    off = max(abs(weight - 1 / 3) for weight in rows[-1][4:])
    return Table(
        title=f"softmax of {list(map(int, SCORES))}, d = {SCORES_SIZE}",
        see=(
            f"Unscaled, one key takes {most['1']:.0%}; divided by d, {most['d']:.0%}: nearly uniform. By d^2 the "
            f"weights are uniform to {off:.1%} of the whole."
        ),
        columns=headings("divided by", *(f"score {i} [logit]" for i in (1, 2, 3)), *(f"weight {i}" for i in (1, 2, 3))),
        rows=tuple(rows),
    )


def _chart(drawn: dict[int, tuple[float, float]]) -> Chart:
    sizes = tuple(float(size) for size in SIZES)
    series = []
    for divisor, exponent in zip(DIVISORS, EXPONENTS, strict=True):
        factors = [size ** (-2 * exponent) for size in sizes]
        series.append(
            Series(
                f"divided by {divisor}",
                sizes,
                tuple(v * f for (v, _), f in zip(drawn.values(), factors, strict=True)),
                errors=tuple(e * f for (_, e), f in zip(drawn.values(), factors, strict=True)),
            )
        )
    return Chart(
        "variance of a score, drawn",
        Axis("head size d (entries)", "log"),
        Axis("variance (logit^2)", "log"),
        tuple(series),
    )
