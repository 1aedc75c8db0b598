"""Runs that go on where they were: computed once, found again, told apart, and written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attemper.errors import InputError
from attemper.lab.corpus import Corpus
from attemper.lab.trained import runs
from attemper.lab.trained.runs import records
from attemper.lab.trained.training import Run
from tests.support.small_runs import corpus, small

CALLS: list[Run] = []


def counted(run: Run, text: Corpus) -> dict[str, Any]:
    CALLS.append(run)
    if run.seed == 9:
        raise KeyboardInterrupt
    return {"sum": run.rate + run.seed, "none": float("nan"), "many": [1 / 3, None]}


@pytest.fixture(autouse=True)
def fresh() -> None:
    CALLS.clear()


def done(tmp_path: Path, asked: list[Run], **values: Any) -> list[dict[str, Any]]:
    return records(asked, tmp_path / "out", job=counted, workers=1, corpus=corpus(), **values)


def test_runs_are_computed_once_and_come_back_in_the_order_asked(tmp_path: Path):
    asked = [small(seed=seed, rate=rate) for seed in (0, 1) for rate in (1e-3, 1e-2)]
    first = done(tmp_path, asked)
    assert asked == CALLS
    assert [document["record"]["sum"] for document in first] == [0.001, 0.01, 1.001, 1.01]
    assert first[0]["record"] == {"sum": 0.001, "none": None, "many": [0.333333, None]}
    assert {"python", "torch"} <= set(first[0]["environment"])
    assert done(tmp_path, asked[::-1]) == first[::-1]
    assert len(CALLS) == 4


def test_an_experiment_that_was_stopped_goes_on_with_what_is_missing(tmp_path: Path):
    asked = [small(seed=seed) for seed in (0, 9, 1)]
    with pytest.raises(KeyboardInterrupt):
        done(tmp_path, asked)
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".json"]
    CALLS.clear()
    lines: list[str] = []
    done(tmp_path, [asked[0], asked[2]], report=lines.append)
    assert [run.seed for run in CALLS] == [1]
    assert lines[0] == f"1 of 2 runs are in {tmp_path / 'out'}"
    assert lines[1].startswith("1 of 1: counted-plain-0.003-seed1-")


def test_at_most_so_many_are_computed_and_the_others_left_out(tmp_path: Path):
    asked = [small(seed=seed) for seed in (0, 1, 2)]
    assert done(tmp_path, asked, at_most=0) == []
    assert [document["run"]["seed"] for document in done(tmp_path, asked, at_most=2)] == [0, 1]
    assert [run.seed for run in CALLS] == [0, 1]


def test_another_number_of_steps_another_text_and_another_job_are_other_runs(tmp_path: Path):
    done(tmp_path, [small()])
    done(tmp_path, [small(steps=9)])
    other = Corpus(corpus().training, corpus().held_out, "another")
    records([small()], tmp_path / "out", job=counted, workers=1, corpus=other)
    assert len(CALLS) == len(list((tmp_path / "out").iterdir())) == 3


def test_a_half_written_file_is_not_taken_for_a_run(tmp_path: Path):
    document = done(tmp_path, [small()])[0]
    (path,) = (tmp_path / "out").iterdir()
    path.rename(path.with_name(path.name + ".123.part"))
    assert done(tmp_path, [small()])[0]["record"] == document["record"]
    assert len(CALLS) == 2


@pytest.mark.slow("takes many seconds")
def test_two_processes_give_the_digits_of_one(tmp_path: Path):
    asked = [small(seed=0), small(seed=1)]
    one = records(asked, tmp_path / "one", workers=1, corpus=corpus())
    two = records(asked, tmp_path / "two", workers=2, corpus=corpus())
    assert [document["record"] for document in one] == [document["record"] for document in two]
    assert json.dumps(one[0]["run"]) == json.dumps(two[0]["run"])


@pytest.mark.parametrize("workers", [0, True, 1.5])
def test_a_number_of_workers_that_is_none_is_refused(tmp_path: Path, workers: Any):
    with pytest.raises(InputError, match="lab: workers must be an int of at least 1, got"):
        records([], tmp_path, workers=workers)


def test_a_folder_that_cannot_be_made_or_written_to_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match=r"no results can be kept in .*Name a folder with --out"):
        done(tmp_path, [small()])
    (tmp_path / "out").unlink()
    monkeypatch.setattr(runs.os, "access", lambda *_: False)
    with pytest.raises(InputError, match=r"is write-protected\. Name another one with --out"):
        done(tmp_path, [small()])
