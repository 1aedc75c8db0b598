"""The row kernels on rows that break such code: ties, offsets, sharp and long rows, scores that are not finite, alpha at both
ends. Scores come in as a bias on products of 0, and weights come out through values that are the unit matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper import nn
from attemper.statistics import ROWWISE_ONE_PASS

pytestmark = [pytest.mark.each, pytest.mark.usefixtures("poisoned_empty"), pytest.mark.hostile("triton")]

UNIT = 2.0**-24
NORMALIZERS: dict[str, Any] = {
    "sparsemax": "sparsemax", "entmax15": "entmax15", "entmax 1.2": nn.Entmax(1.2), "entmax 1.00001": nn.Entmax(1.00001),
    "entmax 3": nn.Entmax(3.0), "entmax 1000": nn.Entmax(1000.0), "topk": nn.TopK(4),
    "threshold": nn.Threshold(0.02), "sigmoid": nn.Sigmoid(-1.0),
}  # fmt: skip


def weights(scores: Tensor, map_: Any, backend: str = "triton", stats: tuple[str, ...] = ("entropy",)) -> Any:
    """Weights [Q, K] of rows with exactly these scores [Q, K], and their statistics [Q]."""
    dtype = torch.float64 if backend == "reference" else torch.float32
    query, key = (torch.zeros(1, 1, size, 1, dtype=dtype) for size in scores.shape)
    value = torch.eye(scores.shape[1], dtype=dtype)[None, None]
    with torch.no_grad():
        output, measured = attemper.attention(
            query, key, value, scores, normalizer=map_, stats=stats, backend=backend, scale=1.0
        )
    return output[0, 0], {name: measured[name][0, 0] for name in stats}


def hostile_rows(keys: int = 40) -> dict[str, Tensor]:
    normal = torch.randn(keys)
    return {
        "ascending": torch.linspace(-6, 3, keys),
        "steps of 5 below -1000": -5.0 * torch.arange(keys) - 1000,
        "offset of 1e5": normal + 1e5,
        "offset of -1e5": 4 * normal - 1e5,
        "all equal": torch.full((keys,), 7.5),
        "ties": (2 * normal).round() / 2,
        "one stands out": normal.index_fill(0, torch.tensor([17]), 30.0),
        "two stand out": normal.index_fill(0, torch.tensor([3, 39]), 30.0),
        "close together": normal * 0.1,
        "closer": normal * 0.02,
        "as far as it goes": normal * 1e30,
        "tiny": normal * 1e-30,
    }


@pytest.mark.parametrize("chosen", NORMALIZERS)
@pytest.mark.quick("entmax 1.2", "entmax 3", "topk", "threshold", "sigmoid")
@pytest.mark.turns(2)
def test_hostile_rows_have_the_weights_of_the_reference(chosen: str, tiled):
    tiled(16, 16)
    scores = torch.stack(list(hostile_rows().values()))
    got, stats = weights(scores, NORMALIZERS[chosen], stats=("entropy", "support_size", "mass"))
    want, truth = weights(scores.double(), NORMALIZERS[chosen], "reference", stats=("entropy", "support_size", "mass"))
    # With alpha = 3 a weight is the root of a difference of numbers near 1, of which some four are rounded.
    budget = (4 * UNIT) ** 0.5 if chosen == "entmax 3" else 1e-6
    assert torch.isfinite(got).all()
    for row, name in enumerate(hostile_rows()):
        if chosen == "entmax 1000" and name == "tiny":
            # Differences of 1e-30 make weights of 0.94 and 0.06, which lie between two neighbouring float32 and
            # float64 thresholds: no threshold holds them, and the reference leaves 40 weights of 1.
            assert (got[row].double().sum() - 1).abs() <= 2e-6
            continue
        scale = truth["mass"][row].clamp(min=1.0)
        assert (got[row] - want[row]).abs().max() <= budget, name
        assert (got[row].double().sum() - truth["mass"][row]).abs() <= 2e-6 * scale, name
        assert (stats["entropy"][row] - truth["entropy"][row]).abs() <= max(4e-6, 10 * budget), name
        assert stats["entropy"][row] >= 0, name
        if chosen in ("topk", "sparsemax", "threshold"):
            assert ((got[row] > 0) == (want[row] > 0)).all(), name
            assert stats["support_size"][row] == truth["support_size"][row], name


def test_of_ties_at_the_border_of_top_k_the_lower_keys_win_in_values_and_gradients(tiled):
    tiled(2, 4)
    scores = torch.tensor([[0, 1, 1, 3, 1, 0, 1, 1, 1, 1, 0], [1.0] * 11, [2, 2, 2, 5, 6, 7, 2, 8, 2, 2, 2]])
    want = [[1, 2, 3, 4], [0, 1, 2, 3], [3, 4, 5, 7]]
    got, _ = weights(scores, nn.TopK(4))
    assert [row.nonzero().flatten().tolist() for row in got] == want
    bias = scores.clone().requires_grad_()
    query, key = (torch.zeros(1, 1, size, 1) for size in scores.shape)
    value = torch.randn(1, 1, 11, 2).requires_grad_()
    output, _ = attemper.attention(query, key, value, bias, normalizer=nn.TopK(4), backend="triton")
    bias_grad, value_grad = torch.autograd.grad(output.square().sum(), (bias, value))
    assert [row.nonzero().flatten().tolist() for row in bias_grad] == want
    assert (value_grad[0, 0].abs().sum(1) > 0).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 7]


@pytest.mark.parametrize("k", [1, 11, 12, 10_000])
def test_k_at_or_above_the_visible_keys_is_softmax_and_k_of_1_the_first_argmax(k: int, tiled):
    tiled(2, 4)
    scores = torch.randn(3, 11)
    scores[1, 3:] = -torch.inf
    scores[2] = 1.0
    got, stats = weights(scores, nn.TopK(k), stats=("support_size",))
    want = torch.softmax(scores, 1) if k > 1 else torch.eye(11)[scores.argmax(1)]
    assert (got - want).abs().max() < 2e-7
    assert stats["support_size"].tolist() == ([11, 3, 11] if k > 1 else [1, 1, 1])


def test_the_share_of_equal_keys_is_not_below_itself(tiled):
    """min_weight = 1/n of n equal keys: all stay. So do the largest where none has as much."""
    tiled(2, 4)
    for keys in (3, 7, 10, 49):
        got, _ = weights(torch.full((1, keys), 0.3), nn.Threshold(1 / keys))
        assert (got - 1 / keys).abs().max() < 1e-7
    got, _ = weights(torch.tensor([[1.0, 0.0, 1.0, 0.9]]), nn.Threshold(0.9))
    assert got.tolist() == [[0.5, 0.0, 0.5, 0.0]]


@pytest.mark.parametrize("chosen", ["sparsemax", "entmax 1.2", "topk", "threshold", "sigmoid"])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_score_that_is_not_finite_spoils_its_row_alone_and_what_is_hidden_spoils_none(
    wrong: float, chosen: str, tiled
):
    tiled(4, 4)
    query, key, value = torch.ones(1, 1, 3, 1), torch.randn(1, 1, 11, 1), torch.randn(1, 1, 11, 2)
    query[0, 0, 1] = 0.0
    key[0, 0, 9] = wrong
    mask = torch.ones(3, 11, dtype=torch.bool)
    mask[0, 9] = False
    output, stats = attemper.attention(
        query, key, value, mask, normalizer=NORMALIZERS[chosen], stats=ROWWISE_ONE_PASS, backend="triton"
    )
    assert stats is not None
    # 0 times an infinity is NaN, too.
    assert stats.valid.flatten().tolist() == [True, False, False]
    assert torch.isfinite(output[0, 0, 0]).all()
    assert torch.isnan(output[0, 0, 1:]).all()
    for name in stats:
        value_ = stats[name].flatten()
        assert torch.isfinite(value_[0]), name
        if value_.dtype.is_floating_point:
            assert torch.isnan(value_[1:]).all(), name


def test_sigmoids_far_below_0_have_no_mass_and_no_entropy(tiled):
    tiled(4, 4)
    scores = torch.randn(3, 11) - torch.tensor([[200.0], [50.0], [0.0]])
    names = ("mass", "entropy", "effective_tokens", "max_weight", "support_size")
    got, stats = weights(scores, nn.Sigmoid(0.0), stats=names)
    _, truth = weights(scores.double(), nn.Sigmoid(0.0), "reference", stats=names)
    assert (got[0] == 0).all()
    for name in names:
        assert stats[name][0] == 0, name
        assert (stats[name][1:].double() - truth[name][1:].double()).abs().max() <= 3e-6 * truth[name].abs().max(), name
    assert (stats["mass"][1] / truth["mass"][1] - 1).abs() < 1e-5


@pytest.mark.parametrize("chosen", ["sparsemax", "entmax15", "entmax 1.2", "topk"])
@pytest.mark.long("more cases in Triton's interpreter")
def test_long_rows_sum_to_1_and_keep_the_order_of_scores(chosen: str, tiled):
    tiled(16, 64)
    query, key, value = torch.ones(1, 1, 4, 1), torch.randn(1, 1, 3000, 1), torch.ones(1, 1, 3000, 1)
    temperature = torch.tensor([0.01, 0.3, 3.0, 1e6])[None, None]
    output, stats = attemper.attention(
        query, key, value, temperature=temperature, scale=1.0, normalizer=NORMALIZERS[chosen],
        stats=("support_size", "max_weight", "entropy"), backend="triton",
    )  # fmt: skip
    _, truth = attemper.attention(
        query.double(), key.double(), value.double(), temperature=temperature, scale=1.0, normalizer=NORMALIZERS[chosen],
        stats=("support_size", "max_weight", "entropy"), backend="reference",
    )  # fmt: skip
    assert stats is not None
    assert truth is not None
    assert (output - 1).abs().max() < 1e-6
    # A key at the threshold may fall on either side of it.
    assert ((stats.support_size - truth.support_size).abs() <= 1).all()
    assert (stats.max_weight.double() / truth.max_weight - 1).abs().max() < 3e-6
    assert (stats.entropy - truth.entropy).abs().max() < 5e-6


def test_above_alpha_of_2_where_newtons_steps_alone_would_never_end_every_row_has_its_weights(tiled):
    tiled(64, 64)
    scores = torch.randn(64, 40) * torch.tensor([0.03, 0.1, 0.3, 1.0]).repeat(16)[:, None]
    got, _ = weights(scores, nn.Entmax(3.0))
    want, _ = weights(scores.double(), nn.Entmax(3.0), "reference")
    assert (got - want).abs().max() <= (4 * UNIT) ** 0.5


@pytest.mark.parametrize("shape", [(1, 2, 3, 0), (1, 2, 0, 5), (0, 2, 3, 5)], ids=str)
@pytest.mark.parametrize("chosen", ["entmax 3", "topk", "threshold", "sigmoid"])
def test_calls_without_keys_rows_or_batch_are_empty(chosen: str, shape: tuple[int, ...]):
    batch, heads, rows, keys = shape
    query = torch.randn(batch, heads, rows, 4).requires_grad_()
    key, value = (torch.randn(batch, heads, keys, 4).requires_grad_() for _ in range(2))
    output, stats = attemper.attention(query, key, value, normalizer=NORMALIZERS[chosen], stats="all", backend="triton")
    assert stats is not None
    assert output.shape == query.shape
    assert (output == 0).all()
    assert (stats.visible_keys == 0).all()
    assert (stats.entropy == 0).all()
    grads = torch.autograd.grad(output.sum() + stats.entropy.sum(), (query, key, value))
    assert all((grad == 0).all() for grad in grads)
