"""The experiment on learning rates: its plan, its definition of sensitivity, and tables that say what runs came to."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
from research.lr_sensitivity import COMPARED, RATES, SEEDS, experiment, plan, sensitivity

from attemper.lab import read_results, train
from attemper.lab.experiment import Table
from attemper.lab.trained.interventions import BRANCHES, INTERVENTIONS, OURS
from attemper.lab.trained.summary import paired_difference, thin_out
from research import lr_sensitivity as lab
from tests.lab.printed import rows

pytestmark = pytest.mark.long("research")


def test_sensitivity_is_the_mean_loss_over_the_best_and_no_run_counts_as_worse_than_untrained():
    assert sensitivity([2.0, 2.0, 2.0], 5.0) == 0.0
    assert sensitivity([2.0, 3.0], 5.0) == pytest.approx(0.5)
    assert sensitivity([2.0, 9.0], 5.0) == sensitivity([2.0, None], 5.0) == pytest.approx(1.5)


def test_the_plan_has_one_seed_of_everything_first_and_branches_plain_runs_only():
    runs = plan()
    main = [run for run in runs if run.config.layers == 4]
    assert len(main) == len(RATES) * (2 + len(OURS)) * 2
    assert main == runs[: len(main)]
    assert len(set(runs)) == len(runs)
    assert [run.seed for run in main] == sorted(run.seed for run in main)
    assert {run.steps for run in main} == {600}
    assert {run.intervention for run in main if run.branch} == {"plain"}
    assert {run.steps for run in plan(steps=7, seeds=1)} == {7, 3}


def test_the_comparison_has_five_seeds_of_everything_at_three_rates():
    compared = [run for run in plan() if run.config.layers == 2]
    assert len(set(compared)) == len(compared) == len(COMPARED) * len(INTERVENTIONS) * SEEDS
    assert {run.rate for run in compared} == set(COMPARED)
    assert not any(run.branch for run in compared)
    assert {run.intervention for run in compared[-len(OURS) :]} <= set(OURS)


LOSSES = {
    "plain": {1e-3: 2.0, 3e-3: 1.9, 1e-2: 2.3, 3e-2: 2.6},
    "QK-norm": {1e-3: 2.1, 3e-3: 2.0, 1e-2: 2.1, 3e-2: 2.2},
    "QKClip": {1e-3: 2.0, 3e-3: 1.9, 1e-2: 2.0, 3e-2: 2.0},
}


def numbers(loss: float | None, signs: dict[str, int | None]) -> dict[str, Any]:
    return {
        "held_out": loss, "diverged_at": None, "signs": signs, "training": loss, "largest_logit": 120.0,
        "last_entropies": [0.3, 0.02],
    }  # fmt: skip


def row(name: str, rate: float, seed: int, loss: float | None) -> dict[str, Any]:
    signs = {"max logit": 40 if rate > 5e-3 else None, "entropy": 60 if rate > 2e-2 else None}
    record = numbers(loss, signs | {"gradient norm": None, "loss": None})
    ends = zip(BRANCHES, ((loss or 6.0) - 0.1, (loss or 6.0) + 0.05), strict=True)
    branches = {branch: numbers(end, {}) for branch, end in ends} if name == "plain" and rate > 5e-3 else {}
    curve = {
        "steps": [0, 10], "losses": [5.5, 3.0], "gradient_norms": [1.0, 1.0], "max_logits": [4.0, 120.0],
        "least_entropies": [0.9, 0.02],
    }  # fmt: skip
    return {
        "run": {"intervention": name, "rate": rate, "seed": seed, "steps": 600, "config": {"layers": 4}},
        "record": record | {"held_out_at_start": 5.5, "branches": branches, "curve": curve},
    }


def content(seeds: int = 2, planned: int = 24, **changed: Any) -> dict[str, Any]:
    runs = [
        row(name, rate, seed, loss + 0.1 * seed)
        for seed in range(seeds) for name, losses in LOSSES.items() for rate, loss in losses.items()
    ]  # fmt: skip
    return {"planned": planned, "runs": runs} | changed


def test_losses_are_means_over_seeds_and_the_baseline_is_compared_by_name():
    table = experiment(content()).tables[0]
    assert rows(table)[0] == ("plain", 2.05, 1.95, 2.35, 2.65, 1.95, 0.3)
    assert rows(table)[1] == ("QK-norm", 2.15, 2.05, 2.15, 2.25, 2.05, 0.1)
    assert rows(table)[2][-1] == 0.075
    assert (
        "Means over 2 seeds. QK-norm is the baseline: sensitivity 0.100, best loss 2.050, 2.250 at 0.03." in table.see
    )
    assert "Of ours, less sensitive: QKClip (0.075); a lower best loss: QKClip (1.950)" in table.see
    assert table.see.endswith("a lower loss at 0.03: QKClip (2.050).")


def compared(seeds: int) -> Table:
    """The table of so many seeds at three rates."""
    runs = content(seeds)["runs"]
    shallow = [row for row in copy.deepcopy(runs) if row["run"]["rate"] in COMPARED]
    for one in shallow:
        one["run"]["config"]["layers"] = 2
    return experiment(content(runs=runs + shallow)).table("against QK-norm, paired by seed")


def test_differences_are_paired_by_seed_and_those_beyond_their_interval_are_named():
    table = compared(3)
    assert rows(table)[0] == (
        "plain", 3, "-0.100 ± 0.000", "+0.200 ± 0.000", "+0.400 ± 0.000", "-0.100 ± 0.000", "+0.167 ± 0.000",
    )  # fmt: skip
    assert table.see.startswith("2 layers, 600 steps.")
    assert "Lower: plain (at 0.003, best rate), QKClip (at 0.003, at 0.01, at 0.03, best rate, mean); " in table.see
    assert "Higher: plain (at 0.01, at 0.03, mean). " in table.see
    alone = compared(1)
    assert rows(alone)[0][:3] == ("plain", 1, "-0.100")
    assert "Lower: nothing; Higher: nothing." in alone.see


def test_an_interval_of_pairs_is_that_of_student():
    found = paired_difference({0: 1.0, 1: 2.0, 2: 3.0, 9: 7.0}, {0: 1.5, 1: 1.5, 2: 1.5, 3: 0.0})
    assert found is not None
    assert found.mean == pytest.approx(0.5)
    assert found.half == pytest.approx(4.302653 / 3**0.5, rel=1e-3)
    assert not found.told
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    same = paired_difference({seed: 1.0 + 0.1 * (seed % 2) for seed in range(20)}, dict.fromkeys(range(20), 0.0))
    assert same is not None
    assert same.told


def test_what_does_not_beat_the_baseline_is_said_plainly():
    runs = [
        row(name, rate, 0, LOSSES["QK-norm"][rate] + (name == "QKClip"))
        for name in ("QK-norm", "QKClip")
        for rate in RATES
    ]
    see = experiment(content(runs=runs)).tables[0].see
    assert "Of ours, less sensitive: nothing; a lower best loss: nothing; a lower loss at 0.03: nothing." in see


def test_runs_that_are_missing_are_counted_and_give_no_sensitivity():
    runs = [one for one in content()["runs"] if one["run"]["seed"] == 0 or one["run"]["rate"] < 2e-2]
    table = experiment(content(runs=runs, planned=24)).tables[0]
    assert table.see.endswith("3 of the 24 runs are still to be done.")
    assert rows(table)[1][-2:] == (2.05, 0.1)
    some = [one for one in content(1)["runs"] if one["run"]["rate"] == 1e-3 or one["run"]["intervention"] == "plain"]
    table = experiment(content(runs=some)).tables[0]
    assert rows(table)[1] == ("QK-norm", 2.1, None, None, None, None, None)
    assert "the baseline, has not run at every rate yet" in table.see


def test_at_the_highest_rate_those_are_compared_too_that_have_not_run_at_every_rate():
    runs = [one for one in content(1)["runs"] if one["run"]["intervention"] != "QKClip" or one["run"]["rate"] == 3e-2]
    assert "best loss: nothing; a lower loss at 0.03: QKClip (2.000)." in experiment(content(runs=runs)).tables[0].see


def test_a_run_that_diverged_counts_as_untrained():
    runs = [
        row(name, rate, 0, None if rate == 3e-2 else loss)
        for name, losses in LOSSES.items()
        for rate, loss in losses.items()
    ]
    table = experiment(content(runs=runs)).tables[0]
    assert rows(table)[0][4] == 5.5


def test_branches_stand_side_by_side_and_gains_are_counted():
    table = experiment(content(1)).tables[2]
    assert rows(table) == [(1e-2, 0, 40, 2.3, 2.2, 2.35), (3e-2, 0, 40, 2.6, 2.5, 2.65)]
    assert "learning rate / 3 ended lower in 2 of 2, by 0.100 nats on average" in table.see
    assert "QKClip from there ended lower in 0 of 2, by -0.050 nats on average" in table.see


def test_signs_are_those_of_plain_runs_and_what_was_silent_is_counted():
    table = experiment(content(1)).tables[3]
    assert len(table.rows) == 4
    assert rows(table)[3][:6] == (3e-2, 0, 40, 60, None, None)
    assert "max logit gave a sign in 2, entropy gave a sign in 1, gradient norm gave a sign in 0" in table.see
    assert "max logit was earlier in 1 of 1" in table.see


def test_a_curve_keeps_about_thirty_points_the_mean_loss_and_the_largest_gradient():
    curve = {
        "measured": list(range(0, 600, 10)), "losses": [float(step) for step in range(600)],
        "gradient_norms": [1.0] * 305 + [7.0] + [1.0] * 294, "max_logits": [float(step) for step in range(60)],
        "entropies": [[0.5, 0.1 + step / 100] for step in range(60)],
    }  # fmt: skip
    thin = thin_out(curve)
    assert thin["steps"] == list(range(0, 600, 20))
    assert thin["losses"][1] == pytest.approx(sum(range(1, 21)) / 20)
    assert [step for step, norm in zip(thin["steps"], thin["gradient_norms"], strict=True) if norm > 1] == [320]
    assert thin["max_logits"][:3] == [0.0, 2.0, 4.0]
    assert thin["least_entropies"][1] == 0.12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    train(lab, out=out, workers=1, quick=True)
    return out


def test_a_quick_run_ends_with_tables_of_every_intervention_and_a_file_that_gives_them_again(folder: Path):
    found = read_results(lab, folder / "results.json")
    assert found.tables[0].column("intervention") == ("plain", "QK-norm", *OURS)
    assert set(found.tables[1].column("intervention")) == set(INTERVENTIONS) - {"QK-norm"}
    assert all(math.isfinite(value) for line in rows(found.tables[0]) for value in line[1:])
    lines: list[str] = []
    again = train(lab, out=folder, workers=1, quick=True, report=lines.append)
    count = len(plan(quick=True))
    assert lines[0] == f"{count} of {count} runs are in {folder}"
    assert again == found
    assert lab.plan(quick=True)[0].steps < 20
