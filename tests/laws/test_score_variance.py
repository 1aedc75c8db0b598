"""The variance of the visible scores without weights, ``score_variance``: its laws, and what it is beside the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attemper
from attemper import BackendError
from attemper.nn import Sparsemax
from tests.laws.rows import BACKENDS, close, measured, of_products, rows
from tests.support.budgets import UNIT
from tests.support.calls import FEATURES, PRESENT, known

NAMES = ("score_variance", "logit_variance")


@pytest.mark.parametrize("backend", BACKENDS)
@given(scores=rows())
def test_it_is_the_population_variance_of_the_scores(backend: str, scores: Tensor):
    close(measured(scores, backend, stats=NAMES).score_variance[0, 0], scores.var(-1, correction=0), "variance", 1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@given(scores=rows(), shift=st.sampled_from([0.0, 100.0, -1e4, 1e5]))
def test_a_shift_changes_nothing_but_the_rounding_of_the_scores(backend: str, scores: Tensor, shift: float):
    moved = scores + shift
    got = measured(moved, backend, stats=NAMES).score_variance[0, 0]
    # Its own scores, which the sum has rounded.
    close(got, moved.sub(shift).var(-1, correction=0), "shifted", 1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@given(scores=rows(), temperature=st.floats(0.1, 10))
def test_a_temperature_divides_it_by_its_square(backend: str, scores: Tensor, temperature: float):
    plain = of_products(scores, backend, stats=NAMES).score_variance
    close(of_products(scores, backend, temperature=temperature, stats=NAMES).score_variance, plain / temperature**2)


@pytest.mark.parametrize("backend", BACKENDS)
@given(scores=rows())
def test_it_is_the_limit_of_the_weighted_one_where_weights_are_equal(backend: str, scores: Tensor):
    stats = of_products(scores, backend, temperature=1e6, stats=NAMES)
    torch.testing.assert_close(stats.score_variance, stats.logit_variance, rtol=1e-3, atol=1e-20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_and_rows_without_keys_do_not_enter(backend: str):
    scores = torch.randn(3, 8, dtype=torch.float64)
    hidden = torch.zeros(3, 8, dtype=torch.bool)
    hidden[0, 2:5], hidden[1], hidden[2, 1:] = True, True, True
    got = measured(scores.masked_fill(hidden, -torch.inf), backend, stats=NAMES).score_variance[0, 0]
    want = scores[0, ~hidden[0]].var(correction=0)
    close(got, torch.stack([want, want * 0, want * 0]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [1, 3, 16, 64])
def test_one_score_far_above_the_rest_keeps_the_digits_in_any_blocks(keys: int, backend: str, tiled):
    if backend == "blocked":
        tiled(4, keys, 1 << 20)
    # A sum of squares relative to 0 would lose all of them.
    scores = torch.randn(5, 97, dtype=torch.float32).sort(-1).values
    scores[:, 90] = torch.tensor([1e2, 1e3, 1e4, 1e5, 1e6])
    got = measured(scores, backend, stats=NAMES).score_variance[0, 0].double()
    want = scores.double().var(-1, correction=0)
    assert ((got - want).abs() <= 4 * UNIT[torch.float32] * want).all()


def test_the_spread_under_the_weights_is_not_that_of_the_scores():
    # One score of 77 has all the weight: under the weights nothing is spread.
    scores = torch.randn(1, 64)
    scores[0, 7] = 77.0
    stats = measured(scores, "blocked", stats=NAMES)
    assert stats.logit_variance.sqrt().item() < 1e-6
    assert 9 < stats.score_variance.sqrt().item() < 11


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_same_for_every_map_of_scores_to_weights(backend: str):
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 9, 4)
    found = [
        known(
            attemper.attention(query, key, key, is_causal=True, normalizer=map_, stats=NAMES, backend=backend).stats
        ).score_variance
        for map_ in ("softmax", Sparsemax(), "sigmoid")
    ]
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("backend", [name for name in PRESENT if "score_variance" not in FEATURES[name]])
def test_a_backend_without_it_refuses_it_by_name_and_auto_takes_one_that_has_it(backend: str):
    query = torch.randn(1, 1, 3, 4)
    with pytest.raises(BackendError, match=r"it has no score_variance.*'blocked'|must be on cuda"):
        attemper.attention(query, query, query, stats="score_variance", backend=backend)
    assert known(attemper.attention(query, query, query, stats="score_variance").stats).score_variance.shape == (
        1,
        1,
        3,
    )
