"""Weights of rows of scores in C++ and gradients, against PyTorch in float64 and differences of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attemper.backends.native import rows as native_rows
from attemper.backends.normalizers import NORMALIZERS as NORMALIZERS_IN_TORCH
from tests.backends.test_native import LIBRARIES, each_library

__all__ = ["each_library"]

pytestmark = [
    pytest.mark.each,
    pytest.mark.usefixtures("poisoned_empty", "each_library"),
    pytest.mark.skipif(not LIBRARIES, reason="native is not built (where a compiler is, test_native_build.py fails)"),
]
# As (normalizer, number); alpha of entmax is the number here.
NORMALIZERS = (
    ("softmax", 0.0), ("sparsemax", 0.0), ("entmax15", 0.0), ("topk", 1.0), ("topk", 3.0), ("topk", 64.0),
    ("topk", 700.0), ("threshold", 0.0), ("threshold", 0.01), ("threshold", 0.3), ("sigmoid", -0.7),
    *(("entmax", alpha) for alpha in (1.0, 1 + 1e-5, 1.01, 1.25, 1.5, 1.75, 1.99, 2.0, 2.5, 4.0, 1000.0)),
)  # fmt: skip
ERROR = {"sparsemax": 1e-7, "entmax15": 1e-7, "sigmoid": 1.2e-7, "entmax": 3e-7}
"""Of a weight near 1, at most, in roundings of 6e-8: its own, and half a one of the score's distance; sigmoid: exp, the
sum and the quotient; entmax of any alpha: three of an exponent beside them, whose sum is brought back to 1."""


def wanted(scores: Tensor, normalizer: str, number: float) -> Tensor:
    """The weights of each row in float64, by PyTorch, which tests/functional hold against loops and many digits."""
    given = ("entmax", 1.0) if normalizer == "softmax" else (normalizer, number)
    bad = (scores.isnan() | scores.isposinf()).any(-1, keepdim=True)
    return NORMALIZERS_IN_TORCH[given[0]].weights(scores.double(), given[1], None).masked_fill(bad, torch.nan)


def hostile(n: int) -> dict[str, Tensor]:
    """Rows [r, n] that break solvers."""
    normal = torch.randn(4, n)
    bad = torch.randn(3, n)
    bad[0], bad[1, n // 2], bad[2, 0] = -torch.inf, torch.nan, torch.inf
    border = torch.full((1, n), -0.9)
    border[0, n // 3] = 0.0
    # A long row is first guessed from every 16th vector of it: here there is little else, or nothing at all.
    vector = torch.arange(n) // torch.tensor([[4], [8], [16]])
    far = torch.rand(3, n) * 3 - 4
    sampled, skipped = far.clone(), far.masked_fill(vector % 16 == 0, -torch.inf)
    sampled[vector % 16 != 0] = -torch.inf
    sampled[:, n // 2], skipped[:, n // 2] = -0.5, -0.5
    return {
        "normal": normal,
        "wide": normal * 4,
        "narrow": normal * 0.01,
        "ascending": normal.sort(-1).values,
        "ties": torch.randint(0, 4, (4, n)).float(),
        "equal": torch.ones(1, n),
        "offset": normal + 1e5,
        "ladder": (-5.0 * torch.arange(n) - 1000).bfloat16().float()[None],
        "hidden": torch.where(torch.rand(4, n) < 0.5, normal, -torch.inf),
        "bad": bad,
        "just inside": border,
        "sampled alone": sampled,
        "not sampled": skipped,
        "huge": normal * 1e30,
    }


@pytest.mark.parametrize(("normalizer", "number"), NORMALIZERS)
@pytest.mark.parametrize("n", [1, 2, 17, 64, 300, 1100])
@pytest.mark.quick(
    "-1-softmax-0.0",
    "-17-entmax-1.75",
    "-300-topk-64.0",
    "-64-entmax15-0.0",
    "-1100-sparsemax-0.0",
    "-1100-entmax-1.25",
    "-2-threshold-0.3",
    "-64-sigmoid",
)
@pytest.mark.turns(2)
def test_weights_agree_with_float64_on_hostile_rows(normalizer: str, number: float, n: int):
    for name, scores in hostile(n).items():
        got, want = native_rows.weights(scores, normalizer, number).double(), wanted(scores, normalizer, number)
        assert torch.equal(got.isnan(), want.isnan()), name
        worst = float((got - want).abs().nan_to_num(0.0).max())
        assert worst <= ERROR.get(normalizer, 1e-7), (name, worst)
        if normalizer != "sigmoid":
            sums = got[want.sum(-1) > 0.5].sum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-5)
        assert not (got < 0).any()


@pytest.mark.parametrize("alpha", [1 + 1e-7, 1.001, 1.1, 1.25, 1.4, 1.7, 1.999])
@pytest.mark.quick("1.1", "1.999")
def test_no_weight_of_entmax_is_off_by_more_than_five_roundings_of_the_largest(alpha: float):
    """The search begins with few digits. Nothing is left of that, however many keys are at the border."""
    normal = torch.randn(6, 550)
    largest = wanted(normal, "entmax", alpha).max(-1, keepdim=True).values
    border = normal.max(-1, keepdim=True).values - largest ** (alpha - 1) / (alpha - 1)
    steps = torch.tensor([-1e-3, -1e-4, -1e-5, 0.0, 1e-5, 1e-4])[:, None]
    gathered = torch.cat([normal, (border - steps.double()).float().expand(6, 550)], -1)
    for scores in (torch.randn(8, 1100), torch.randn(4, 4000), gathered, torch.randn(4, 30), torch.zeros(1, 3000)):
        got, want = native_rows.weights(scores, "entmax", alpha).double(), wanted(scores, "entmax", alpha)
        worst = ((got - want).abs().max(-1).values / want.max(-1).values).max()
        assert worst <= 5 * 2**-24, worst
        torch.testing.assert_close(got.sum(-1), torch.ones_like(got[:, 0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("alpha", [1.2, 1.25, 1.4])
def test_the_support_of_entmax_is_that_of_float64(alpha: float):
    """Hundreds of keys less than a ten-thousandth from the border of the support, on both of its sides."""
    normal = torch.randn(8, 1500)
    maximum = normal.max(-1, keepdim=True).values
    reach = wanted(normal, "entmax", alpha).max(-1, keepdim=True).values ** (alpha - 1) / (alpha - 1)
    at = torch.linspace(-1e-4, 1e-4, 548, dtype=torch.float64)
    scores = torch.cat([normal, (maximum - reach * (1 - at)).float()], -1)
    got, want = native_rows.weights(scores, "entmax", alpha).double(), wanted(scores, "entmax", alpha)
    other = torch.maximum(got, want)[(got > 0) != (want > 0)]
    # [1 + q d / w0^q]: what rounding takes of a score moves it by no more.
    assert bool((other.div(want.max()) ** (alpha - 1) < 2e-7).all()), other


@pytest.mark.parametrize(("normalizer", "number"), NORMALIZERS)
@pytest.mark.turns(3)
def test_weights_of_rows_of_a_hundred_thousand(normalizer: str, number: float):
    scores = torch.stack([torch.randn(100_000), torch.zeros(100_000)])
    got = native_rows.weights(scores, normalizer, number)
    if normalizer == "sigmoid":
        torch.testing.assert_close(got.double(), torch.sigmoid(scores.double() + number), rtol=0, atol=1.2e-7)
        return
    torch.testing.assert_close(got.sum(-1, dtype=torch.float64), torch.ones(2).double(), rtol=0, atol=1e-5)
    if normalizer == "topk":
        assert torch.equal(got[0].nonzero()[:, 0], scores[0].topk(int(number)).indices.sort().values)
        assert torch.equal(got[1].nonzero()[:, 0], torch.arange(int(number)))
        return
    assert torch.equal(got[1], got[1, :1].expand(100_000))
    # The optimality conditions of entmax: on the support a key's score less its own derivative is one number.
    alpha = {"softmax": 1.0, "sparsemax": 2.0, "entmax15": 1.5}.get(normalizer, number)
    if normalizer == "threshold" or alpha == 1 or alpha > 100:
        return
    w, s = got[0].double(), scores[0].double()
    inside = w > 0.1 * w.max()
    level = s[inside] - (w[inside] ** (alpha - 1)) / (alpha - 1)
    assert level.max() - level.min() < 1e-4 / min(1, alpha - 1)
    assert (s[w == 0] <= level.mean() + 1e-4 / min(1, alpha - 1)).all()


def test_alpha_of_each_row():
    scores, alpha = torch.randn(7, 33), torch.tensor([1.0, 1.2, 1.5, 1.8, 2.0, 3.0, 1.1])
    got = native_rows.weights(scores, "entmax", alpha=alpha)
    for row, a, w in zip(scores, alpha.tolist(), got, strict=True):
        assert torch.equal(native_rows.weights(row[None], "entmax", a)[0], w)


@pytest.mark.parametrize("normalizer", ["sparsemax", "entmax15", "entmax", "topk", "threshold", "sigmoid"])
def test_rows_do_not_depend_on_threads_or_repeats(normalizer: str, full_size: bool):
    scores, number = torch.randn(300, 500), {"entmax": 1.3, "topk": 9.0, "threshold": 0.01}.get(normalizer, 0.0)
    grad = torch.randn_like(scores)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = native_rows.weights(scores, normalizer, number)
        gradient = native_rows.gradient(want, grad, normalizer, number)
        for threads in (1, 2, 4) * (7 if full_size else 1):
            torch.set_num_threads(threads)
            assert torch.equal(native_rows.weights(scores, normalizer, number), want)
            assert torch.equal(native_rows.gradient(want, grad, normalizer, number), gradient)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("normalizer", "number"), [pair for pair in NORMALIZERS if pair[1] < 100])
@pytest.mark.parametrize("n", [1, 13, 200])
@pytest.mark.turns(3)
def test_gradients_agree_with_differences_of_the_definition(normalizer: str, number: float, n: int):
    """<gradient(w, g), u> against (<g, w(s + h u)> - <g, w(s - h u)>) / 2h in float64."""
    scores = torch.randn(6, n)
    # Keys near the border change the support within the step: their rows are not differentiable there.
    grad, step, direction = torch.randn(6, n), 1e-6, torch.randn(6, n).double()
    w = native_rows.weights(scores, normalizer, number)
    gradient = native_rows.gradient(w, grad, normalizer, number).double()
    up, down = (wanted(scores.double() + sign * step * direction, normalizer, number) for sign in (1, -1))
    smooth = ((up > 0) == (down > 0)).all(-1)
    want = ((up - down) * grad.double()).sum(-1) / (2 * step)
    got = (gradient * direction).sum(-1)
    assert smooth.any()
    # Above alpha = 2 the gradient of a weight near 0 has no bound: w^(2 - alpha) times the weight's rounding.
    steep = (w.double().masked_fill(w == 0, 1.0).amin(-1) ** min(0.0, 1 - number)) if normalizer == "entmax" else 1.0
    allowed = (2e-5 + 4e-7 * steep) * (1 + want.abs())
    assert ((got - want).abs() <= allowed)[smooth].all(), (got - want)[smooth]


@pytest.mark.parametrize("n", [2, 7, 10, 100, 1000, 1100])
def test_equal_keys_are_not_below_their_own_share(n: int):
    """A least weight of 1/n, and one that only the largest may be below."""
    for value in (0.0, 3.3, -1e5):
        scores = torch.full((1, n), value)
        torch.testing.assert_close(native_rows.weights(scores, "threshold", 1 / n), torch.full((1, n), 1 / n))
    scores[0, 1] = value + 1
    weights = native_rows.weights(scores, "threshold", 0.999)
    assert torch.equal(weights.nonzero(), torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    ("normalizer", "number"), [pair for pair in NORMALIZERS if pair[0] != "sigmoid" and pair[1] < 100]
)
@pytest.mark.turns(3)
def test_a_gradient_at_a_key_without_weight_is_not_met(normalizer: str, number: float):
    scores = torch.randn(4, 30)
    scores[:, 3::4] = -torch.inf
    weights, grad = native_rows.weights(scores, normalizer, number), torch.randn(4, 30)
    want = native_rows.gradient(weights, grad, normalizer, number)
    for value in (torch.nan, torch.inf):
        got = native_rows.gradient(weights, grad.masked_fill(weights == 0, value), normalizer, number)
        assert torch.equal(got, want)


def test_gradients_of_empty_and_bad_rows():
    scores = torch.randn(3, 20)
    scores[0], scores[1, 3] = -torch.inf, torch.nan
    for normalizer, number in (("sparsemax", 0.0), ("entmax15", 0.0), ("entmax", 1.3), ("topk", 3.0), ("sigmoid", 0.0)):
        gradient = native_rows.gradient(
            native_rows.weights(scores, normalizer, number), torch.randn(3, 20), normalizer, number
        )
        assert torch.equal(gradient[0], torch.zeros(20))
        assert gradient[1].isnan().all()
        assert gradient[2].isfinite().all()
