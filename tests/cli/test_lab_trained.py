"""``attemper lab`` with experiments that train: options that have no meaning are refused, progress goes to stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attemper import lab
from attemper.lab.experiment import Column, Experiment, Table
from tests.support.command import Run, bad_usage

RESULT = Experiment(
    name="collapse", question="is this a test?", seed=0, charts=(),
    tables=(Table(title="one", see="Nothing.", columns=(Column("x"),), rows=((1.5,),)),),
)  # fmt: skip


@pytest.fixture
def command(run: Run) -> Run:
    return partial(run, "lab")


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
    ended = command(
        "collapse", "--out", tmp_path, "--workers", 3, "--steps", 5, "--seeds", 1, "--at-most", 0, "--quick", "--json"
    )
    assert ended.code == 0, ended.err
    numbers = {"workers": 3, "steps": 5, "seeds": 1, "at_most": 0}
    assert asked == {"name": "collapse", "out": tmp_path, **numbers, "quick": True}
    assert json.loads(ended.out)["tables"][0]["rows"] == [[1.5]]
    told, kept, done = ended.err.splitlines()
    assert "training in which attention collapses" in told
    assert "with --quick; its numbers mean nothing" in told
    assert kept == f"runs are kept in {tmp_path}: after Ctrl-C, the same command continues"
    assert done == "1 of 1: done"


def test_without_options_runs_are_kept_in_a_folder_of_the_experiment(command, asked: dict[str, Any]):
    assert "collapse: is this a test?" in command("collapse").out
    assert asked == {"name": "collapse", "out": Path("lab-runs/collapse")}


def test_an_interrupted_training_says_how_to_go_on(command, monkeypatch: pytest.MonkeyPatch):
    def interrupted(name: str, **_: Any) -> Experiment:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab, "train", interrupted)
    monkeypatch.setattr(lab, "run", interrupted)
    ended = command("collapse")
    assert (ended.code, ended.out) == (130, "")
    assert "about half an hour" in ended.err.splitlines()[0]
    assert ended.err.splitlines()[-1] == (
        "attemper: interrupted; finished runs are in lab-runs/collapse: run the same command again to continue."
    )
    short = command("scaling")
    assert short.code == 130
    assert short.err.endswith("attemper: interrupted; `attemper lab scaling` starts anew.\n")


@pytest.mark.slow("takes many seconds")
def test_an_interrupt_ends_a_training_with_its_processes_and_without_a_traceback(tmp_path: Path):
    """The signal reaches the command and its processes at once, as Ctrl-C in a terminal does."""
    arguments = [sys.executable, "-m", "attemper", "lab", "collapse", "--seeds", "1", "--out", str(tmp_path)]
    started = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert started.stderr is not None
    told = [started.stderr.readline() for _ in range(3)]  # the third comes when the processes are about to start
    os.killpg(started.pid, signal.SIGINT)
    out, err = started.communicate()
    assert "0 of 9 runs are in" in told[2]
    assert (started.returncode, out) == (130, "")
    assert err.count("\n") == 1
    assert err.startswith("attemper: interrupted; ")


def test_every_experiment_says_how_long_it_takes():
    assert set(lab.TAKES) >= {*lab.EXPERIMENTS, *lab.TRAINED}


def test_what_it_does_is_told_before_torch_is_imported():
    code = """
import sys
from attemper.cli import main
class Told(Exception): pass
class Stderr:
    def write(self, text):
        if text.startswith("lab collapse: "):
            assert "torch" not in sys.modules
            raise Told
    def flush(self): pass
sys.argv, sys.stderr = ["attemper", "lab", "collapse"], Stderr()
try:
    main()
except Told:
    sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scaling", "--workers", "2"), "scaling has no --workers"),
        (("scaling", "--quick"), "scaling has no --quick"),
        (("scaling", "--results", "x.json"), "scaling has no --results"),
        (("collapse", "--seed", "3"), "collapse runs over several seeds: use --seeds."),
        (("collapse", "--results", "x.json", "--steps", "3"), "shows finished results: leave out the other options."),
        (("collapse", "--workers", "0"), "Invalid value for '--workers'"),
    ],
)
def test_options_that_would_do_nothing_are_bad_usage(command, asked: dict[str, Any], arguments: tuple, message: str):
    bad_usage(command(*arguments), message)
    assert not asked


def test_results_that_are_missing_or_of_something_else_are_refused(command, asked: dict[str, Any], tmp_path: Path):
    (tmp_path / "other.json").write_text('{"schema": 1, "experiment": "length"}')
    for name, message in ("none", "is not a results file"), ("other", "holds no results of 'collapse' in schema 1"):
        ended = command("collapse", "--results", tmp_path / f"{name}.json")
        assert (ended.code, ended.out, message in ended.err) == (1, "", True), ended.err
    assert not asked


@pytest.mark.parametrize("name", lab.RESEARCH)
def test_an_experiment_that_left_the_package_ends_with_2_and_the_line_that_runs_it(command, name: str):
    ended = command(name, "--workers", 2, "--at-most", 0)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == (
        f"attemper: lab {name}: it has moved out of the package. Run it from a clone of attemper's repository, with "
        f"the same options: `python -m research {name}`.\n"
    )
