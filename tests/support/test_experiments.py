"""What is computed once: for every process that is given the folder, and for each of its arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from attemper.lab.experiment import Column, Experiment, Table
from tests.support.experiments import kept_in


def test_an_experiment_runs_once_for_each_name_and_seed_and_not_where_it_failed(tmp_path: Path):
    ran: list[tuple[str, int]] = []

    def run(name: str, *, seed: int) -> Experiment:
        ran.append((name, seed))
        if len(ran) == 1:
            raise OSError("no")
        return Experiment(name, "?", seed, (Table("t", "s.", (Column("a"),), ((float("inf"),), (0.1,))),), ())

    with pytest.raises(OSError, match="no"):
        kept_in(tmp_path, run)("scaling")
    one, other = kept_in(tmp_path, run), kept_in(tmp_path, run)
    first = one("scaling")
    assert first.table("t").column("a") == (float("inf"), 0.1)
    assert [one("scaling"), other("scaling"), other("scaling", seed=0)] == [first] * 3
    assert other("scaling", seed=1).seed == one("scaling", 1).seed == 1
    assert ran == [("scaling", 0), ("scaling", 0), ("scaling", 1)]
