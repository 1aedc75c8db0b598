"""The experiment on length: temperatures that are what they say, calibration that lowers a loss, intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from research.length import PLAIN, experiment, interval, plan
from research.lengthened import calibrate, entropies, evenly, factors_of_ways, judge, match_entropy, scale_queries

from attemper.lab import train
from attemper.lab.model import ByteConfig, ByteModel, windows
from research import length, lengthened
from tests.lab.printed import rows

pytestmark = pytest.mark.long("research")

CONFIG = ByteConfig(layers=2, heads=2, width=16, context=16, positions="none")


@pytest.fixture
def model() -> ByteModel:
    """With scores large enough for a temperature to matter."""
    model = ByteModel(CONFIG).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parameter.mul_(2.0)
        if name.startswith("embedding"):
            parameter.mul_(20.0)
    return model


def text(count: int, length: int = 65) -> torch.Tensor:
    return torch.randint(97, 123, (count, length))


def test_scaled_queries_are_those_of_scores_divided_by_a_temperature_per_head_and_place(model: ByteModel):
    ids = text(2, 16)
    places = torch.rand(2, 2, 16) + 0.5
    layer: Any = model.blocks[0]
    x = layer.attention_norm(model.embedding(ids))
    plain = layer.attention.q_proj(x).unflatten(-1, (2, 8))
    with scale_queries(model, places):
        found = layer.attention.q_proj(x).unflatten(-1, (2, 8))
        shorter = layer.attention.q_proj(x[:, :5]).unflatten(-1, (2, 8))
    expected = torch.stack([plain[:, :, head] * places[0, head][:, None] for head in range(2)], dim=2)
    assert torch.equal(found, expected)
    assert torch.equal(shorter, expected[:, :5])
    assert torch.equal(layer.attention.q_proj(x).unflatten(-1, (2, 8)), plain)


def test_calibration_finds_the_least_loss_of_a_grid_and_a_temperature_per_head_a_lower_one(
    model: ByteModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lengthened, "EVALUATIONS", 30)
    ids = text(8)

    def loss(factors: torch.Tensor) -> float:
        return torch.tensor(judge(model, ids, factors.expand(2, 2, 64))["losses"]).mean().item()

    one, each = (calibrate(model, ids, per=per)[..., None] for per in ("model", "head"))
    assert (one.unique().numel(), each.unique().numel()) == (1, 4)
    assert loss(1 / each) < loss(1 / one) < loss(torch.ones(1))
    assert loss(1 / one) <= min(loss(1 / (one * factor)) for factor in (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)) + 1e-6


def test_matched_entropies_are_those_of_windows_of_the_trained_length(
    model: ByteModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lengthened, "HALVINGS", 16)
    ids = text(4)
    target = entropies(model, ids[:, :-1].reshape(-1, 16))
    temperatures = match_entropy(model, ids, 16)
    with scale_queries(model, (1 / temperatures)[..., None].expand(-1, -1, 65)):
        found = entropies(model, ids[:, :-1])
    reached = temperatures > 1.01 / lengthened.FARTHEST
    assert reached.any()
    assert (found - target)[reached].abs().max() < 2e-2
    assert bool((temperatures < 1).all())


def test_log_n_multiplies_scores_by_the_law_and_beyond_home_only_where_it_says_so(model: ByteModel):
    ways = factors_of_ways(model, text(4), 64, 16)
    assert list(ways) == [
        PLAIN, "log n", "log n beyond 16", "one calibrated T", "a calibrated T per head", "entropy matched",
    ]  # fmt: skip
    law = ways["log n"][0, 0]
    assert law[15].item() == pytest.approx(1.0)
    assert law[63].item() == pytest.approx(math.log(64) / math.log(16))
    assert law[0].item() == 0.0
    beyond = ways["log n beyond 16"][1, 1]
    assert beyond[:15].tolist() == [1.0] * 15
    assert torch.equal(beyond[16:], law[16:])


def test_losses_by_place_and_by_window_have_one_mean(model: ByteModel):
    found = judge(model, text(6, 257), torch.ones(2, 2, 256))
    assert sum(found["losses"]) / 6 == pytest.approx(sum(found["by_place"]) / 2, rel=1e-5)
    assert found["temperatures"] == [[1.0, 1.0], [1.0, 1.0]]
    law = factors_of_ways(model, text(2), 64, 16)["log n"]
    assert judge(model, text(2), law)["temperatures"] is None


def test_windows_lie_evenly_and_never_overlap():
    apart = windows(torch.arange(1000), 10)
    assert evenly(apart, 4)[:, 0].tolist() == [0, 250, 500, 750]
    fit, test = evenly(apart[0::2], 50), evenly(apart[1::2], 50)
    assert not set(fit.flatten().tolist()) & set(test.flatten().tolist())
    assert len(evenly(apart[:2], 4)) == 2


def test_a_bootstrap_interval_holds_the_mean_and_shrinks_with_more_windows():
    values = torch.randn(400, dtype=torch.float64).add(1).tolist()
    low, high = interval(values)
    assert low < sum(values) / 400 < high
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.15)
    assert interval(values) == (low, high)
    assert interval([2.0] * 5) == (2.0, 2.0)


def test_gains_are_paired_and_runs_that_are_missing_are_counted():
    """``test_command.py`` holds the other tables against the page."""

    def way(*losses: float) -> dict[str, Any]:
        return {"losses": losses, "by_place": [2.5, 2.6], "temperatures": [[1.0]], "entropy_nats": 3.0}

    ways = {
        PLAIN: way(2.0, 3.0, 4.0),
        "better": way(1.9, 2.8, 3.9),
        "worse": way(2.1, 3.1, 4.2),
        "either": way(1, 3, 5),
    }
    run = {"run": {"seed": 0, "config": {"context": 128}}, "record": {"at_home": 2.1, "ways": ways}}
    table = experiment({"planned": 2, "runs": [run]}).tables[0]
    assert rows(table)[0] == (PLAIN, 3.0, None, None, None, 3.0)
    assert rows(table)[1][:3] == ("better", 2.867, 0.1333)
    assert "interval that leaves 0 out: better; worse: worse." in table.see
    assert table.see.endswith("1 of the 2 runs are still to be done.")


def test_the_plan_is_a_run_a_seed_without_positions():
    runs = plan()
    assert [run.seed for run in runs] == [0, 1, 2]
    assert {(run.config.positions, run.config.context) for run in runs} == {("none", 128)}


def test_a_quick_run_ends_with_every_way(tmp_path: Path):
    found = train(length, out=tmp_path, workers=1, quick=True)
    assert found.tables[0].column("way")[0] == PLAIN
    assert len(found.tables[0].rows) == 6
