"""Measures of scores and weights: values by their definitions, any dim and temperature, two derivatives."""

import math
import re
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attemper import InputError
from attemper import functional as F
from tests.functional.conftest import temperatures
from tests.laws.rows import rows
from tests.support import oracle

pytestmark = pytest.mark.each

OF_SCORES = ("entropy", "logit_variance", "softmax", "statistics", "softmax_jacobian")
OF_WEIGHTS = ("entropy_of", "effective_tokens", "max_weight", "gini")


def exact(scores: Tensor) -> list[dict[str, oracle.FLOAT]]:
    """The oracle's statistics of each row [n] of [m, n] scores, -inf hidden."""
    result = []
    for numbers in oracle.numbers(scores):
        s = numbers[np.isfinite(numbers)]
        ones = np.ones(len(s), oracle.FLOAT)
        result.append(oracle.row_statistics(oracle.Row(np.arange(len(s)), s, s, ones, ones, ones > 2, ones, None)))
    return result


HIDDEN = torch.tensor([[1.0, -math.inf, 3.0, 2.5, -1.0], [-math.inf] * 4 + [2.0], [-math.inf] * 5, [0.0] * 5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_statistics_of_scores_are_those_of_the_oracle(dtype: torch.dtype):
    scores = torch.cat([HIDDEN, torch.randn(20, 5) * 4]).to(dtype)
    got = F.statistics(scores)
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for name, value in got._asdict().items():
        if name != "visible_keys":
            assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), name
        for place, want in enumerate(exact(scores)):
            error = (
                abs(float(value[place]) - float(want[name]))
                if math.isfinite(want[name])
                else float(value[place] != want[name])
            )
            assert error <= tolerance * max(1.0, abs(float(want[name])) if math.isfinite(want[name]) else 1), (
                f"{name}: {error}"
            )
    assert torch.equal(F.entropy(scores), got.entropy)
    assert torch.equal(F.logit_variance(scores), got.logit_variance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_softmax_rows_sum_to_one_and_empty_rows_to_zero(dtype: torch.dtype):
    scores = torch.cat([HIDDEN, torch.randn(20, 5) * 4]).to(dtype)
    weights = F.softmax(scores)
    assert weights.dtype == dtype
    sums = weights.double().sum(-1)
    assert (sums[2] == 0).all()
    assert (sums[torch.arange(24) != 2] - 1).abs().max() <= 5 * torch.finfo(dtype).eps
    assert (weights[torch.isinf(scores)] == 0).all()
    assert F.softmax(scores, dtype=torch.float64).dtype == torch.float64
    full = torch.randn(3, 5)
    torch.testing.assert_close(F.softmax(full), torch.softmax(full, -1))


@pytest.mark.parametrize("dim", [-1, -2, -3, -4, 0, 1, 2, 3])
@pytest.mark.parametrize("given", ["number", "scalar", "full", "broadcast"])
@pytest.mark.parametrize("name", OF_SCORES + OF_WEIGHTS)
@pytest.mark.turns(2)
def test_dim_says_where_the_keys_are_and_temperature_divides_the_scores(name: str, given: str, dim: int):
    tensor, function = torch.rand(2, 3, 4, 5, dtype=torch.float64), getattr(F, name)
    temperature, divisor = temperatures(given, (2, 3, 4, 5), dim)
    of_scores = name in OF_SCORES
    got = function(tensor, dim=dim, **({"temperature": temperature} if of_scores else {}))
    want = function((tensor / divisor if of_scores else tensor).movedim(dim, -1))
    if name == "softmax":
        want = want.movedim(-1, dim)
    if name == "softmax_jacobian":
        # The derivative is with respect to the scores before the division.
        want = want / (divisor if isinstance(divisor, (int, float)) else divisor.movedim(dim, -1)[..., None])
    for one, two in zip(got, want, strict=True) if name == "statistics" else [(got, want)]:
        assert one.shape == two.shape
        torch.testing.assert_close(one, two)


def test_bits_are_nats_over_log_two():
    assert math.isclose(F.entropy(torch.zeros(8), unit="bits").item(), 3.0, rel_tol=1e-6)
    assert math.isclose(F.entropy_of(torch.ones(8), unit="bits").item(), 3.0, rel_tol=1e-6)
    assert math.isclose(F.entropy(torch.zeros(8), unit="nats").item(), math.log(8), rel_tol=1e-6)


WEIGHTS = {
    "one of three": ([0.0, 2.0, 0.0], 0.0, 1.0, 1.0, 2 / 3),
    "equal": ([3.0, 3.0, 3.0, 3.0], math.log(4), 4.0, 0.25, 0.0),
    "zeros": ([0.0, 0.0], 0.0, 0.0, 0.0, 0.0),
    "one": ([0.5], 0.0, 1.0, 1.0, 0.0),
    "three to one": ([0.25, 0.75], -0.25 * math.log(0.25) - 0.75 * math.log(0.75), 1.6, 0.75, 0.25),
}


@pytest.mark.parametrize("unit", ["nats", "bits"])
def test_the_entropy_of_one_key_is_0_and_not_minus_0_and_keeps_its_gradient(unit: str):
    weights = torch.tensor([0.0, 1.0, 0.0], requires_grad=True)
    found = F.entropy_of(weights, unit=unit)
    assert math.copysign(1.0, found.item()) == 1.0
    assert math.copysign(1.0, F.entropy(torch.tensor([0.0, -math.inf]), unit=unit).item()) == 1.0
    (gradient,) = torch.autograd.grad(found, weights)
    # -(log p + 1) = -1, less its mean under p: the weights are divided by their sum.
    assert gradient.tolist()[1] == 0.0
    two = torch.tensor([0.25, 0.75], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(F.entropy_of(two), two)
    assert gradient[0].item() == pytest.approx(0.75 * math.log(3), rel=1e-14)


@pytest.mark.parametrize("what", WEIGHTS)
def test_measures_of_weights_by_hand(what: str):
    weights, *wants = WEIGHTS[what]
    for name, want in zip(OF_WEIGHTS, wants, strict=True):
        got = getattr(F, name)(torch.tensor(weights, dtype=torch.float64)).item()
        assert math.isclose(got, want, rel_tol=1e-14, abs_tol=1e-15), f"{name}: {got}"


@given(scores=rows(least=2))
def test_measures_of_scores_and_of_their_weights_agree(scores: Tensor):
    stats, p = F.statistics(scores), F.softmax(scores)
    torch.testing.assert_close(F.entropy_of(p), stats.entropy, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(F.effective_tokens(p), stats.effective_tokens, rtol=1e-12, atol=0)
    torch.testing.assert_close(F.max_weight(p), stats.max_weight, rtol=1e-12, atol=0)
    # Gini by its other definition: mean absolute difference over twice the mean.
    pairwise = (p[:, :, None] - p[:, None, :]).abs().mean((1, 2)) / (2 * p.mean(-1))
    torch.testing.assert_close(F.gini(p), pairwise, rtol=1e-10, atol=1e-12)
    assert (F.gini(p) >= -1e-15).all()
    assert (F.gini(p) <= 1 - 1 / scores.shape[1] + 1e-12).all()
    torch.testing.assert_close(F.entropy_of(3.7 * p), F.entropy_of(p), rtol=1e-12, atol=1e-13)


@given(scores=rows(), temperature=st.floats(0.2, 5))
def test_the_jacobian_is_that_of_autograd_symmetric_and_without_a_sum(scores: Tensor, temperature: float):
    jacobian = F.softmax_jacobian(scores[0], temperature=temperature)
    want = torch.autograd.functional.jacobian(lambda s: torch.softmax(s / temperature, -1), scores[0])
    torch.testing.assert_close(jacobian, want, rtol=1e-10, atol=1e-12)
    assert torch.equal(jacobian, jacobian.mT)
    torch.testing.assert_close(jacobian.sum(-1), torch.zeros_like(scores[0]), rtol=0, atol=1e-12)


SMOOTH: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": F.entropy,
    "logit_variance": F.logit_variance,
    "softmax": F.softmax,
    "softmax_jacobian": F.softmax_jacobian,
    "lse": lambda s: F.statistics(s).lse,
    "effective_tokens": lambda s: F.statistics(s).effective_tokens,
    "max_weight": lambda s: F.statistics(s).max_weight,
    "mean_logit": lambda s: F.statistics(s).mean_logit,
    "normalized_entropy": lambda s: F.statistics(s).normalized_entropy,
    "max_logit": lambda s: F.statistics(s).max_logit,
    "entropy_of": lambda s: F.entropy_of(F.softmax(s)),
    "effective_tokens of weights": lambda s: F.effective_tokens(F.softmax(s)),
    "gini": lambda s: F.gini(F.softmax(s)),
    "max_weight of weights": lambda s: F.max_weight(F.softmax(s)),
}


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.turns(2)
def test_first_and_second_derivatives_are_right_under_masks(name: str, n: int, derivatives_agree: Callable[..., bool]):
    hidden = torch.zeros(3, n + 1, dtype=torch.bool)
    hidden[:, n] = True
    hidden[1] = True

    def function(scores: Tensor) -> Tensor:
        return SMOOTH[name](scores.masked_fill(hidden, -math.inf)).nan_to_num(neginf=0.0)

    scores = torch.randn(3, n + 1, dtype=torch.float64, requires_grad=True)
    assert derivatives_agree(function, scores)
    (grad,) = torch.autograd.grad(function(scores).sum(), scores)
    assert (grad[hidden] == 0).all()


@pytest.mark.parametrize("name", ["entropy", "logit_variance", "softmax", "softmax_jacobian"])
def test_derivatives_with_respect_to_temperature_are_right(name: str, derivatives_agree: Callable[..., bool]):
    scores = torch.randn(2, 4, dtype=torch.float64)
    scores[:, 3] = -math.inf
    temperature = torch.tensor([0.7, 1.8], dtype=torch.float64, requires_grad=True)
    assert derivatives_agree(lambda T: getattr(F, name)(scores, temperature=T), temperature)


@pytest.mark.parametrize("name", OF_SCORES + OF_WEIGHTS)
@pytest.mark.turns(2)
def test_an_empty_dimension_of_keys_or_of_rows_gives_zeros_or_nothing(name: str):
    function = getattr(F, name)
    result = function(torch.zeros(3, 0))
    for part in result if name == "statistics" else [result]:
        assert part.shape[0] == 3
        assert not torch.isnan(part).any()
    result = function(torch.zeros(0, 4))
    for part in result if name == "statistics" else [result]:
        assert part.shape[0] == 0


@pytest.mark.parametrize("unit", ["bans", [1.0, 2.0]], ids=str)
@pytest.mark.parametrize("function", [F.entropy, F.entropy_of])
def test_an_unknown_unit_is_refused(function: Any, unit: Any):
    with pytest.raises(
        InputError, match=re.escape(f"{function.__name__}(unit=...) must be one of 'nats', 'bits'; got {unit!r}")
    ):
        function(torch.zeros(3), unit=unit)


@pytest.mark.parametrize("gap", [1.0, 20.0, 50.0, 100.0])
def test_the_jacobian_of_a_saturated_row_keeps_its_digits(gap: float):
    """p - p^2 of a weight that rounds to 1 would be 0."""
    jacobian = F.softmax_jacobian(torch.tensor([gap, 0.0], dtype=torch.float64))
    product = float(mpmath.exp(gap) / (1 + mpmath.exp(gap)) ** 2)
    want = torch.tensor([[product, -product], [-product, product]], dtype=torch.float64)
    torch.testing.assert_close(jacobian, want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("row", [(20.0, 0.0, 0.0), (80.0, 0.0, -5.0), (12.0, 11.0, 0.0)], ids=str)
def test_the_gradient_of_entropy_keeps_its_digits_in_float32_however_sharp_the_row(row: tuple[float, ...]):
    scores = torch.tensor(row, requires_grad=True)
    F.entropy(scores).backward()
    assert scores.grad is not None
    with mpmath.workdps(60):
        e = [mpmath.exp(s) for s in row]
        p = [x / sum(e) for x in e]
        mean = sum(x * s for x, s in zip(p, row, strict=True))
        want = [float(-x * (s - mean)) for x, s in zip(p, row, strict=True)]
    torch.testing.assert_close(scores.grad.double(), torch.tensor(want).double(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("temperature", [0.7, 3.0])
@pytest.mark.parametrize("offset", [1e5, -1e5])
def test_a_common_offset_costs_no_digit_at_any_temperature(temperature: float, offset: float) -> None:
    scores = torch.randn(40, 64) + offset
    exact = torch.softmax((scores.double() - scores.double().amax(-1, keepdim=True)) / temperature, -1)
    for passed in (temperature, torch.tensor(temperature)):
        weights = F.softmax(scores, temperature=passed)
        assert (weights - exact).abs().max() < 4e-7
        entropy = F.entropy(scores, temperature=passed)
        assert (entropy + (exact * exact.log()).sum(-1)).abs().max() < 2e-6


def test_a_distance_that_overflows_over_the_temperature_leaves_its_gradient_finite() -> None:
    scores = torch.tensor([3e38, -3e38, 0.0], requires_grad=True)
    for value in (1e-3, 1.0, math.inf):
        temperature = torch.tensor(value, requires_grad=True)
        for measure in (F.softmax, F.entropy):
            found = measure(scores, temperature=temperature).flatten()[0]
            gradients = torch.autograd.grad(found, (scores, temperature))
            assert all(bool(part.isfinite().all()) for part in gradients)
