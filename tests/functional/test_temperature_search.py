"""The temperature of a wanted entropy: 10,000 random and hostile rows, limits, groups, biases, mistakes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attemper import InputError
from attemper import functional as F
from tests.laws.rows import rows

ROWS = 500


def _normal(n: int, scale: float) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(ROWS, n, generator=generator, dtype=torch.float64) * scale


def _one_stands_out(generator: torch.Generator) -> Tensor:
    scores = torch.zeros(ROWS, 1024, dtype=torch.float64)
    scores[:, 0] = torch.logspace(-3, 4, ROWS, dtype=torch.float64)
    return scores


def _clusters(generator: torch.Generator) -> Tensor:
    """Scales from 1e-5 to 1e5 in one row: between them the entropy hardly moves with temperature."""
    scores = torch.randn(ROWS, 1024, generator=generator, dtype=torch.float64) * 1e-5
    scores[:, :4] += 1000.0
    scores[:, :2] += 1e-3
    scores[:, 512:] -= 1e5
    return scores


def _two_at_the_top(generator: torch.Generator) -> Tensor:
    scores = _normal(64, 1.0)(generator)
    scores[:, :2] = scores.amax(-1, keepdim=True) + 0.1
    return scores


def _ramps(generator: torch.Generator) -> Tensor:
    return torch.linspace(-1, 0, 1000, dtype=torch.float64) * torch.logspace(-6, 6, ROWS, dtype=torch.float64)[:, None]


def _offset_and_masked(generator: torch.Generator) -> Tensor:
    scores = _normal(128, 3.0)(generator) + 1e5
    return scores.masked_fill(torch.rand(ROWS, 128, generator=generator) < 0.5, -math.inf)


FAMILIES = {f"normal, n={n}, sd={scale:g}": _normal(n, scale) for n in (2, 8, 64, 1024) for scale in (0.01, 1.0, 1e3)}
FAMILIES |= {
    "cubed": lambda generator: _normal(256, 1.0)(generator) ** 3 * 5,
    "exponential": lambda generator: _normal(256, 1.0)(generator).exp() * 10,
    "cauchy": lambda generator: torch.tan(
        (torch.rand(ROWS, 256, generator=generator, dtype=torch.float64) - 0.5) * math.pi
    ),
    "one stands out": _one_stands_out,
    "clusters": _clusters,
    "two at the top": _two_at_the_top,
    "ramps": _ramps,
    "offset, masked": _offset_and_masked,
}


@pytest.mark.slow("takes a second")
def test_ten_thousand_rows_are_solved_to_a_micronat_in_few_evaluations():
    generator = torch.Generator().manual_seed(0)
    counts = []
    for name, family in FAMILIES.items():
        scores = family(generator)
        keys, ties = (scores > -math.inf).sum(-1), (scores == scores.amax(-1, keepdim=True)).sum(-1)
        low, high = ties.double().log(), keys.double().log()
        share = 0.001 + 0.998 * torch.rand(ROWS, generator=generator, dtype=torch.float64)
        target = low + share * (high - low)
        solved = F.temperature_for_entropy(scores, target)
        # Another implementation computes the entropy. Relative to the maximum, for it divides before it subtracts.
        entropy = F.entropy(scores - scores.amax(-1, keepdim=True), temperature=solved.temperature)
        assert solved.reached.all(), name
        assert (entropy - target).abs().max() < 1e-6, name
        assert torch.allclose(entropy, solved.entropy, rtol=0, atol=1e-9), name
        counts.append(solved.evaluations)
    evaluations = torch.cat(counts)
    assert len(evaluations) == 10_000
    assert evaluations.median() <= 12
    assert evaluations.max() <= 25


@given(scores=rows(least=2), share=st.floats(0.001, 0.999))
def test_it_inverts_entropy(scores: Tensor, share: float):
    low = (scores == scores.amax(-1, keepdim=True)).sum(-1).double().log()
    target = low + share * (math.log(scores.shape[-1]) - low)
    solved = F.temperature_for_entropy(scores, target)
    assert solved.reached.all()
    torch.testing.assert_close(F.entropy(scores, temperature=solved.temperature), target, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("scores", "target", "temperature", "entropy", "reached"),
    [
        ([0.0, 1.0, 4.0], math.log(3), math.inf, math.log(3), True),
        ([0.0, 1.0, 4.0], 2.0, math.inf, math.log(3), False),
        ([0.0, 1.0, 4.0], math.inf, math.inf, math.log(3), False),
        ([0.0, 1.0, 4.0], 0.0, None, 0.0, True),
        ([0.0, 1.0, 4.0], -0.5, None, 0.0, False),
        ([4.0, 1.0, 4.0], math.log(2), None, math.log(2), True),
        ([4.0, 1.0, 4.0], 0.3, None, math.log(2), False),
        ([2.0, 2.0, 2.0], math.log(3), 1.0, math.log(3), True),
        ([2.0, 2.0, 2.0], 0.5, 1.0, math.log(3), False),
        ([2.0, -math.inf], 0.0, 1.0, 0.0, True),
        ([2.0, -math.inf], 0.5, 1.0, 0.0, False),
        ([-math.inf, -math.inf], 0.5, 1.0, 0.0, False),
        ([1.0, math.nan], 0.5, 1.0, math.nan, False),
        ([1.0, math.inf], 0.5, 1.0, math.nan, False),
    ],
)
def test_what_cannot_be_reached_is_told_with_the_nearest_entropy(
    scores: list[float], target: float, temperature: float | None, entropy: float, reached: bool
):
    solved = F.temperature_for_entropy(torch.tensor(scores), target)
    assert solved.reached.item() is reached
    torch.testing.assert_close(solved.entropy, torch.tensor(entropy, dtype=torch.float64), equal_nan=True)
    assert solved.temperature > 0
    if temperature is not None:
        assert solved.temperature.item() == temperature
    elif math.isfinite(entropy):
        at_it = F.entropy(torch.tensor(scores), temperature=solved.temperature)
        torch.testing.assert_close(at_it.double(), solved.entropy, rtol=0, atol=1e-7)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 7)], ids=["", "bias"])
def test_rows_that_share_a_temperature_have_the_target_in_the_mean(bias: Tensor | None):
    scores = torch.randn(2, 3, 5, 7).masked_fill(torch.rand(2, 3, 5, 7) < 0.2, -math.inf)
    scores[0, 0, 0] = -math.inf
    scores[1, 1, 1, 1] = math.nan
    target = torch.tensor([[0.5], [1.0], [1.4]])
    solved = F.temperature_for_entropy(scores, target, mean_over=(0, 2), bias=bias)
    assert solved.temperature.shape == (1, 3, 1)
    assert solved.reached.all()
    counts = (scores > -math.inf).any(-1) & ~scores.isnan().any(-1)
    divided = scores.double() / solved.temperature[..., None] + (0 if bias is None else bias.double())
    entropy = F.entropy(divided)
    mean = torch.where(counts, entropy, 0.0).sum((0, 2)) / counts.sum((0, 2))
    torch.testing.assert_close(mean, target[:, 0].double(), rtol=0, atol=1e-6)


def test_the_dimension_of_the_keys_may_stand_anywhere():
    scores = torch.randn(4, 6, 3)
    last = F.temperature_for_entropy(scores.movedim(1, -1), 1.0)
    for name, part in F.temperature_for_entropy(scores, 1.0, dim=1)._asdict().items():
        assert torch.equal(part, getattr(last, name)), name
    by_group = F.temperature_for_entropy(scores, 1.0, dim=1, mean_over=2)
    moved = F.temperature_for_entropy(scores.movedim(1, -1), 1.0, mean_over=1)
    assert by_group.temperature.shape == (4, 1)
    assert torch.equal(by_group.temperature, moved.temperature)


def test_with_a_bias_that_makes_entropy_fall_the_solution_nearest_to_1_is_taken():
    scores, bias = torch.tensor([0.0, 3.0, 3.0, 3.0]), torch.tensor([6.0, 0.0, 0.0, 0.0])
    assert F.entropy_slope(scores, 1.0, bias=bias) < 0
    grid = torch.logspace(-2, 3, 20_001, dtype=torch.float64)
    levels = F.entropy(scores.double() / grid[:, None] + bias.double())
    turns = ((levels[:-1] - 1.2) * (levels[1:] - 1.2) < 0).nonzero()[:, 0]
    assert len(turns) == 2
    solutions = grid[turns]
    solved = F.temperature_for_entropy(scores, 1.2, bias=bias)
    assert solved.reached
    nearest = solutions[solutions.log().abs().argmin()]
    assert abs(solved.temperature.item() / nearest.item() - 1) < 1e-3
    for unreachable, extreme in ((1.4, levels.max()), (0.01, levels.min())):
        told = F.temperature_for_entropy(scores, unreachable, bias=bias)
        assert not told.reached
        assert abs(told.entropy - extreme) < 5e-3


@given(scores=rows(least=2), data=st.data())
def test_with_a_bias_what_is_said_to_be_reached_is(scores: Tensor, data: st.DataObject):
    n = scores.shape[-1]
    bias = torch.tensor(data.draw(st.lists(st.floats(-8, 8), min_size=n, max_size=n)), dtype=torch.float64)
    share = data.draw(st.floats(0.01, 0.99))
    solved = F.temperature_for_entropy(scores, share * math.log(n), bias=bias)
    entropy = F.entropy(scores / solved.temperature[..., None] + bias)
    torch.testing.assert_close(entropy, solved.entropy, rtol=0, atol=1e-6)
    off = (entropy - share * math.log(n)).abs()
    assert torch.equal(off <= 1e-6, solved.reached) or (off[~solved.reached] > 1e-7).all()


def test_gradients_do_not_flow_and_inputs_stay():
    scores = torch.randn(3, 5, requires_grad=True)
    before = scores.detach().clone()
    solved = F.temperature_for_entropy(scores, torch.ones(3, requires_grad=True))
    assert not solved.temperature.requires_grad
    assert torch.equal(scores, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": torch.zeros(3, dtype=torch.int64)}, r"temperature_for_entropy\(scores\) must be a floating tensor"),
        ({"scores": torch.zeros(3, 0)}, r"has no keys: \[3, 0\]"),
        ({"target": math.nan}, "must be an entropy in nats, got nan"),
        ({"target": torch.tensor([math.nan])}, "floating and without NaN"),
        ({"target": torch.zeros(5)}, r"must be broadcastable to \[3\], one for each temperature, got \[5\]"),
        ({"dim": 2}, r"temperature_for_entropy\(dim=...\) must be an int from -2 to 1"),
        ({"mean_over": 1}, "must name dimensions of 2-dimensional scores other than dim=-1"),
        ({"mean_over": (0, 7)}, "must name dimensions of 2-dimensional scores"),
        ({"bias": torch.zeros(5)}, r"must be broadcastable to the scores \[3, 4\], got \[5\]"),
    ],
)
def test_mistakes_are_told(arguments: dict[str, Any], message: str):
    given_arguments: dict[str, Any] = {"scores": torch.zeros(3, 4), "target": 1.0} | arguments
    with pytest.raises(InputError, match=message):
        F.temperature_for_entropy(**given_arguments)
