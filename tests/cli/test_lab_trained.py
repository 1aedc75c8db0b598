"""``attemper lab`` with experiments that train: options that have no meaning are refused, progress goes to stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attemper import cli, lab
from attemper.lab.experiment import Column, Experiment, Table

RESULT = Experiment(
    name="length", question="is this a test?", seed=0, charts=(),
    tables=(Table(title="one", see="Nothing.", columns=(Column("x"),), rows=((1.5,),)),),
)  # fmt: skip


class Ended:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def ended(*arguments: object) -> Ended:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr("sys.argv", ["attemper", "lab", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        return Ended(int(stop.value.code or 0), out, err)

    return ended


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``train`` was called with, which trains nothing here."""
    found: dict[str, Any] = {}

    def train(name: str, *, report: Any, **given: Any) -> Experiment:
        found.update(name=name, **given)
        report("1 of 1: done")
        return RESULT

    monkeypatch.setattr(lab, "train", train)
    return found


def test_options_reach_the_training_and_progress_goes_to_stderr(command, asked: dict[str, Any], tmp_path: Path):
    ended = command("length", "--out", tmp_path, "--workers", 3, "--steps", 5, "--seeds", 1, "--quick", "--json")
    assert ended.code == 0, ended.err
    assert asked == {"name": "length", "out": tmp_path, "workers": 3, "steps": 5, "seeds": 1, "quick": True}
    assert json.loads(ended.out)["tables"][0]["rows"] == [[1.5]]
    assert ended.err == "1 of 1: done\n"


def test_without_options_runs_are_kept_in_a_folder_of_the_experiment(command, asked: dict[str, Any]):
    assert "length: is this a test?" in command("length").out
    assert asked == {"name": "length", "out": Path("lab-runs/length")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scaling", "--workers", "2"), "scaling trains nothing: it has no --workers."),
        (("scaling", "--quick"), "scaling trains nothing: it has no --quick."),
        (("scaling", "--results", "x.json"), "scaling trains nothing: it has no --results."),
        (("length", "--seed", "3"), "length runs over several seeds: take --seeds."),
        (("length", "--results", "x.json", "--steps", "3"), "results that are there are shown; nothing else fits."),
        (("length", "--workers", "0"), "Invalid value for '--workers'"),
    ],
)
def test_options_that_would_do_nothing_are_bad_usage(command, asked: dict[str, Any], arguments: tuple, message: str):
    ended = command(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert message in " ".join(ended.err.split())
    assert not asked


def test_results_that_are_there_are_shown_and_others_refused(command, asked: dict[str, Any], tmp_path: Path):
    missing = command("collapse", "--results", tmp_path / "none.json")
    assert (missing.code, missing.out) == (1, "")
    assert "is no file of results" in missing.err
    (tmp_path / "other.json").write_text('{"schema": 1, "experiment": "length"}')
    other = command("collapse", "--results", tmp_path / "other.json")
    assert other.code == 1
    assert "holds no results of 'collapse' in schema 1" in other.err
    assert not asked
