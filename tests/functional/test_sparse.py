"""entmax: any alpha against exact arithmetic, its gradient, and the iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from attemper import functional as F
from tests.support import row_oracle as oracle

pytestmark = [pytest.mark.each, pytest.mark.turns(2)]

ALPHAS = (1.0, 1.0 + 1e-5, 1.01, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0)


def random_rows(n: int = 12, dtype: torch.dtype = torch.float64) -> Tensor:
    spread = torch.tensor([0.01, 0.3, 1.0, 6.0], dtype=torch.float64).repeat(6)[:, None]
    scores = torch.randn(24, n, dtype=torch.float64) * spread
    return torch.cat([scores, scores.sort(-1).values, scores.round()]).to(dtype)


def precise(scores: list[float], alpha: Any, digits: int) -> list[Any]:
    """The weights with ``digits`` digits, by halving."""
    with mpmath.workdps(digits):
        a, top = mpmath.mpf(alpha) - 1, max(scores)
        d = [mpmath.mpf(s) - mpmath.mpf(top) for s in scores]
        low, high, p = mpmath.mpf(1) / len(d), mpmath.mpf(1), [mpmath.mpf(1)]
        for _ in range(4 * digits):
            largest = (low + high) / 2
            power = largest**a
            p = [(power + a * x) ** (1 / a) if power + a * x > 0 else mpmath.mpf(0) for x in d]
            low, high = (largest, high) if sum(p) < 1 else (low, largest)
        return p


@pytest.mark.parametrize("given_as", ["number", "tensor"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.usefixtures("row_kernels")
@pytest.mark.quick("-1.0-", "1.01", "1.5-", "2.5", "4.0")
def test_any_alpha_agrees_with_the_oracle(alpha: float, given_as: str):
    for dtype, budget in ((torch.float64, 1e-13), (torch.float32, 4e-7)):
        scores = random_rows(dtype=dtype)
        each = alpha if given_as == "number" else torch.tensor(alpha, dtype=dtype)
        # The number as it arrives: 1 + 1e-5 is another one in float32.
        want = oracle.rows(oracle.entmax(float(torch.tensor(alpha, dtype=dtype))), scores)
        error = (F.entmax(scores, each).double() - want).abs().max().item()
        assert error <= budget, f"off by {error} in {dtype}"


@pytest.mark.parametrize("alpha", [3.0, 10.0, 100.0, 1e3])
@pytest.mark.parametrize("small", [0.4, 0.1, 1e-3, 1e-6])
def test_two_keys_share_as_their_equation_says(alpha: float, small: float):
    """(1 - p)^a - p^a = a d has the distance d for every smaller weight p."""
    with mpmath.workdps(400):
        a = mpmath.mpf(alpha) - 1
        distance = float(((1 - mpmath.mpf(small)) ** a - mpmath.mpf(small) ** a) / a)
    weights = F.entmax(torch.tensor([distance, 0.0], dtype=torch.float64), alpha)
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-15)
    # What a rounding of the distance and of q^a moves p by: (1 - p)^(a-1) + p^(a-1) is the derivative, but for a.
    with mpmath.workdps(50):
        p = mpmath.mpf(small)
        derivative = (1 - p) ** (a - 1) + p ** (a - 1)
        budget = 1e-14 + float(1e-15 * (1 + a) * (1 - p) ** a / a / derivative)
    assert weights.sort().values[0].item() == pytest.approx(small, abs=budget)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("row_kernels")
def test_a_huge_alpha_leaves_the_largest_scores_in_equal_parts(dtype: torch.dtype):
    scores = torch.tensor([[1.0, 3.0, 2.0, -math.inf], [3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    want = torch.tensor([[0, 1.0, 0, 0], [1 / 3, 1 / 3, 0, 1 / 3], [0.25] * 4], dtype=dtype)
    for alpha in (1e3, torch.tensor(1e3, dtype=dtype), 1e6, 1e30):
        torch.testing.assert_close(F.entmax(scores, alpha), want, rtol=0, atol=torch.finfo(dtype).eps)


def conditions(scores: Tensor, weights: Tensor, alpha: float) -> float:
    """The largest violation of the conditions of optimality, in scores, and of the sum.

    On the support z_j - (w_j^a - 1) / a is the same for all, and it is no less than z_j + 1 / a elsewhere. What is
    below the normal numbers has lost its digits: there it is no less than z_j - (w^a - 1) / a of the smallest of them.
    """
    z, w, a = scores.double(), weights.double(), alpha - 1
    seen = z != -math.inf
    assert (w[~seen] == 0).all()
    tiny = torch.finfo(weights.dtype).smallest_normal
    power = torch.expm1(a * w.clamp(min=tiny).log()) / a
    top = w.argmax(-1, keepdim=True)
    level = z.gather(-1, top) - power.gather(-1, top)
    inside = torch.where(w >= tiny, (torch.where(seen, z, 0.0) - power - level).abs(), 0.0)
    least = -math.expm1(a * math.log(tiny)) / a
    outside = torch.where(seen & (w < tiny), z + least - level, -math.inf).clamp(min=0)
    return max(inside.max().item(), outside.max().item(), (w.sum(-1) - 1).abs().max().item())


LARGE = 100_000
HOSTILE: dict[str, Callable[[], Tensor]] = {
    "ties": lambda: torch.tensor([[2.0, 2.0, 2.0, 1.9, 1.9, 0.0], [0.0] * 6, [1.0, 1.0, -1.0, -1.0, -1.0, -1.0]]),
    "offset 1e5": lambda: torch.randn(12, 40) + 1e5,
    "offset -1e5": lambda: torch.randn(12, 40) - 1e5,
    "bfloat16 ladder": lambda: (-5.0 * torch.arange(20) - 1000).to(torch.bfloat16).float()[None],
    "one key": lambda: torch.randn(5, 1) * 100,
    "100,000 keys": lambda: torch.randn(2, LARGE),
    "100,000 keys, close": lambda: torch.randn(2, LARGE) * 1e-4,
    "one large, 100,000 small": lambda: torch.cat([torch.tensor([0.5]), torch.rand(LARGE) * 1e-5])[None],
    "one large, 100,000 small, far": lambda: torch.cat([torch.tensor([1.2]), torch.rand(LARGE) * 1e-3])[None],
    "equal, 100,000": lambda: torch.full((1, LARGE), 3.3),
    "ascending": lambda: torch.linspace(-3, 3, 999)[None],
    "far apart": lambda: torch.tensor([[3e38, -3e38, 0.0], [3e38, 3e38, -3e38], [1e-30, 0.0, -1e-30]]),
    "subnormal": lambda: torch.tensor([[1e-40, 0.0, -1e-45]]),
}


@pytest.mark.hostile
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0, 3.0, torch.tensor(1.2), torch.tensor(3.0)], ids=str)
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("row_kernels", "poisoned_empty")
def test_the_conditions_of_optimality_hold_in_float32_on_hostile_rows(name: str, alpha: float | Tensor):
    scores = HOSTILE[name]()
    found = [F.entmax(scores, alpha)]
    found += [F.sparsemax(scores)] if alpha == 2 else [F.entmax15(scores)] if alpha == 1.5 else []
    off = max(conditions(scores, weights, float(alpha)) for weights in found)
    assert off <= 1e-6, f"off by {off}"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("alpha", [1.0001, 1.1, 1.5, 1.9, 2.0, 2.1, 5.0, 30.0])
def test_the_conditions_of_optimality_hold_in_float64(alpha: float, scale: float):
    scores = random_rows(200) * scale
    off = conditions(scores, F.entmax(scores, torch.tensor(alpha, dtype=torch.float64)), alpha)
    assert off <= 1e-12 * max(1.0, scale), f"off by {off}"


# --- alpha's gradient ---


def derivative_in_alpha(row: list[float], alpha: float) -> list[float]:
    """dw/dalpha from 80 digits; in the limit from above at alpha = 1."""
    with mpmath.workdps(80):
        step = mpmath.mpf(10) ** -25
        one, two = (precise(row, mpmath.mpf(alpha) + k * step, 80) for k in (1, 2))
        return [float((y - x) / step) for x, y in zip(one, two, strict=True)]


@pytest.mark.parametrize("alpha", [1.0, 1.0 + 1e-9, 1.0 + 1e-5, 1.01, 1.3, 1.5, 1.99, 2.0, 2.01, 3.0])
@pytest.mark.quick("1.00001")
def test_the_gradient_of_alpha_is_exact_however_near_to_one(alpha: float):
    torch.manual_seed(3)
    for row in (torch.randn(4, dtype=torch.float64) * torch.tensor([[0.3], [1.0], [7.0]])).tolist():
        want = torch.tensor(derivative_in_alpha(row, alpha), dtype=torch.float64)
        for dtype, relative in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            scores = torch.tensor(row, dtype=torch.float64).to(dtype)
            got = torch.autograd.functional.jacobian(
                lambda a, scores=scores: F.entmax(scores, a), torch.tensor(alpha, dtype=dtype)
            )
            # A row that has decided for one key has a gradient of 0.
            error = ((got.double() - want).abs().max() / want.abs().max().clamp(min=1e-9)).item()
            assert error <= relative, f"off by {error} in {dtype}"


def test_the_gradient_of_a_huge_alpha_is_that_of_a_row_that_has_decided():
    alpha = torch.tensor(1e3, dtype=torch.float64, requires_grad=True)
    for row in ([1.0, 0.0, -3.0], [2.0, 2.0, 0.0]):
        weights = F.entmax(torch.tensor(row, dtype=torch.float64), alpha)
        (grad,) = torch.autograd.grad(weights[0], alpha)
        assert grad.item() == pytest.approx(0.0, abs=1e-15)
    # Two keys: (1 - p)^a - p^a = a d, and so dp/da = ((1-p)^a log(1-p) - p^a log p - d) / (a ((1-p)^(a-1) + p^(a-1))).
    p, a = 0.3, 40.0
    with mpmath.workdps(40):
        d = ((1 - mpmath.mpf(p)) ** a - mpmath.mpf(p) ** a) / a
        numerator = (1 - p) ** a * mpmath.log(1 - p) - p**a * mpmath.log(p) - d
        want = float(numerator / (a * ((1 - p) ** (a - 1) + p ** (a - 1))))
    alpha = torch.tensor(a + 1, dtype=torch.float64, requires_grad=True)
    weights = F.entmax(torch.tensor([float(d), 0.0], dtype=torch.float64), alpha)
    (grad,) = torch.autograd.grad(weights[1], alpha)
    assert grad.item() == pytest.approx(want, rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 1.0 + 1e-5, 1.5, 2.0, 30.0, 1e3])
@pytest.mark.usefixtures("row_kernels")
def test_gradients_are_finite_where_weights_are(alpha: float, dtype: torch.dtype):
    scores = random_rows(50, dtype).requires_grad_()
    each = torch.tensor(alpha, dtype=dtype, requires_grad=True)
    weights = F.entmax(scores, each)
    grads = torch.autograd.grad((weights * torch.arange(50)).sum(), (scores, each))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("shape", [(), (3, 1), (2, 3, 1), (2, 3, 4)], ids=str)
def test_the_gradient_of_alpha_is_summed_to_its_shape(shape: tuple[int, ...]):
    scores, above = torch.randn(2, 3, 4, 6, dtype=torch.float64), torch.randn(2, 3, 4, 6, dtype=torch.float64)
    alpha = torch.full(shape, 1.4, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(F.entmax(scores, alpha), alpha, above)
    full = torch.full((2, 3, 4), 1.4, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(F.entmax(scores, full), full, above)
    torch.testing.assert_close(got, want.sum_to_size(shape))


def test_half_precision_has_gradients_in_its_own_type():
    scores = torch.randn(3, 5, dtype=torch.bfloat16, requires_grad=True)
    alpha = torch.tensor(1.3, dtype=torch.bfloat16, requires_grad=True)
    grads = torch.autograd.grad(F.entmax(scores, alpha).square().sum(), (scores, alpha))
    assert [grad.dtype for grad in grads] == [torch.bfloat16] * 2


# --- the iteration ---


@pytest.mark.parametrize("alpha", [1.0 + 1e-5, 1.1, 1.5, 2.0, 2.5, 5.0, 30.0, 1e3])
@pytest.mark.parametrize("scale", [1e-8, 1e-2, 1.0, 30.0, 1e5])
def test_the_iteration_ends_and_says_how_often_it_went_round(alpha: float, scale: float):
    scores = torch.cat([random_rows(300), torch.linspace(-1, 0, 300, dtype=torch.float64)[None]]) * scale
    count = F.entmax_iterations(scores, alpha)
    assert count.shape == scores.shape[:-1]
    assert count.dtype == torch.int64
    assert (count >= 1).all()
    # Newton alone where it is monotone; else at worst every second round halves, down to the last of 53 digits.
    assert count.max().item() <= (16 if alpha <= 2 else 110), f"{count.max().item()}"


def test_rows_without_a_search_take_no_round():
    scores = torch.tensor([[1.0, 2.0], [-math.inf, -math.inf], [math.nan, 0.0], [1.0, math.inf], [0.0, 1.0]])
    count = F.entmax_iterations(scores, torch.tensor([1.0, 1.3, 1.3, 1.3, 1.3]))
    assert count[:4].tolist() == [0, 0, 0, 0]
    assert count[4] > 0
    assert F.entmax_iterations(scores, 1.3, dim=0).shape == (2,)
    assert F.entmax_iterations(torch.zeros(3, 0), 1.3).tolist() == [0, 0, 0]


@pytest.mark.usefixtures("row_kernels")
def test_a_row_whose_alpha_is_no_alpha_is_nan_and_no_other():
    scores = torch.randn(5, 4)
    alpha = torch.tensor([0.5, math.nan, math.inf, 1.5, -2.0])
    weights = F.entmax(scores, alpha)
    assert weights[[0, 1, 2, 4]].isnan().all()
    torch.testing.assert_close(weights[3], F.entmax15(scores[3]), rtol=0, atol=1e-6)
