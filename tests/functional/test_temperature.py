"""The slope of entropy over temperature, against autograd and mpmath; laws of temperature over length, against their
closed forms and against transformers' own numbers for the models that have them.
"""

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

pytestmark = pytest.mark.each

LENGTHS = (2, 17, 128, 512, 513, 4096, 100_000)
temperatures = st.floats(0.05, 50.0)


def by_autograd(scores: Tensor, temperature: Tensor, bias: Tensor | None = None) -> Tensor:
    """dH/dT of each row [m, n] from the entropy itself; with a bias the scores are divided here."""
    T = temperature.expand(scores.shape[:-1]).clone().requires_grad_()
    if bias is None:
        H = F.entropy(scores, temperature=T)
    else:
        H = F.entropy(torch.where(scores == -math.inf, scores, scores / T[..., None]) + bias)
    return torch.autograd.grad(H.sum(), T)[0]


@given(scores=rows(), temperature=temperatures, data=st.data())
def test_with_a_bias_it_is_the_derivative_of_entropy_too(scores: Tensor, temperature: float, data: st.DataObject):
    n = scores.shape[-1]
    drawn = data.draw(st.lists(st.floats(-10, 10), min_size=n, max_size=n))
    bias, T = torch.tensor(drawn, dtype=torch.float64), torch.tensor(temperature, dtype=torch.float64)
    torch.testing.assert_close(
        F.entropy_slope(scores, temperature, bias=bias),
        by_autograd(scores, T, bias),
        rtol=1e-8,
        atol=1e-10 / temperature,
    )


@given(scores=rows(), temperature=temperatures)
def test_without_a_bias_it_is_the_variance_over_temperature_and_never_negative(scores: Tensor, temperature: float):
    slope = F.entropy_slope(scores, temperature)
    assert (slope >= 0).all()
    variance = F.logit_variance(scores, temperature=temperature)
    torch.testing.assert_close(slope, variance / temperature, rtol=1e-10, atol=1e-12)
    weights = F.softmax(scores, temperature=temperature)
    centred = scores - (weights * scores).sum(-1, keepdim=True)
    torch.testing.assert_close(slope, (weights * centred**2).sum(-1) / temperature**3, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(F.entropy_slope(scores, temperature, bias=torch.zeros_like(scores)), slope)


@pytest.mark.parametrize("temperature", ["0.3", "1", "7"])
def test_digits_of_a_sharp_row_are_those_of_30_digit_arithmetic(temperature: str):
    scores = [0.0, -40.0, -55.5, -60.0]
    T = mpmath.mpf(temperature)
    with mpmath.workdps(50):
        weights = [mpmath.exp(mpmath.mpf(y) / T) for y in scores]
        p = [w / sum(weights) for w in weights]
        mean = sum(a * y for a, y in zip(p, scores, strict=True))
        want = float(sum(a * (y - mean) ** 2 for a, y in zip(p, scores, strict=True)) / T**3)
    got = F.entropy_slope(torch.tensor(scores).double() + 1e4, float(temperature)).item()
    assert got == pytest.approx(want, rel=1e-11)


def test_hidden_keys_count_for_nothing_and_leave_no_nan_in_any_gradient():
    scores = torch.tensor([[1.0, 2.0, -math.inf, 4.0], [-math.inf] * 4, [5.0] + [-math.inf] * 3]).double()
    bias = torch.tensor([0.5, -math.inf, 1.0, -1.0]).double()
    for given_bias in (None, bias):
        y, T = scores.clone().requires_grad_(), torch.tensor([0.5, 1.0, 2.0]).double().requires_grad_()
        slope = F.entropy_slope(y, T, bias=given_bias)
        keep = torch.tensor([True, given_bias is None, False, True])
        kept_bias = None if given_bias is None else given_bias[keep]
        alone = F.entropy_slope(scores[:1][:, keep], 0.5, bias=kept_bias)
        torch.testing.assert_close(slope[:1], alone, rtol=1e-14, atol=0)
        assert slope[1:].tolist() == [0.0, 0.0]
        slope.sum().backward()
        assert y.grad is not None
        assert T.grad is not None
        assert y.grad.isfinite().all()
        assert T.grad.isfinite().all()
        assert (y.grad[scores == -math.inf] == 0).all()


def test_both_derivatives_of_the_slope_are_those_of_differences(derivatives_agree: Callable[..., bool]):
    y = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    T = (torch.rand(2, dtype=torch.float64) + 0.5).requires_grad_()

    def slope(*parts: Tensor) -> Tensor:
        return F.entropy_slope(parts[0], parts[1], bias=parts[2])

    assert derivatives_agree(slope, (y, T, b))


@pytest.mark.parametrize("bias", [None, torch.tensor([1.0, 0.0, -2.0])], ids=["plain", "bias"])
def test_an_infinite_temperature_has_no_slope_and_no_nan_in_its_gradient(bias: Tensor | None):
    scores, T = torch.tensor([1.0, 2.0, 9.0], requires_grad=True), torch.tensor(math.inf, requires_grad=True)
    assert F.entropy_slope(scores, math.inf, bias=bias) == 0
    slope = F.entropy_slope(scores, T, bias=bias)
    slope.backward()
    assert slope == 0
    assert T.grad == 0
    assert scores.grad is not None
    assert (scores.grad == 0).all()


def test_a_tiny_temperature_gives_zero_a_score_that_is_not_finite_shows_and_no_key_gives_zero():
    scores = torch.tensor([1.0, 2.0, 9.0])
    assert F.entropy_slope(scores, 1e-18) == 0
    assert F.entropy_slope(scores, 1e-18, bias=torch.ones(3)) == 0
    assert F.entropy_slope(scores, torch.tensor(1e-18)) == 0
    for bad in (math.nan, math.inf):
        assert F.entropy_slope(torch.tensor([1.0, bad, 2.0])).isnan()
    assert F.entropy_slope(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]
    assert F.entropy_slope(torch.zeros(0, 4)).shape == (0,)


@pytest.mark.parametrize("dim", [-1, 0, 1, -2])
def test_dim_and_a_temperature_per_row(dim: int):
    scores, bias = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    last, last_bias = scores.movedim(dim, -1), bias.expand_as(scores).movedim(dim, -1)
    T = torch.rand(last.shape[:-1], dtype=torch.float64) + 0.5
    got = F.entropy_slope(scores, T, dim=dim, bias=bias)
    for place in range(last[..., 0].numel()):
        row, row_bias = last.flatten(0, 1)[place], last_bias.flatten(0, 1)[place]
        want = F.entropy_slope(row, T.flatten()[place].item(), bias=row_bias)
        torch.testing.assert_close(got.flatten()[place], want)


def test_dtypes_are_those_of_entropy():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        scores = torch.randn(3, 4).to(dtype)
        assert F.entropy_slope(scores).dtype == F.entropy(scores).dtype
        assert F.entropy_slope(scores, bias=torch.zeros(4, dtype=torch.float64)).dtype == F.entropy(scores).dtype


def test_a_bias_that_is_not_floating_or_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"entropy_slope\(bias\) must be a floating tensor, got torch\.int64"):
        F.entropy_slope(torch.zeros(3), bias=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(
        InputError, match=r"entropy_slope\(bias\) must be broadcastable to the scores \[2, 3\], got \[4\]"
    ):
        F.entropy_slope(torch.zeros(2, 3), bias=torch.zeros(4))


@pytest.mark.parametrize("n", [256, 4096, 65536])
def test_log_leaves_half_of_the_weight_on_a_key_that_stands_out_by_log_of_the_reference(n: int):
    scores = torch.zeros(n, dtype=torch.float64)
    scores[3] = math.log(256)
    temperature = F.length_temperature(n, 256)
    assert F.softmax(scores, temperature=temperature)[3].item() == pytest.approx(n / (2 * n - 1), rel=1e-9)
    assert temperature == pytest.approx(math.log(256) / math.log(n), rel=1e-12)
    if n > 256:
        assert F.softmax(scores)[3] < 0.1
    assert F.length_temperature(1, 512) == math.inf


def test_yarn_is_the_square_of_the_attention_factor_of_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for factor in (1.0, 2.0, 8.0, 40.0):
        config = transformers.LlamaConfig(
            hidden_size=32, num_attention_heads=2, max_position_embeddings=int(512 * factor),
            rope_parameters={
                "rope_type": "yarn", "factor": factor, "rope_theta": 10_000.0, "original_max_position_embeddings": 512,
            },
        )  # fmt: skip
        _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
        assert F.length_temperature(512 * factor, 512, "yarn") == pytest.approx(attention_factor**-2, rel=1e-12)
    assert F.length_temperature(100, 512, "yarn") == 1.0


def test_llama4_is_what_ministral_multiplies_queries_by():
    ministral = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    (scale_of,) = (value for name, value in vars(ministral).items() if name.endswith("get_llama_4_attn_scale"))
    places = torch.arange(0, 40_000, 777)
    scale = scale_of(places[None], 0.1, 8192).flatten()
    torch.testing.assert_close(1 / F.length_temperature(places, 8192, "llama4"), scale)


@pytest.mark.parametrize("law", ["log", "yarn", "llama4"])
def test_a_tensor_of_lengths_is_numbers_one_by_one(law: str):
    lengths = torch.tensor(LENGTHS)
    each = [F.length_temperature(int(n), 512, law) for n in lengths]
    got = F.length_temperature(lengths.view(1, -1), 512, law)
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got[0].double(), torch.tensor(each, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"law": "sqrt"}, "must be one of 'log', 'yarn', 'llama4'; got 'sqrt'"),
        ({"reference": 1}, r"length_temperature\(reference=...\) must be a number above 1, got 1"),
        ({"reference": 0, "law": "yarn"}, "must be a number above 0, got 0"),
        ({"n": 0}, r"length_temperature\(n\) must be a number of keys of at least 1, got 0"),
        ({"n": torch.ones(3, dtype=torch.bool)}, "must hold numbers of keys, got torch.bool"),
    ],
)
def test_mistakes_of_a_length_are_told(arguments: dict[str, Any], message: str):
    given: dict[str, Any] = {"n": 10, "reference": 10} | arguments
    with pytest.raises(InputError, match=message):
        F.length_temperature(**given)
