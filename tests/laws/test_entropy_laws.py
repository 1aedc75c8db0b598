"""Laws of one softmax row, on both backends, in float64: bounds, derivatives, temperature, grouping, sinks."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from attemper.statistics import ONE_PASS
from tests.laws.rows import BACKENDS, attended, close, measured, of_products, rows

pytestmark = [pytest.mark.parametrize("backend", BACKENDS), pytest.mark.quick("blocked")]


@given(scores=rows())
def test_entropy_lies_between_zero_and_log_n(backend: str, scores: Tensor):
    for stats in (measured(scores, backend), measured(scores.float(), backend)):
        assert (stats.entropy >= 0).all()
        assert (stats.entropy.double() <= math.log(scores.shape[1])).all()
        assert ((stats.normalized_entropy >= 0) & (stats.normalized_entropy <= 1)).all()


@given(n=st.integers(1, 300), score=st.floats(-1e4, 1e4, width=32))
def test_equal_scores_have_entropy_log_n(backend: str, n: int, score: float):
    stats = measured(torch.full((2, n), score, dtype=torch.float64), backend)
    close(stats.entropy, torch.full_like(stats.entropy, math.log(n)), "entropy", 1e-13)
    close(stats.effective_tokens, torch.full_like(stats.entropy, n), "effective tokens")
    close(stats.normalized_entropy, torch.full_like(stats.entropy, float(n > 1)), "normalized entropy")


@given(scores=rows())
def test_the_measures_of_concentration_are_ordered(backend: str, scores: Tensor):
    stats, n = measured(scores, backend), scores.shape[1]
    slack = 1 + 1e-12
    assert (1 / stats.max_weight <= stats.effective_tokens * slack).all()
    assert (stats.effective_tokens <= stats.entropy.exp() * slack).all()
    assert (stats.entropy.exp() <= n * slack).all()
    close(stats.max_weight, torch.exp(stats.max_logit - stats.lse), "max weight")


@given(scores=rows(), shift=st.floats(-1e3, 1e3, width=16))
def test_shifting_every_score_changes_lse_by_it_and_nothing_else(backend: str, scores: Tensor, shift: float):
    value = torch.randn(1, 1, scores.shape[1], 3, dtype=torch.float64)
    one, two = attended(scores, backend, value), attended(scores + shift, backend, value)
    close(one.output, two.output, "output", 1e-10)
    for name in one.stats:
        moved = shift if name in ("lse", "max_logit", "mean_logit") else 0
        close(one.stats[name] + moved, two.stats[name], name, 1e-10)


@given(scores=rows(), seed=st.integers(0, 99))
def test_permuting_keys_changes_nothing(backend: str, scores: Tensor, seed: int):
    order = torch.randperm(scores.shape[1], generator=torch.Generator().manual_seed(seed))
    value = torch.randn(1, 1, scores.shape[1], 3, dtype=torch.float64)
    names = tuple(name for name in ONE_PASS if name != "first_token_mass") + ("gini",)
    one = attended(scores, backend, value, stats=names)
    two = attended(scores[:, order], backend, value[:, :, order], stats=names)
    close(one.output, two.output, "output")
    for name in one.stats:
        close(one.stats[name], two.stats[name], name)


@given(scores=rows(), extra=st.integers(1, 5))
def test_appending_masked_keys_changes_nothing(backend: str, scores: Tensor, extra: int):
    hidden = torch.full((scores.shape[0], extra), -torch.inf, dtype=torch.float64)
    value = torch.randn(1, 1, scores.shape[1] + extra, 3, dtype=torch.float64)
    names = ("all", "gini")
    one = attended(scores, backend, value[:, :, : scores.shape[1]], stats=names)
    two = attended(torch.cat([scores, hidden], 1), backend, value, stats=names)
    close(one.output, two.output, "output")
    for name in one.stats:
        close(one.stats[name], two.stats[name], name)


@given(scores=rows(), times=st.integers(2, 4))
def test_duplicating_every_key_adds_log_r_to_entropy_and_lse(backend: str, scores: Tensor, times: int):
    one, many = measured(scores, backend), measured(scores.repeat(1, times), backend)
    added = {"entropy": math.log(times), "lse": math.log(times)}
    scaled = {"effective_tokens": times, "visible_keys": times, "max_weight": 1 / times}
    for name in one:
        if name not in ("normalized_entropy", "first_token_mass"):
            close(one[name] * scaled.get(name, 1) + added.get(name, 0), many[name], name)


@given(scores=rows(least=2), cut=st.integers(1, 8))
def test_entropy_of_the_whole_is_that_of_the_groups_and_of_their_weights(backend: str, scores: Tensor, cut: int):
    cut = min(cut, scores.shape[1] - 1)
    groups = [measured(part, backend) for part in (scores[:, :cut], scores[:, cut:])]
    lse = torch.stack([group.lse[0, 0] for group in groups], -1)
    within = torch.stack([group.entropy[0, 0] for group in groups], -1)
    whole = measured(lse, backend).entropy[0, 0] + (torch.softmax(lse, -1) * within).sum(-1)
    close(measured(scores, backend).entropy[0, 0], whole, "entropy")


@given(scores=rows(), sink=st.floats(-40, 40, width=32))
def test_a_sink_leaves_the_keys_the_sigmoid_of_lse_minus_its_logit(backend: str, scores: Tensor, sink: float):
    value = torch.randn(1, 1, scores.shape[1], 3, dtype=torch.float64)
    names = ("all", "entropy_with_sink")
    logit = torch.tensor([sink], dtype=torch.float64)
    plain, sunk = attended(scores, backend, value), attended(scores, backend, value, stats=names, sink_logits=logit)
    close(sunk.stats.mass, torch.sigmoid(plain.stats.lse - sink), "mass")
    close(sunk.output, plain.output * sunk.stats.mass[..., None], "output")
    for name in plain.stats:
        if name != "mass":
            assert torch.equal(plain.stats[name], sunk.stats[name]), name
    # The sink counted as one more outcome is one more key.
    as_key = torch.cat([scores, torch.full((scores.shape[0], 1), sink, dtype=torch.float64)], 1)
    close(sunk.stats.entropy_with_sink, measured(as_key, backend).entropy, "entropy with sink", 1e-11)


@given(scores=rows())
def test_the_derivative_of_entropy_is_minus_p_times_the_centred_score(backend: str, scores: Tensor):
    scores = scores.requires_grad_()
    (grad,) = torch.autograd.grad(measured(scores, backend).entropy.sum(), scores)
    with torch.no_grad():
        p = torch.softmax(scores, -1)
        close(grad, -p * (scores - (p * scores).sum(-1, keepdim=True)), "dH/ds", 1e-11)
    close(grad.sum(-1), torch.zeros(len(scores), dtype=torch.float64), "sum of dH/ds", 1e-11)


@given(scores=rows(), temperature=st.floats(0.3, 8))
def test_the_slope_of_entropy_in_temperature_is_the_variance_over_it(backend: str, scores: Tensor, temperature: float):
    divisor = torch.full((1, 1, scores.shape[0]), temperature, dtype=torch.float64, requires_grad=True)
    stats = of_products(scores, backend, temperature=divisor)
    (slope,) = torch.autograd.grad(stats.entropy.sum(), divisor)
    close(slope, (stats.logit_variance / temperature).detach(), "dH/dT", 1e-10)
    assert (slope >= -1e-10).all()


@given(
    scores=rows(most=6),
    bias=rows(most=6),
    temperature=st.floats(0.3, 8),
    softcap=st.one_of(st.none(), st.floats(2, 50)),
)
def test_with_bias_and_softcap_the_slope_is_a_covariance(
    backend: str, scores: Tensor, bias: Tensor, temperature: float, softcap: float | None
):
    n = min(scores.shape[1], bias.shape[1])
    scores, bias = scores[:, :n], bias[:1, :n]
    divisor = torch.full((1, 1, scores.shape[0]), temperature, dtype=torch.float64, requires_grad=True)
    stats = of_products(scores, backend, bias, temperature=divisor, softcap=softcap)
    (slope,) = torch.autograd.grad(stats.entropy.sum(), divisor)
    x = scores / temperature
    bent = torch.tanh(x / softcap) if softcap else torch.zeros_like(x)
    s = (softcap * bent if softcap else x) + bias
    p = torch.softmax(s, -1)
    direction = x * (1 - bent**2)
    covariance = (p * (s - (p * s).sum(-1, keepdim=True)) * direction).sum(-1)
    close(slope[0, 0], covariance / temperature, "dH/dT", 1e-9)


@given(scores=rows())
@example(scores=torch.tensor([[0.0, 1e-30], [3.0, -2.0]], dtype=torch.float64))
@example(scores=torch.tensor([[0.0, 1e-45]], dtype=torch.float64))
def test_cold_rows_have_the_entropy_of_their_ties_and_hot_rows_that_of_all_keys(backend: str, scores: Tensor):
    ties = (scores == scores.max(-1, keepdim=True).values).sum(-1)
    gap = (scores.max(-1, keepdim=True).values - scores).masked_fill(scores == scores.max(-1, keepdim=True).values, 30)
    # Cold is what is small beside the smallest gap, however small that is: 0 and 1e-30 are not tied.
    cold = of_products(scores, backend, temperature=float(gap.min()) / 60)
    close(cold.entropy[0, 0], ties.double().log(), "T -> 0", 1e-9)
    hot = of_products(scores, backend, temperature=1e9)
    close(
        hot.entropy[0, 0], torch.full((len(scores),), math.log(scores.shape[1]), dtype=torch.float64), "T -> inf", 1e-9
    )


@given(scores=rows(least=2), radius=st.floats(0.1, 20))
def test_entropy_stays_above_the_floor_of_the_score_norm(backend: str, scores: Tensor, radius: float):
    n = scores.shape[1]
    centred = scores - scores.mean(-1, keepdim=True)
    norm = centred.norm(dim=-1, keepdim=True)
    # Rows of this norm, and the row that reaches the bound: one score standing out.
    inside = torch.where(norm > 0, centred * radius / norm.clamp(min=1e-9), 0.0)
    one = torch.full((1, n), -radius / math.sqrt(n * (n - 1)), dtype=torch.float64)
    one[0, 0] = radius * math.sqrt((n - 1) / n)
    b = math.exp(-radius * math.sqrt(n / (n - 1)))
    floor = math.log(1 + (n - 1) * b) + radius * math.sqrt(n * (n - 1)) * b / (1 + (n - 1) * b)
    assert (measured(inside, backend).entropy >= floor - 1e-9).all()
    close(measured(one, backend).entropy[0, 0], torch.tensor([floor], dtype=torch.float64), "floor", 1e-9)
