"""Every normalizer of scores: values by their definitions, any dim, temperature and type, two derivatives."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attemper import InputError
from attemper import functional as F
from attemper.call import row_operator
from tests.functional.conftest import temperatures
from tests.laws.rows import rows
from tests.support import row_oracle as oracle

pytestmark = [pytest.mark.each, pytest.mark.turns(3)]


class Named(NamedTuple):
    """A normalizer with its number, and the same by the oracle."""

    call: Callable[..., Tensor]
    oracle: oracle.Weights
    shift: bool = True
    """Whether a constant added to a row changes nothing."""
    whole: bool = True
    """Whether rows sum to 1."""


def with_number(function: Callable[..., Tensor], *numbers: Any) -> Callable[..., Tensor]:
    return lambda scores, **options: function(scores, *numbers, **options)


NORMALIZERS = {
    "softmax_plus_one": Named(F.softmax_plus_one, oracle.with_sink(0.0), shift=False, whole=False),
    "sink": Named(with_number(F.softmax_with_sink, 0.7), oracle.with_sink(0.7), shift=False, whole=False),
    "scalable": Named(F.scalable_softmax, oracle.scalable(1.0)),
    "scalable 0.4": Named(with_number(F.scalable_softmax, 0.4), oracle.scalable(0.4)),
    "sigmoid": Named(with_number(F.sigmoid, -0.5), oracle.sigmoid(-0.5), shift=False, whole=False),
    "topk 1": Named(with_number(F.topk_softmax, 1), oracle.topk(1)),
    "topk 3": Named(with_number(F.topk_softmax, 3), oracle.topk(3)),
    "threshold": Named(with_number(F.threshold_softmax, 0.07), oracle.threshold(0.07)),
    "sparsemax": Named(F.sparsemax, oracle.sparsemax),
    "entmax15": Named(F.entmax15, oracle.entmax15),
    "entmax 1": Named(with_number(F.entmax, 1), oracle.softmax),
    "entmax 1.3": Named(with_number(F.entmax, 1.3), oracle.entmax(1.3)),
    "entmax 1.5": Named(F.entmax, oracle.entmax15),
    "entmax 2": Named(with_number(F.entmax, 2), oracle.sparsemax),
    "entmax 3": Named(with_number(F.entmax, 3.0), oracle.entmax(3.0)),
}
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
HIDDEN = torch.tensor([[1.0, -math.inf, 3.0, 2.5, -1.0], [-math.inf] * 4 + [2.0], [-math.inf] * 5, [0.0] * 5])


@pytest.fixture(params=NORMALIZERS)
def each(request: pytest.FixtureRequest) -> Named:
    return NORMALIZERS[request.param]


def scores_of(dtype: torch.dtype, n: int = 5) -> Tensor:
    spread = torch.tensor([0.1, 1.0, 4.0]).repeat(8)[:, None]
    ascending = (torch.randn(6, n) * 2).sort(-1).values
    return torch.cat(
        [torch.nn.functional.pad(HIDDEN, (0, n - 5), value=-math.inf), torch.randn(24, n) * spread, ascending]
    ).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.usefixtures("row_kernels", "poisoned_empty")
def test_weights_are_those_of_the_oracle(each: Named, dtype: torch.dtype):
    scores = scores_of(dtype)
    weights = each.call(scores)
    assert weights.dtype == dtype
    assert weights.shape == scores.shape
    want = oracle.rows(each.oracle, scores)
    # A few roundings in float32 of numbers up to 1, then one to the type.
    rounded = 8 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 2
    budget = 1e-13 if dtype == torch.float64 else rounded
    error = (weights.double() - want).abs().max().item()
    assert error <= budget, f"off by {error}"
    assert (weights[scores == -math.inf] == 0).all()
    assert (weights >= 0).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.usefixtures("row_kernels", "poisoned_empty")
def test_rows_sum_to_one_within_the_rounding_of_the_type(each: Named, dtype: torch.dtype):
    scores = (torch.randn(12, 4096) * torch.tensor([0.01, 1.0, 5.0]).repeat(4)[:, None]).to(dtype)
    sums = each.call(scores).double().sum(-1)
    if not each.whole:
        want = oracle.rows(each.oracle, scores).sum(-1)
        torch.testing.assert_close(sums, want, rtol=8 * torch.finfo(dtype).eps, atol=0)
    else:
        error = (sums - 1).abs().max().item()
        assert error <= torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 8), f"rows sum to 1 but for {error}"


def test_the_result_has_the_type_that_was_asked_for(each: Named):
    scores = scores_of(torch.bfloat16)
    wide = each.call(scores, dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), oracle.rows(each.oracle, scores), rtol=0, atol=1e-6)
    assert each.call(scores.float(), dtype=torch.float64).dtype == torch.float64


PLACES: list[tuple[tuple[int, ...], int]] = [
    ((1,), -1), ((3, 1), 0), ((3, 1), -1), ((7,), 0), ((2, 0, 4), -1), ((0, 4), 0), ((3, 0), -1), ((0,), 0),
    ((1, 2, 1, 3), 1), *(((2, 3, 4, 5), dim) for dim in range(-4, 4)),
]  # fmt: skip
"""Shapes of scores, and the dimension of the keys."""


@pytest.mark.parametrize(("shape", "dim"), PLACES, ids=str)
@pytest.mark.parametrize("given", ["number", "scalar", "full", "broadcast"])
def test_dim_says_where_the_keys_are_and_temperature_divides_the_scores_of_any_shape(
    each: Named, given: str, shape: tuple[int, ...], dim: int
):
    scores = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    temperature, divisor = temperatures(given, shape, dim)
    weights = each.call(scores, dim=dim, temperature=temperature)
    assert weights.shape == shape
    rows = (scores.detach() / divisor).movedim(dim, -1)
    want = oracle.rows(each.oracle, rows) if scores.numel() else rows
    torch.testing.assert_close(weights.detach().movedim(dim, -1), want.reshape(rows.shape), rtol=1e-12, atol=1e-13)
    (grad,) = torch.autograd.grad(weights.square().sum(), scores)
    assert grad.shape == shape
    assert grad.isfinite().all()


@pytest.mark.parametrize("infinite", [math.inf, torch.tensor(math.inf)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", [name for name in NORMALIZERS if "topk" not in name])
def test_an_infinite_temperature_makes_all_scores_equal(name: str, infinite: Any):
    scores, function = scores_of(torch.float64), NORMALIZERS[name].call
    equal = torch.where(scores == -math.inf, scores, 0.0)
    torch.testing.assert_close(function(scores, temperature=infinite), function(equal), rtol=0, atol=1e-15)


@pytest.mark.parametrize("temperature", [1.0, 3.0, math.inf, torch.tensor(3.0), torch.tensor(math.inf)], ids=str)
@pytest.mark.usefixtures("row_kernels")
def test_topk_chooses_by_the_scores_before_temperature_and_shift_make_some_equal(temperature: Any):
    scores = torch.tensor([[1.0, 1.0 + 2**-23, 1.0 + 2**-22, 0.0], [0.0, 0.0, 1.0, 1e-38]])
    weights = F.topk_softmax(scores, 2, temperature=temperature)
    assert torch.equal(weights > 0, torch.tensor([[False, True, True, False], [False, False, True, True]]))


@pytest.mark.parametrize("small", [1e-30, torch.tensor(1e-30, requires_grad=True)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", [name for name in NORMALIZERS if NORMALIZERS[name].shift])
def test_a_tiny_temperature_leaves_the_largest_score(name: str, small: Any):
    weights = NORMALIZERS[name].call(torch.tensor([[1.0, 2.0, -math.inf], [5.0, 5.0, -1.0]]), temperature=small)
    ties = [1.0, 0.0, 0.0] if name == "topk 1" else [0.5, 0.5, 0.0]
    torch.testing.assert_close(weights.detach(), torch.tensor([[0.0, 1.0, 0.0], ties]), rtol=0, atol=1e-7)
    if isinstance(small, Tensor):
        (grad,) = torch.autograd.grad(weights[:, 0].sum(), small)
        assert grad == 0


@pytest.mark.usefixtures("row_kernels", "poisoned_empty")
def test_a_score_that_is_not_finite_breaks_its_row_and_no_other(each: Named):
    good = torch.tensor([1.0, -math.inf, 2.0])
    for bad in (math.nan, math.inf):
        scores = torch.stack([good, torch.tensor([0.0, -math.inf, bad]), good]).requires_grad_()
        for options in ({}, {"temperature": 2.0}, {"temperature": torch.tensor(2.0)}):
            weights = each.call(scores, **options)
            assert weights[1].isnan().all()
            (grad,) = torch.autograd.grad(weights[[0, 2]].square().sum(), scores)
            assert torch.equal(weights[0], each.call(good[None], **options)[0])
            assert grad[[0, 2]].isfinite().all()


# --- derivatives ---


@pytest.mark.parametrize("n", [1, 2, 5])
def test_first_and_second_derivatives_are_right_under_masks(
    each: Named, n: int, derivatives_agree: Callable[..., bool]
):
    hidden = torch.zeros(4, n + 1, dtype=torch.bool)
    hidden[:, n] = True
    hidden[1] = True

    def function(scores: Tensor) -> Tensor:
        return each.call(scores.masked_fill(hidden, -math.inf))

    scores = torch.randn(4, n + 1, dtype=torch.float64)
    scores[3] *= 0.2
    scores.requires_grad_()
    assert derivatives_agree(function, scores)
    (grad,) = torch.autograd.grad(function(scores).square().sum(), scores)
    assert (grad[hidden] == 0).all()


@pytest.mark.usefixtures("row_kernels", "poisoned_empty")
def test_gradients_in_float32_are_those_of_float64(each: Named):
    scores = torch.cat([scores_of(torch.float32, 9), torch.randn(3, 9) + 1e3])
    above = torch.randn(scores.shape)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = scores.to(dtype).requires_grad_()
        results.append(torch.autograd.grad(each.call(leaf), leaf, above.to(dtype))[0].double())
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=2e-6)


def test_derivatives_of_temperature_are_right(each: Named, derivatives_agree: Callable[..., bool]):
    scores = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    temperature = torch.tensor([0.7, 1.8], dtype=torch.float64, requires_grad=True)
    hidden = torch.tensor([False, False, False, True])

    def function(scores: Tensor, temperature: Tensor) -> Tensor:
        return each.call(scores.masked_fill(hidden, -math.inf), temperature=temperature)

    assert derivatives_agree(function, (scores, temperature))


@pytest.mark.parametrize("name", ["topk 3", "threshold", "entmax 1", "scalable"])
def test_the_gradient_of_a_saturated_row_keeps_its_digits(name: str, monkeypatch: pytest.MonkeyPatch):
    """In PyTorch's kernels; the native ones are right to a rounding of the gradient above them."""
    monkeypatch.setattr(row_operator, "why_unusable", lambda: "a test wants PyTorch's")
    grads = []
    for dtype in (torch.float32, torch.float64):
        scores = torch.tensor([15.0, 14.0, 0.0] if name == "threshold" else [20.0, 0.0, -1.0], dtype=dtype)
        scores.requires_grad_()
        (grad,) = torch.autograd.grad(
            NORMALIZERS[name].call(scores), scores, torch.tensor([0.3, 2.0, 5.0], dtype=dtype)
        )
        grads.append(grad.double())
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=0)


LEARNED: dict[str, tuple[Callable[..., Tensor], list[float]]] = {
    "sink": (F.softmax_with_sink, [0.3, -2.0]),
    "bias": (F.sigmoid, [0.3, -2.0]),
    "s": (F.scalable_softmax, [0.3, 1.5]),
    "alpha": (F.entmax, [1.2, 1.9]),
    "alpha above 2": (F.entmax, [2.3, 4.0]),
    "alpha at 2 and 1.5": (F.entmax, [2.0, 1.5]),
    "alpha near 1": (F.entmax, [1 + 1e-2, 1 + 1e-4]),
}


@pytest.mark.parametrize("what", LEARNED)
def test_derivatives_of_what_is_learned_per_head_are_right(what: str, derivatives_agree: Callable[..., bool]):
    function, numbers = LEARNED[what]
    scores = torch.tensor([[0.1, 0.5, 0.3], [0.9, 0.4, 1.0]], dtype=torch.float64).requires_grad_()
    scores = (torch.cat([scores, scores.flip(0)])).reshape(2, 2, 3).detach().requires_grad_()
    learned = torch.tensor(numbers, dtype=torch.float64).reshape(2, 1).requires_grad_()
    # A step of alpha must not cross 1, and the numbers near it are close to it.
    eps = 1e-6

    def call(scores: Tensor, learned: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(scores, (0, 1), value=-math.inf)
        return function(padded, learned)

    assert derivatives_agree(call, (scores, learned), eps=eps)


@pytest.mark.parametrize("what", LEARNED)
def test_what_is_learned_may_be_a_number_or_any_shape_that_fits(what: str):
    function, (number, _) = LEARNED[what]
    scores = torch.randn(2, 3, 4, 5)
    want = function(scores, number)
    for shape in [(), (1,), (3, 1), (2, 3, 4), (2, 1, 1)]:
        got = function(scores, torch.full(shape, number))
        torch.testing.assert_close(got, want, rtol=0, atol=3e-7)
    got = function(scores, torch.full((4, 5), number), dim=0)
    torch.testing.assert_close(got, function(scores.movedim(0, -1), number).movedim(-1, 0), rtol=0, atol=3e-7)


# --- laws ---


@settings(max_examples=15)
@given(scores=rows(), shift=st.floats(-20, 20), random=st.randoms(use_true_random=False), hidden=st.integers(1, 3))
def test_weights_keep_the_order_of_scores_and_neither_shift_nor_hidden_keys_nor_places_count(
    scores: Tensor, shift: float, random: Any, hidden: int
):
    exact = torch.round(scores * 1024) / 1024  # so that the sum below is exact
    shifted = exact + round(shift * 1024) / 1024
    longer = torch.nn.functional.pad(scores, (0, hidden), value=-math.inf)
    order = list(range(scores.shape[-1]))
    random.shuffle(order)
    larger, tied = (compare(scores[:, :, None], scores[:, None, :]) for compare in (torch.gt, torch.eq))
    for name, (function, _, shift_free, whole) in NORMALIZERS.items():
        weights, padded = function(scores), function(longer)
        assert (weights >= 0).all(), name
        assert (weights[:, :, None] >= weights[:, None, :])[larger].all(), name
        assert torch.equal(padded[:, -hidden:], torch.zeros_like(padded[:, -hidden:])), name
        pairs = [(padded[:, :-hidden], weights, 1e-14)]
        if whole:
            pairs.append((weights.sum(-1), torch.ones_like(weights[:, 0]), 1e-14))
        if shift_free:
            pairs.append((function(shifted), function(exact), 1e-14))
        if "topk" not in name:
            assert (weights[:, :, None] == weights[:, None, :])[tied].all(), name
            pairs.append((function(scores[:, order]), weights[:, order], 1e-13))
        for got, want, atol in pairs:
            torch.testing.assert_close(got, want, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


# --- mistakes ---

ANYTHING: Any = [1.0]
Z = torch.zeros(2, 3)
ERRORS = {
    "k of 0": (lambda: F.topk_softmax(Z, 0), r"topk_softmax\(k=\.\.\.\) must be an int of at least 1, got 0\. It is"),
    "k that is no int": (lambda: F.topk_softmax(Z, 1.5), r"must be an int of at least 1, got 1\.5"),  # pyright: ignore
    "k of True": (lambda: F.topk_softmax(Z, True), r"must be an int of at least 1, got True"),
    "a weight of 1": (
        lambda: F.threshold_softmax(Z, 1.0),
        r"threshold_softmax\(min_weight=\.\.\.\) must be a number from 0 to below 1, got 1\.0\. It is the softmax",
    ),
    "a negative weight": (lambda: F.threshold_softmax(Z, -0.1), r"from 0 to below 1, got -0\.1"),
    "a weight of NaN": (lambda: F.threshold_softmax(Z, math.nan), r"from 0 to below 1, got nan"),
    "alpha below 1": (
        lambda: F.entmax(Z, 0.5),
        r"entmax\(alpha\) must be finite and at least 1, got 0\.5\. 1 is softmax, 1\.5 entmax15, 2 sparsemax; larger",
    ),
    "alpha of NaN": (lambda: F.entmax(Z, math.nan), r"entmax\(alpha\) must be a number, got nan\. 1 is softmax"),
    "alpha of infinity": (lambda: F.entmax(Z, math.inf), r"must be finite and at least 1, got inf"),
    "alpha that does not fit": (
        lambda: F.entmax(Z, torch.full((3,), 1.5)),
        r"entmax\(alpha\) must be broadcastable to \[2\], the scores without their keys, got \[3\]\. 1 is softmax",
    ),
    "alpha in a list": (lambda: F.entmax(Z, ANYTHING), r"entmax\(alpha\) must be a number or a tensor, got list\."),
    "iterations of alpha below 1": (lambda: F.entmax_iterations(Z, 0.9), r"entmax_iterations\(alpha\) must be finite"),
    "bias of NaN": (lambda: F.sigmoid(Z, math.nan), r"sigmoid\(bias\) must be a number, got nan\. It is added"),
    "bias that does not fit": (lambda: F.sigmoid(Z, torch.zeros(3)), r"sigmoid\(bias\) must be broadcastable to \[2\]"),
    "s in a list": (lambda: F.scalable_softmax(Z, ANYTHING), r"scalable_softmax\(s\) must be a number or a tensor"),
    "a sink in a list": (
        lambda: F.softmax_with_sink(Z, ANYTHING),
        r"softmax_with_sink\(sink_logits\) must be a number or a tensor, got list\. A sink is one logit",
    ),
}  # fmt: skip


@pytest.mark.turns(1)
@pytest.mark.parametrize("what", ERRORS)
def test_mistakes_are_told_with_what_was_expected_and_what_came(what: str):
    call, message = ERRORS[what]
    with pytest.raises(InputError, match=message):
        call()
