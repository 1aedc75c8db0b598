"""The experiment on collapse: its plan, and tables that say who held and who ended lower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attemper.lab import train
from attemper.lab.trained.collapse import SETTING, experiment, plan
from attemper.lab.trained.interventions import INTERVENTIONS
from tests.lab.printed import rows


def test_the_plan_has_three_seeds_of_one_setting():
    runs = plan()
    assert len(runs) == 3 * len(INTERVENTIONS)
    assert [run.intervention for run in runs[: len(INTERVENTIONS)]] == list(INTERVENTIONS)
    assert {run.change(intervention="plain", seed=0) for run in runs} == {SETTING}


def row(name: str, seed: int, loss: float | None, entropies: list[float]) -> dict[str, Any]:
    curve = {
        "steps": list(range(0, 200, 10)), "losses": [5.0] * 10 + [3.0] * 5 + [2.5] * 5, "gradient_norms": [1.0] * 20,
        "max_logits": [50.0] * 20, "least_entropies": [0.5] * 20,
    }  # fmt: skip
    record = {
        "held_out": loss, "held_out_at_start": 5.5, "diverged_at": None, "branches": {}, "curve": curve,
        "signs": {"entropy": 10 if min(entropies) < 0.05 else None}, "training": loss, "largest_logit": 50.0 + seed,
        "last_entropies": entropies,
    }  # fmt: skip
    return {"run": {"intervention": name, "seed": seed, "rate": 0.03, "steps": 300}, "record": record}


RUNS = [
    row("plain", 0, 2.8, [0.3, 0.01]), row("plain", 1, 3.0, [0.3, 0.03]), row("QK-norm", 0, 2.3, [0.5, 0.4]),
    row("QK-norm", 1, 2.4, [0.5, 0.4]), row("QKClip", 0, 2.2, [0.2, 0.1]), row("QKClip", 1, None, [0.2, 0.04]),
]  # fmt: skip


def test_the_baseline_is_compared_and_what_is_missing_is_counted():
    """``test_trained.py`` holds the other tables against the page."""
    found = experiment({"planned": 9, "runs": RUNS})
    table = found.tables[0]
    assert rows(table)[0] == ("plain", 2.9, 2.8, 3.0, "+0.550 ± 0.635", 0.02, "2 of 2", 51.0)
    assert rows(table)[2] == ("QKClip", 3.85, 2.2, 5.5, "+1.500 ± 20.330", 0.07, "1 of 2", 51.0)
    assert "Of ours, a lower loss than QK-norm, the baseline: nothing." in table.see
    assert table.see.endswith("3 of the 9 runs are still to be done.")
    assert rows(found.tables[2])[0] == ("plain", 0, 2.8, 0.5, 0.01, 10)
    better = experiment({"planned": 2, "runs": [RUNS[2], RUNS[4]]}).tables[0]
    assert "the baseline: QKClip. Of what papers propose: nothing." in better.see


@pytest.mark.slow("it trains; test_length.py has a quick run by default")
def test_a_quick_run_ends_with_tables_of_every_intervention(tmp_path: Path):
    found = train("collapse", out=tmp_path, workers=1, quick=True)
    assert found.tables[0].column("intervention") == tuple(INTERVENTIONS)
