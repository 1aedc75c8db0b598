"""The demonstration of a target entropy: its layers by loops, its batch of runs, and where the targets end."""

from __future__ import annotations

import math

import pytest
import torch

from attemper.lab import regularization as lab
from tests.support.experiments import Run


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("regularization")


def drawn() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    query, context = (torch.rand(lab.DRAWS, n, lab.SIZE, generator=generator).double() for n in (lab.QUERIES, lab.KEYS))
    return query, context, [weight.double() for weight in lab._initial(generator)]


def test_a_demonstration_is_that_of_loops_over_its_heads_and_rows():
    query, context, weights = drawn()
    entropies, losses = lab.demonstration(query, context, weights)
    draw = 3
    w_query, w_key, w_value, w_output, bias, gain, shift, classify = (weight[draw] for weight in weights)
    logits = torch.zeros(2, dtype=torch.float64)
    for row in range(lab.QUERIES):
        summed = bias + query[draw, row]
        for head in range(lab.HEADS):
            q = query[draw, row] @ w_query[:, head]
            scores = torch.stack([q @ (key @ w_key[:, head]) for key in context[draw]]) / 4
            p = scores.exp() / scores.exp().sum()
            assert entropies[draw, head, row].item() == pytest.approx(-(p * p.log()).sum().item(), rel=1e-12)
            attended = torch.stack([p[j] * (context[draw, j] @ w_value[:, head]) for j in range(lab.KEYS)]).sum(0)
            summed = summed + attended @ w_output[head]
        normed = (summed - summed.mean()) / (summed.var(unbiased=False) + 1e-3).sqrt() * gain + shift
        logits += normed @ classify[row]
    probabilities = logits.sigmoid()
    want = -((1 - probabilities[0]).log() + probabilities[1].log()) / 2
    assert losses[draw].item() == pytest.approx(want.item(), rel=1e-10)


def test_initial_weights_have_the_bounds_of_keras():
    _, _, weights = drawn()
    # A field of 16 before [3, 16]: fans of 48 and 256. One of 3 before [16, 16]: 48 and 48. A bias of 16: 16 and 16.
    for weight, fans in ((weights[0], 48 + 256), (weights[3], 96), (weights[4], 32), (weights[7], 64 + 8)):
        bound = math.sqrt(6 / fans)
        assert 0.9 * bound < weight.abs().max() <= bound


def test_demonstrations_trained_together_are_those_trained_alone(monkeypatch: pytest.MonkeyPatch):
    chosen = lab.OPTIMIZERS["falling rate"]
    monkeypatch.setattr(lab, "STEPS", 3)
    together = lab.train(chosen, 0)
    monkeypatch.setattr(lab, "ALPHAS", (0.2,))
    alone = lab.train(chosen, 0)
    torch.testing.assert_close(together.entropy[1:2], alone.entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(together.loss[1:2], alone.loss, rtol=0, atol=1e-12)


def test_the_first_steps_go_towards_the_target(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lab, "STEPS", 20)
    run = lab.train(lab.OPTIMIZERS["falling rate"], 0)
    assert len(run.distance) == len(lab.ALPHAS)
    first, last = zip(*run.distance, strict=True)
    assert all(after < before for before, after in zip(first[:3], last[:3], strict=True))
    assert first[0] == pytest.approx(math.log(6) - 0.05, abs=0.05), "before training the rows are nearly uniform"


@pytest.mark.slow("takes many seconds")
def test_the_articles_optimizer_stays_away_and_the_other_arrives(result):
    table = result.table("alpha = 0.2 beside what the article prints")
    assert [f"{table.column(name)[0]:.3f}" for name in ("mean H", "mean |H - alpha|")] == ["0.194", "0.033"]
    assert len(table.rows) == 1 + len(lab.OPTIMIZERS)
    table = result.table("after 1,000 steps, 8 draws of each")
    away = dict(zip(zip(table.column("alpha"), table.column("optimizer"), strict=True),
                    table.column("mean |H - alpha|"), strict=True))  # fmt: skip
    theirs, ours = lab.OPTIMIZERS
    for alpha in lab.ALPHAS:
        assert away[round(alpha, 4), ours] < 0.02
        assert away[round(alpha, 4), ours] < away[round(alpha, 4), theirs]
    assert away[0.2, ours] < 0.001
    assert 0.02 < away[0.2, theirs] < 0.06
    worst = table.column("worst draw")[2]
    best = table.column("best draw")[2]
    assert best < 0.033 < worst, "what the article prints is one such draw"
    assert max(table.column("loss")) < 0.001
