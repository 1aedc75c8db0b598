"""Sigmoids in C++ take no row as a whole: what blocks of keys, splits of them and shortcuts do to a row's sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attemper.backends import native
from attemper.backends.contract import Problem
from attemper.backends.native import rows as native_rows
from attemper.statistics import Column
from tests.backends.test_native import LIBRARIES, each_library
from tests.backends.test_native_rowwise import COLUMNS, Case, of_scores, shares, told

__all__ = ["each_library"]

pytestmark = [
    pytest.mark.each,
    pytest.mark.usefixtures("poisoned_empty", "each_library"),
    pytest.mark.skipif(not LIBRARIES, reason="native is not built (where a compiler is, test_native_build.py fails)"),
]
KEYS = 256
"""Of a block."""
DECODED = 8
"""Rows of a key head, at most, for which keys are split, 1024 at a time."""


def statistics_of(scores: Tensor, bias: float) -> dict[Column, Tensor]:
    weights, p = shares(scores, "sigmoid", 0.0, bias)
    depth = scores.double().amax(-1, keepdim=True) - scores.double()
    depth = torch.where(weights > 0, depth, 0.0)
    mean = (p * depth).sum(-1, keepdim=True)
    return {
        Column.MASS: weights.sum(-1),
        Column.SUPPORT: (weights > 0).double().sum(-1),
        Column.LARGEST_WEIGHT: p.amax(-1),
        Column.MEAN_DEPTH: mean[..., 0],
        Column.ENTROPY: -torch.xlogy(p, p).sum(-1),
        Column.VARIANCE: (p * (depth - mean).square()).sum(-1),
        Column.SQUARED_WEIGHTS: p.square().sum(-1),
    }


def assert_told(scores: Tensor, bias: float, rtol: float = 2e-6) -> None:
    found = told(of_scores(scores, "sigmoid", 0.0, bias))
    for column, want in statistics_of(scores, bias).items():
        about = f"{column.name}: "
        torch.testing.assert_close(found[column], want, rtol=rtol, atol=1e-30, msg=lambda said, a=about: a + said)


@pytest.mark.parametrize("rows", [1, DECODED, 30])
@pytest.mark.parametrize(
    "levels",
    [
        (0.0, 0.0, 0.0, 0.0, 0.0), (-20.0, 1000.0, 0.0, 0.0, 0.0), (1000.0, -20.0, 1000.0, 0.0, -40.0),
        (-60.0, -40.0, -20.0, -10.0, -5.0), (300.0, 200.0, 100.0, 50.0, 20.0),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_of_keys_may_lie_anywhere(rows: int, levels: tuple[float, ...]):
    """Blocks in which all weights are nearly 1, or nearly 0, at scores far apart: of five splits when decoding."""
    each = 1024 if rows <= DECODED else KEYS
    scores = torch.randn(rows, len(levels) * each) + torch.tensor(levels).repeat_interleave(each)
    assert_told(scores, -1.0)


def test_the_spread_of_a_block_of_ones_does_not_depend_on_what_came_before():
    """Weights of e^-20 around -20, then of 1 around 1000: squares around an earlier mean would have lost the spread."""
    scores = torch.cat([torch.randn(20, KEYS) * 0.1 - 20, torch.randn(20, 3 * KEYS) * 0.01 + 1000], dim=1)
    found = told(of_scores(scores, "sigmoid", 0.0, 0.0))
    want = statistics_of(scores, 0.0)[Column.VARIANCE]
    assert want.max() < 0.2
    torch.testing.assert_close(found[Column.VARIANCE], want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bias", [-86.0, -47.0, -45.0, 45.0, 47.0, 86.0])
def test_biases_at_the_end_of_what_exponentials_reach(bias: float):
    scores = torch.randn(20, 600) * 0.1
    assert_told(scores, bias, rtol=2e-5)


@pytest.mark.parametrize("bias", [-86.0, -2.0, 44.0])
def test_a_shortcut_for_near_scores_changes_no_bit(bias: float):
    """A mask that hides nothing: nothing is known of the scores any more."""
    problem = replace(Case("near", rows=60, keys=700).problem("sigmoid", 0.0, bias), span_keys=None)
    columns = tuple(column for column in COLUMNS if column is not Column.SPAN)
    problem = replace(problem, columns=columns)
    masked = replace(problem, mask=torch.zeros(1, 1, 60, 700))
    (output, state, _), (other, its_state, _) = native.forward(problem), native.forward(masked)
    assert torch.equal(output, other)
    assert torch.equal(state, its_state)


def test_what_is_asked_for_changes_no_bit():
    problem = Case("asked", rows=60, keys=700).problem("sigmoid", 0.0, -1.0)
    output, state, _ = native.forward(problem)
    bare = replace(problem, columns=(Column.MAXIMUM, Column.VISIBLE_KEYS, Column.THRESHOLD))
    assert torch.equal(native.forward(bare)[0], output)
    for column in COLUMNS:
        only = replace(problem, columns=(Column.MAXIMUM, Column.VISIBLE_KEYS, Column.THRESHOLD, column))
        one, its_state, _ = native.forward(only)
        assert torch.equal(one, output)
        assert torch.equal(its_state[-1], state[COLUMNS.index(column)]), column


@pytest.mark.parametrize("rows", [1, 30])
def test_keys_that_share_the_maximum_all_count(rows: int):
    """Three of them in one block, two in another, beside weights that a sum with theirs would round away."""
    scores = torch.randn(rows, 2000) * 0.5 - 14
    scores[:, [5, 6, 200, 300, 1500]] = 0
    assert_told(scores, 3.0, rtol=2e-6)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_sixteen_bits_is_rounded_to_the_nearest(dtype: torch.dtype, rows: int):
    """One key whose value is 1: the output is its weight, before or after it meets the value."""
    query = torch.linspace(-4, 4, rows).to(dtype)
    one = torch.ones(1, 1, 1, 1, dtype=dtype)
    problem = Problem(
        query=query[None, None, :, None], key=one, value=one, mask=None, multiplier=torch.ones(1, 1, 1),
        columns=COLUMNS[:3], normalizer="sigmoid", per_head=torch.zeros(1),
    )  # fmt: skip
    weights = native_rows.weights(query.float()[:, None], "sigmoid", 0.0)
    assert torch.equal(native.forward(problem)[0][0, 0], weights.to(dtype))


def test_infinite_values_touch_no_score_of_a_later_block():
    """When decoding, rows of values that are not read where they lie stand beside rows of keys."""
    value = torch.ones(1, 1, 600, 40)
    value[0, 0, 63, 8:16] = torch.inf
    problem = Problem(
        query=torch.randn(1, 1, 1, 8), key=torch.randn(1, 1, 600, 8), value=value, mask=None,
        multiplier=torch.ones(1, 1, 1), columns=COLUMNS[:6], normalizer="sigmoid", per_head=torch.zeros(1),
    )  # fmt: skip
    output, state, _ = native.forward(problem)
    assert state.isfinite().all()
    assert torch.equal(output[0, 0, 0].isfinite(), value[0, 0, 63].isfinite())


@pytest.mark.parametrize("rows", [1, 30])
def test_a_row_that_sees_no_key_of_a_split(rows: int):
    """Its first keys are hidden: sums of nothing join those of the rest."""
    scores = torch.randn(rows, 3000)
    scores[:, :2100] = -torch.inf
    assert_told(scores, -1.0)
    assert told(of_scores(scores, "sigmoid", 0.0, -1.0))[Column.VISIBLE_KEYS].eq(900).all()


def test_weights_that_vanish_are_0():
    scores = torch.tensor([-1000.0, -87.5, 0.0]).expand(3, 3)
    assert torch.equal(native_rows.weights(scores, "sigmoid", 0.0), torch.tensor([0.0, 0.0, 0.5]).expand(3, 3))
