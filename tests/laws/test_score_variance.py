"""The variance of the visible scores without weights, ``score_variance``, far from 0 and beside the weighted one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import attemper
from attemper import BackendError
from tests.laws.rows import BACKENDS, close, measured, rows
from tests.support.budgets import UNIT
from tests.support.calls import FEATURES, PRESENT, known

NAMES = ("score_variance", "logit_variance")


@pytest.mark.parametrize("backend", BACKENDS)
@given(scores=rows(), shift=st.sampled_from([0.0, 100.0, -1e4, 1e5]))
def test_a_shift_changes_nothing_but_the_rounding_of_the_scores(backend: str, scores: Tensor, shift: float):
    moved = scores + shift
    got = measured(moved, backend, stats=NAMES).score_variance[0, 0]
    # Its own scores, which the sum has rounded.
    close(got, moved.sub(shift).var(-1, correction=0), "shifted", 1e-9)


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
