"""Losses on statistics: against dense weights in float64, rows that do not count, gradients, mistakes."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper import InputError
from attemper import functional as F
from attemper.types import AttentionStats
from tests.support.calls import skip_without

B, H, Q, K, D = 2, 3, 5, 7, 4
KEYS = torch.zeros(1, 1, 3, 4)


def measured(backend: str, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], AttentionStats, Tensor]:
    """Leaves, statistics, and dense weights from the same leaves; query 2 of batch 1 sees nothing."""
    skip_without(backend, dtype)
    leaves = [torch.randn(B, H, n, D, dtype=dtype, requires_grad=True) for n in (Q, K, K)]
    visible = torch.rand(B, 1, Q, K) < 0.7
    visible[..., 0] = True
    visible[1, :, 2] = False
    stats = attemper.attention(leaves[0], leaves[1], leaves[2], visible, stats="all", backend=backend).stats
    assert stats is not None
    return leaves, stats, visible.expand(B, H, Q, K)


def dense(leaves: list[Tensor], visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, lse and which rows see a key, from the matrix of scores; log 0 is kept out of the graph."""
    scores = leaves[0] @ leaves[1].mT / D**0.5
    scores = torch.where(visible, scores, -1e9)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    entropy = lse - (p * scores).sum(-1)
    return entropy, lse, visible.any(-1)


def variance_of_heads(entropy: Tensor, valid: Tensor) -> Tensor:
    means = torch.stack([entropy[:, head][valid[:, head]].mean() for head in range(H)])
    return -means.var(correction=0)


LOSSES: dict[str, tuple[Any, Any]] = {
    "bonus": (lambda s: F.entropy_bonus(s, 0.3), lambda h, lse, v: -0.3 * h[v].mean()),
    "target": (lambda s: F.entropy_target(s, 0.8), lambda h, lse, v: (h[v] - 0.8).square().mean()),
    "target, tolerance": (
        lambda s: F.entropy_target(s, 0.8, tolerance=0.25),
        lambda h, lse, v: ((h[v] - 0.8).abs() - 0.25).clamp(min=0).square().mean(),
    ),
    "target per head": (
        lambda s: F.entropy_target(s, torch.tensor([[0.2], [0.5], [1.5]], dtype=torch.float64)),
        lambda h, lse, v: (h - torch.tensor([[0.2], [0.5], [1.5]], dtype=torch.float64))[v].square().mean(),
    ),
    "diversity": (F.entropy_diversity, lambda h, lse, v: variance_of_heads(h, v)),
    "z": (F.z_loss, lambda h, lse, v: lse[v].square().mean()),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.turns(3)
def test_it_and_its_gradients_are_those_of_dense_weights(name: str, backend: str):
    ours, theirs = LOSSES[name]
    leaves, stats, visible = measured(backend)
    loss: Tensor = ours(stats)
    want: Tensor = theirs(*dense(leaves, visible))
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    for place, mine, other in zip(
        "qk", torch.autograd.grad(loss, leaves[:2]), torch.autograd.grad(want, leaves[:2]), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12, msg=lambda text, p=place: f"d{p}: {text}")
        assert mine.abs().max() > 0


@pytest.mark.parametrize("name", LOSSES)
def test_where_no_row_counts_it_is_0_and_so_are_gradients(name: str):
    leaves = [torch.randn(B, H, n, D, dtype=torch.float64, requires_grad=True) for n in (Q, K, K)]
    stats = attemper.attention(leaves[0], leaves[1], leaves[2], torch.zeros(Q, K, dtype=torch.bool), stats="all").stats
    loss: Tensor = LOSSES[name][0](stats)
    assert loss.item() == 0
    assert all((grad == 0).all() for grad in torch.autograd.grad(loss, leaves[:2]))


def test_rows_are_chosen_by_a_mask_on_tensors_and_on_statistics():
    _, stats, _ = measured("blocked")
    keep = torch.rand(B, 1, Q) < 0.5
    keep[0, 0, 0] = True
    both = keep & stats.valid
    for given in (stats, stats.entropy):
        mask = keep if given is stats else both
        torch.testing.assert_close(
            F.entropy_target(given, 1.0, valid=mask), (stats.entropy[both] - 1).square().mean(), rtol=1e-12, atol=0
        )
    assert F.entropy_bonus(stats.entropy) != F.entropy_bonus(stats)  # of a tensor every entry counts


def test_many_rows_are_summed_in_float64():
    entropy = torch.full((1, 1, 3_000_001), 0.1)
    entropy[..., 0] = 3e4
    want = entropy.double().square().mean()
    assert abs(F.entropy_target(entropy, 0.0).double() / want - 1) < 1e-6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: F.entropy_bonus(torch.zeros(3, dtype=torch.int64)), "must be a floating tensor or an AttentionStats"),
        (lambda: F.entropy_bonus([1.0]), "got list"),  # type: ignore[arg-type]
        (lambda: F.entropy_target(torch.zeros(1, 3, 5), torch.zeros(4)), r"must fit entropies \[1, 3, 5\], got \[4\]"),
        (lambda: F.entropy_target(torch.zeros(1, 3, 5), torch.zeros(2, 1, 1)), r"it would widen them to \[2, 3, 5\]"),
        (lambda: F.entropy_target(torch.zeros(1, 3, 5), 1.0, tolerance=-0.1), "must be at least 0 nats, got -0.1"),
        (lambda: F.entropy_diversity(torch.zeros(3, 5)), r"must be \[B, H, Q\], got \[3, 5\]"),
        (
            lambda: F.entropy_bonus(attemper.attention_statistics(KEYS, KEYS, stats="visible_keys")),
            r"the statistic 'entropy': ask attention for stats='entropy'",
        ),
        (lambda: F.z_loss(torch.zeros(1, 3, 5), valid=torch.ones(5)), "must be a bool tensor"),
        (lambda: F.z_loss(torch.zeros(1, 3, 5), valid=torch.ones(4) > 0), r"broadcastable to \[1, 3, 5\], got \[4\]"),
    ],
)
def test_mistakes_are_told(call: Any, message: str):
    with pytest.raises(InputError, match=message):
        call()
