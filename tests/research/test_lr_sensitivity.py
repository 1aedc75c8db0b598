"""The experiment on learning rates: its plan, its definition of sensitivity, and tables of what is not in its results.

``test_command.py`` holds its page against its results; here is what these lack: missing and diverged runs, few seeds.
"""

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
from research import lr_sensitivity as lab
from tests.lab.printed import rows

pytestmark = pytest.mark.long("research")


def test_sensitivity_is_the_mean_loss_over_the_best_and_no_run_counts_as_worse_than_untrained():
    assert sensitivity([2.0, 2.0, 2.0], 5.0) == 0.0
    assert sensitivity([2.0, 3.0], 5.0) == pytest.approx(0.5)
    assert sensitivity([2.0, 9.0], 5.0) == sensitivity([2.0, None], 5.0) == pytest.approx(1.5)


def test_the_plan_has_one_seed_of_everything_first_branches_of_plain_runs_and_five_seeds_at_three_rates():
    runs = plan()
    assert len(set(runs)) == len(runs)
    main = [run for run in runs if run.config.layers == 4]
    assert main == runs[: len(main)]
    assert len(main) == len(RATES) * (2 + len(OURS)) * 2
    assert [run.seed for run in main] == sorted(run.seed for run in main)
    assert {run.steps for run in main} == {600}
    assert {run.intervention for run in runs if run.branch} == {"plain"}
    compared = [run for run in runs if run.config.layers == 2]
    assert len(compared) == len(COMPARED) * len(INTERVENTIONS) * SEEDS
    assert {run.rate for run in compared} == set(COMPARED)
    assert not any(run.branch for run in compared)
    assert {run.steps for run in plan(steps=7, seeds=1)} == {7, 3}


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


def made(seeds: int = 1) -> list[dict[str, Any]]:
    return [
        row(name, rate, seed, loss + 0.1 * seed)
        for seed in range(seeds) for name, losses in LOSSES.items() for rate, loss in losses.items()
    ]  # fmt: skip


def first_table(runs: list[dict[str, Any]], planned: int = 24) -> Table:
    return experiment({"planned": planned, "runs": runs}).tables[0]


def compared(seeds: int) -> Table:
    """The table of so many seeds at three rates."""
    runs = made(seeds)
    shallow = [row for row in copy.deepcopy(runs) if row["run"]["rate"] in COMPARED]
    for one in shallow:
        one["run"]["config"]["layers"] = 2
    return experiment({"planned": 24, "runs": runs + shallow}).table("against QK-norm, paired by seed")


def test_differences_are_paired_by_seed_and_those_beyond_their_interval_are_named():
    table = compared(3)
    assert rows(table)[0] == (
        "plain", 3, "-0.100 ± 0.000", "+0.200 ± 0.000", "+0.400 ± 0.000", "-0.100 ± 0.000", "+0.167 ± 0.000",
    )  # fmt: skip
    assert "Lower: plain (at 0.003, best rate), QKClip (at 0.003, at 0.01, at 0.03, best rate, mean); " in table.see
    assert "Higher: plain (at 0.01, at 0.03, mean). " in table.see
    alone = compared(1)
    assert rows(alone)[0][:3] == ("plain", 1, "-0.100")
    assert "Lower: nothing; Higher: nothing." in alone.see


def test_what_does_not_beat_the_baseline_is_said_plainly():
    losses = LOSSES["QK-norm"]
    see = first_table([row(name, rate, 0, losses[rate] + (name == "QKClip")) for name in LOSSES for rate in RATES]).see
    assert "Of ours, less sensitive: nothing; a lower best loss: nothing; a lower loss at 0.03: nothing." in see


def test_runs_that_are_missing_are_counted_and_give_no_sensitivity():
    table = first_table([one for one in made(2) if one["run"]["seed"] == 0 or one["run"]["rate"] < 2e-2])
    assert table.see.endswith("3 of the 24 runs are still to be done.")
    assert rows(table)[1][-2:] == (2.05, 0.1)
    table = first_table([one for one in made() if one["run"]["rate"] == 1e-3 or one["run"]["intervention"] == "plain"])
    assert rows(table)[1] == ("QK-norm", 2.1, None, None, None, None, None)
    assert "the baseline, has not run at every rate yet" in table.see
    # At the highest rate those are compared, too, that have not run at every one.
    table = first_table([one for one in made() if one["run"]["intervention"] != "QKClip" or one["run"]["rate"] == 3e-2])
    assert "best loss: nothing; a lower loss at 0.03: QKClip (2.000)." in table.see


def test_a_run_that_diverged_counts_as_untrained():
    runs = [row("plain", rate, 0, None if rate == 3e-2 else loss) for rate, loss in LOSSES["plain"].items()]
    assert rows(first_table([*made()[4:], *runs]))[0][4] == 5.5


def test_a_quick_run_ends_with_tables_of_every_intervention_and_a_file_that_gives_them_again(tmp_path: Path):
    train(lab, out=tmp_path, workers=1, quick=True)
    found = read_results(lab, tmp_path / "results.json")
    assert found.tables[0].column("intervention") == ("plain", "QK-norm", *OURS)
    assert set(found.tables[1].column("intervention")) == set(INTERVENTIONS) - {"QK-norm"}
    assert all(math.isfinite(value) for line in rows(found.tables[0]) for value in line[1:])
    lines: list[str] = []
    assert train(lab, out=tmp_path, workers=1, quick=True, report=lines.append) == found
    count = len(plan(quick=True))
    assert lines[0] == f"{count} of {count} runs are in {tmp_path}"
    assert lab.plan(quick=True)[0].steps < 20
