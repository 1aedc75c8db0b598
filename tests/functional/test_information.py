"""Divergence, mutual information, rate and distortion, the PAC-Bayes bound: definitions, laws, gradients, mistakes."""

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attemper import InputError
from attemper import functional as F
from tests.laws.rows import rows

INF = math.inf


def by_loops(scores: Tensor) -> Any:
    """I of [Q, K] scores in 60 digits: the entropy of the mean less the mean of the entropies."""
    weights = []
    for row in scores.tolist():
        e = [mpmath.mpf(0) if s == -INF else mpmath.exp(mpmath.mpf(s)) for s in row]
        if sum(e):
            weights.append([x / sum(e) for x in e])
    if not weights:
        return mpmath.mpf(0)
    mean = [sum(column) / len(weights) for column in zip(*weights, strict=True)]
    return plain_entropy(mean) - sum(plain_entropy(p) for p in weights) / len(weights)


def plain_entropy(p: list[Any]) -> Any:
    return -sum(x * mpmath.log(x) for x in p if x > 0)


@pytest.fixture(autouse=True)
def _digits():
    with mpmath.workdps(60):
        yield


MASKED = torch.tensor(
    [[1.0, -INF, 3.0, 2.5], [-INF, -INF, 0.5, 700.0], [-INF] * 4, [0.0, -INF, -800.0, 1.0]], dtype=torch.float64
)


# Divergence from uniform


@given(scores=rows())
def test_the_divergence_from_uniform_is_the_log_of_the_keys_less_the_entropy(scores: Tensor):
    n = scores.shape[-1]
    divergence = F.kl_to_uniform(scores)
    torch.testing.assert_close(divergence, math.log(n) - F.entropy(scores), rtol=1e-12, atol=1e-13)
    assert (divergence >= 0).all()
    assert (divergence <= math.log(n)).all()


def test_the_divergence_counts_the_keys_that_the_row_sees():
    got = F.kl_to_uniform(MASKED)
    n = torch.tensor([3.0, 2.0, 1.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(got, n.log() - F.entropy(MASKED), rtol=1e-14, atol=1e-15)
    assert got[2] == 0


def test_a_small_divergence_keeps_its_digits_in_float32():
    scores = torch.linspace(-1, 1, 64)
    got = F.kl_to_uniform(scores, temperature=1000.0).item()
    p = [mpmath.exp(mpmath.mpf(s) / 1000) for s in scores.tolist()]
    want = mpmath.log(64) - plain_entropy([x / sum(p) for x in p])
    assert abs(got - want) <= 1e-3 * want  # log n - H in float32 leaves no digit: want is 1.7e-7
    assert want < 2e-7


@pytest.mark.parametrize("dim", [-1, 0, 1, -3])
def test_dim_and_temperature_are_those_of_entropy(dim: int):
    scores = torch.randn(3, 4, 5, dtype=torch.float64)
    n = scores.shape[dim]
    for temperature in (0.3, INF, torch.tensor(2.0, dtype=torch.float64)):
        want = math.log(n) - F.entropy(scores, dim=dim, temperature=temperature)
        torch.testing.assert_close(F.kl_to_uniform(scores, dim=dim, temperature=temperature), want, atol=1e-14, rtol=0)


# Mutual information


@given(scores=rows(), temperature=st.sampled_from([0.1, 1.0, 3.0, 1000.0]))
def test_mutual_information_is_the_entropy_of_the_mean_less_the_mean_entropy(scores: Tensor, temperature: float):
    got = F.mutual_information(scores, temperature=temperature)
    want = by_loops(scores / temperature)
    assert abs(got.item() - want) <= 1e-14 + 1e-12 * want


@given(scores=rows(), temperature=st.floats(0.05, 1e6), wide=st.booleans())
def test_mutual_information_is_never_negative_nor_above_the_log_of_rows_or_keys(
    scores: Tensor, temperature: float, wide: bool
):
    scores = scores if wide else scores.float()
    got = F.mutual_information(scores, temperature=temperature).item()
    assert 0 <= got <= min(math.log(scores.shape[0]), math.log(scores.shape[1]))


def test_hidden_keys_and_empty_rows_are_left_out():
    got = F.mutual_information(MASKED).item()
    assert abs(got - by_loops(MASKED)) <= 1e-15
    padded = torch.cat([MASKED, torch.full((4, 2), -INF, dtype=torch.float64)], -1)
    assert F.mutual_information(padded).item() == got
    assert F.mutual_information(torch.full((3, 4), -INF)).item() == 0
    assert F.mutual_information(torch.zeros(2, 0, 4)).tolist() == [0, 0]
    assert F.mutual_information(torch.zeros(2, 3, 0)).tolist() == [0, 0]


def test_little_information_keeps_its_digits_in_float32():
    scores = torch.randn(8, 64)
    want = by_loops(scores.double() / 1000)
    got = F.mutual_information(scores, temperature=1000.0).item()
    assert want < 1e-6
    assert abs(got - want) <= 1e-3 * want


def test_leading_dimensions_are_kept_and_temperature_may_differ_by_row():
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    temperature = torch.rand(3, 4, dtype=torch.float64) + 0.5
    got = F.mutual_information(scores, temperature=temperature)
    assert got.shape == (2, 3)
    for b in range(2):
        for h in range(3):
            want = by_loops(scores[b, h] / temperature[h][:, None])
            assert abs(got[b, h].item() - want) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_are_float32_at_least(dtype: torch.dtype):
    scores = torch.randn(3, 4).to(dtype)
    want = torch.float64 if dtype == torch.float64 else torch.float32
    assert F.mutual_information(scores).dtype == want
    assert F.kl_to_uniform(scores).dtype == want
    curve = F.rate_distortion(scores, torch.randn(4, 2).to(dtype), [1.0])
    assert {part.dtype for part in curve} == {want}
    torch.testing.assert_close(F.mutual_information(scores), F.mutual_information(scores.to(want)))


# Rate and distortion


def test_a_curve_has_the_rate_and_the_distortion_of_each_temperature():
    scores, value = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(2, 6, 3, dtype=torch.float64)
    temperatures = (0.2, 1.0, 4.0, INF)
    curve = F.rate_distortion(scores, value, temperatures)
    assert curve.temperature.tolist() == list(temperatures)
    assert curve.rate.shape == curve.distortion.shape == (2, 4)
    at_one = torch.softmax(scores, -1) @ value
    for place, temperature in enumerate(temperatures):
        assert torch.equal(curve.rate[:, place], F.mutual_information(scores, temperature=temperature))
        moved = ((torch.softmax(scores / temperature, -1) @ value - at_one) ** 2).sum((1, 2))
        torch.testing.assert_close(curve.distortion[:, place], moved / (at_one**2).sum((1, 2)), rtol=1e-12, atol=1e-25)
    assert (curve.distortion[:, 1] == 0).all()
    assert curve.rate[:, 3].abs().max() == 0
    assert torch.equal(
        F.rate_distortion(scores, value, torch.tensor(temperatures, dtype=torch.float64)).rate, curve.rate
    )


def test_values_shared_by_heads_broadcast_and_the_wider_type_is_kept():
    scores, value = torch.randn(2, 3, 5, 6), torch.randn(6, 3, dtype=torch.float64)
    curve = F.rate_distortion(scores, value, [0.5, 2.0])
    assert curve.distortion.shape == (2, 3, 2)
    assert curve.distortion.dtype == curve.rate.dtype == torch.float64
    torch.testing.assert_close(curve.distortion[1, 2], F.rate_distortion(scores[1, 2], value, [0.5, 2.0]).distortion)


def test_an_output_of_zero_is_distorted_infinitely_or_not_at_all():
    even = torch.zeros(1, 2)
    assert F.rate_distortion(even, torch.zeros(2, 1), [3.0]).distortion.tolist() == [0]
    # The second weight is e^-200, which float32 holds as 0, at temperature 1, and 0.12 at 100.
    scores, value = torch.tensor([[200.0, 0.0]]), torch.tensor([[0.0], [1.0]])
    assert F.rate_distortion(scores, value, [1.0, 100.0]).distortion.tolist() == [0, INF]


# Gradients


def finite(shape: tuple[int, ...], hidden: bool) -> tuple[Tensor, Tensor]:
    scores = (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    mask = torch.zeros(shape, dtype=torch.bool)
    if hidden:
        mask = torch.rand(shape) < 0.3
        mask[..., 0, :] = True
    return scores, mask


@pytest.mark.parametrize("hidden", [False, True], ids=["all visible", "masked"])
@pytest.mark.parametrize("name", ["kl_to_uniform", "mutual_information"])
def test_two_derivatives_by_scores_and_temperature_are_right(
    name: str, hidden: bool, derivatives_agree: Callable[..., bool]
):
    scores, mask = finite((2, 3, 4), hidden)
    temperature = (torch.rand(2, 3, dtype=torch.float64) + 0.5).requires_grad_()

    def function(scores: Tensor, temperature: Tensor) -> Tensor:
        return getattr(F, name)(scores.masked_fill(mask, -INF), temperature=temperature)

    assert derivatives_agree(function, (scores, temperature))
    grads = torch.autograd.grad(function(scores, temperature).sum(), (scores, temperature))
    assert (grads[0][mask] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("hidden", [False, True], ids=["all visible", "masked"])
def test_derivatives_of_a_curve_are_right(hidden: bool, full_size: bool):
    scores, mask = finite((2, 3, 4), hidden)
    value = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    temperatures = torch.tensor([0.6, 2.0], dtype=torch.float64, requires_grad=True)

    def function(scores: Tensor, value: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        return F.rate_distortion(scores.masked_fill(mask, -INF), value, temperatures)[1:]

    assert torch.autograd.gradcheck(function, (scores, value, temperatures), fast_mode=not full_size)


@pytest.mark.parametrize("name", ["kl_to_uniform", "mutual_information"])
def test_gradients_are_finite_however_sharp_the_rows(name: str):
    scores = torch.tensor([[100.0, 0.0, -200.0], [-1e4, 3e4, 0.0], [0.0, 0.0, -INF]], requires_grad=True)
    (grad,) = torch.autograd.grad(getattr(F, name)(scores).sum(), scores)
    assert grad.isfinite().all()


def test_a_score_that_is_not_a_number_shows():
    scores = torch.tensor([[1.0, math.nan], [0.0, 1.0]])
    assert math.isnan(F.mutual_information(scores).item())
    assert math.isnan(F.kl_to_uniform(scores)[0].item())
    assert math.isnan(F.rate_distortion(scores, torch.ones(2, 1), [2.0]).distortion.item())


# The bound


def test_the_bound_is_the_loss_and_the_root_of_its_complexity():
    want = 0.1 + math.sqrt((2.0 + math.log(2 * math.sqrt(1000) / 0.05)) / 2000)
    got = F.pac_bayes_bound(0.1, 2.0, 1000)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(want, rel=1e-15)
    assert F.pac_bayes_bound(0.1, 2.0, 1000, delta=0.5) < got < F.pac_bayes_bound(0.1, 2.1, 1000)
    assert F.pac_bayes_bound(0.1, 2.0, 2000) < got


def test_a_bound_of_tensors_broadcasts_in_their_type_and_has_gradients():
    kl = torch.tensor([0.0, 1.0, 9.0], requires_grad=True)
    got = F.pac_bayes_bound(0.25, kl, 50)
    assert got.dtype == torch.float32
    assert got.shape == (3,)
    assert F.pac_bayes_bound(torch.zeros(2, 1, dtype=torch.float64), kl, 50).dtype == torch.float64
    wide = torch.tensor([0.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda k: F.pac_bayes_bound(0.2, k, 30), wide)


def test_a_tensor_of_divergences_is_not_checked_and_one_far_below_0_shows():
    assert F.pac_bayes_bound(0.5, torch.tensor(-100.0), 10).isnan()


# Mistakes


ANYTHING: Any = [1.0, 2.0]
SQUARE = torch.zeros(3, 3)
ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "information of a list": (
        lambda: F.mutual_information(ANYTHING),
        r"mutual_information\(scores\) must be a floating tensor, got list",
    ),
    "information of one query": (
        lambda: F.mutual_information(torch.zeros(3)),
        r"mutual_information\(scores\) must be \[\.\.\., queries, keys\], got \[3\]\. One query alone",
    ),
    "information at a negative temperature": (
        lambda: F.mutual_information(SQUARE, temperature=-1.0),
        r"mutual_information\(temperature=\.\.\.\) must be above 0, got -1\.0",
    ),
    "values of ints": (
        lambda: F.rate_distortion(SQUARE, torch.ones(3, 1, dtype=torch.int64), [1.0]),
        r"rate_distortion\(value\) must be a floating tensor, got torch\.int64",
    ),
    "a curve of one query": (
        lambda: F.rate_distortion(torch.zeros(3), torch.ones(3, 1), [1.0]),
        r"rate_distortion\(scores\) must be \[\.\.\., queries, keys\], got \[3\]",
    ),
    "values of other keys": (
        lambda: F.rate_distortion(SQUARE, torch.ones(4, 2), [1.0]),
        r"rate_distortion\(value\) must be \[\.\.\., 3, size\] to match scores \[3, 3\], got \[4, 2\]",
    ),
    "values of one dimension": (
        lambda: F.rate_distortion(SQUARE, torch.ones(3), [1.0]),
        r"rate_distortion\(value\) must be \[\.\.\., 3, size\].*got \[3\]",
    ),
    "values of another batch": (
        lambda: F.rate_distortion(torch.zeros(2, 3, 3), torch.ones(4, 3, 1), [1.0]),
        r"the leading dimensions of \[4, 3, 1\] do not broadcast",
    ),
    "no temperatures": (
        lambda: F.rate_distortion(SQUARE, torch.ones(3, 1), []),
        r"rate_distortion\(temperatures=\.\.\.\) must be a sequence of numbers, e\.g\. \(0\.5, 1\.0, 2\.0\), got \[\]",
    ),
    "one number for temperatures": (
        lambda: F.rate_distortion(SQUARE, torch.ones(3, 1), 2.0),  # type: ignore[arg-type]
        r"must be a sequence of numbers.*got 2\.0",
    ),
    "a table of temperatures": (
        lambda: F.rate_distortion(SQUARE, torch.ones(3, 1), torch.ones(2, 2)),
        r"must be a floating tensor \[m\] with m of at least 1, got \[2, 2\] torch\.float32",
    ),
    "a temperature of 0 among them": (
        lambda: F.rate_distortion(SQUARE, torch.ones(3, 1), [1.0, 0.0]),
        r"rate_distortion\(temperatures=\.\.\.\) must be above 0, got 0\.0",
    ),
    "a loss above 1": (
        lambda: F.pac_bayes_bound(1.5, 1.0, 10),
        r"pac_bayes_bound\(empirical_loss=\.\.\.\) must be from 0 to 1, got 1\.5",
    ),
    "a loss of NaN": (lambda: F.pac_bayes_bound(math.nan, 1.0, 10), r"must be from 0 to 1, got nan"),
    "a loss in a list": (
        lambda: F.pac_bayes_bound(ANYTHING, 1.0, 10),
        r"pac_bayes_bound\(empirical_loss=\.\.\.\) must be a number or a floating tensor, got list",
    ),
    "losses of ints": (
        lambda: F.pac_bayes_bound(torch.zeros(2, dtype=torch.int64), 1.0, 10),
        r"must be a number or a floating tensor, got torch\.int64",
    ),
    "a negative divergence": (
        lambda: F.pac_bayes_bound(0.5, -1.0, 10),
        r"pac_bayes_bound\(kl=\.\.\.\) must be finite and at least 0, got -1\.0",
    ),
    "an infinite divergence": (lambda: F.pac_bayes_bound(0.5, INF, 10), r"must be finite and at least 0, got inf"),
    "temperatures of matrices that do not fit": (
        lambda: F.mutual_information(torch.zeros(2, 3, 4), temperature=torch.ones(2)),
        r"mutual_information\(temperature\) must be broadcastable to \[2, 3\], the scores without .*, got \[2\]",
    ),
    "no rows": (lambda: F.pac_bayes_bound(0.5, 1.0, 0), r"rows=\.\.\.\) must be an int of at least 1, got 0"),
    "half a row": (
        lambda: F.pac_bayes_bound(0.5, 1.0, 2.5),  # type: ignore[arg-type]
        r"must be an int of at least 1, got 2\.5",
    ),
    "a certain bound": (
        lambda: F.pac_bayes_bound(0.5, 1.0, 10, delta=0.0),
        r"pac_bayes_bound\(delta=\.\.\.\) must be a probability above 0 and below 1, got 0\.0",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_mistakes_are_told_with_what_was_expected_and_what_came(what: str):
    call, message = ERRORS[what]
    with pytest.raises(InputError, match=message):
        call()
