"""``attemper lab`` as a person meets it: tables that fit, JSON alone on stdout, mistakes told early, trainings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attemper import lab
from attemper.cli.lab import _print_rows
from attemper.cli.output import cell_text
from attemper.lab import EXPERIMENTS, TRAINED
from attemper.lab.experiment import Column, Experiment, Table
from tests.support.command import Run, bad_usage, one_line
from tests.support.experiments import Run as Experiments

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


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", ["scaling", "saturation", "entropy"])
@pytest.mark.quick("entropy-80")
def test_tables_fit_the_terminal_and_lose_no_digit(
    command, name: str, columns: int, experiment: Experiments, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lab, "run", experiment)
    ended = command(name, columns=columns)
    assert ended.code == 0, ended.err
    assert max(len(line.rstrip()) for line in ended.out.splitlines()) <= columns
    assert "…" not in ended.out
    result = experiment(name)
    text = " ".join(ended.out.split())
    for table in result.tables:
        assert " ".join(table.title.split()) in text
        assert " ".join(table.see.split()) in text
    if name == "saturation":
        assert all(number in text for number in ("1.9287e-22", "9.3576e-14", "0.13091", "0.24457", "0.62452"))


@pytest.mark.long("takes a minute")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_cell_and_no_word_of_a_heading_is_broken_at_80_columns(name: str, experiment: Experiments):
    for table in experiment(name).tables:
        lines = printed(table, 80)
        assert max(map(len, lines)) <= 80, table.title
        body = [line.strip("│").split("│") for line in lines if line.startswith("│")]
        assert [[cell.strip() for cell in row] for row in body] == [[cell_text(c) for c in row] for row in table.rows]
        heads = [line.strip("┃").split("┃") for line in lines if line.startswith("┃")]
        for place, column in enumerate(table.columns):
            assert " ".join(" ".join(line[place] for line in heads).split()) == column.heading


def test_a_terminal_too_narrow_for_a_table_gets_all_of_its_digits():
    table = Table("t", "s.", (Column("a long heading", "logit"), Column("b")), ((1.2345e-10, "words as well"),) * 2)
    assert printed(table, 100)[1].strip("┃").split("┃")[0].strip() == "a long heading"
    for width in (10, 25):
        lines = printed(table, width)
        assert lines == printed(table, 25)
        assert [line for line in lines if line.startswith("│")] == ["│ 1.2345e-10 │ words as well │"] * 2


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width)
    _print_rows(table, console)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_without_a_name_the_experiments_are_listed(command):
    ended = command(columns=120)
    assert ended.code == 0
    assert all(name in ended.out for name in EXPERIMENTS)
    assert list(json.loads(command("--json").out)["experiments"]) == [*EXPERIMENTS, *TRAINED]


def test_json_is_one_document_on_stdout_also_with_a_picture(
    command, tmp_path: Path, experiment: Experiments, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lab, "run", lambda name, seed: replace(experiment(name), seed=seed))
    ended = command("scaling", "--json", "--png", tmp_path / "a.png", "--seed", 4)
    document = json.loads(ended.out)
    assert (document["schema"], document["experiment"], document["seed"]) == (1, "scaling", 4)
    assert document == json.loads(replace(experiment("scaling"), seed=4).to_json())
    told, drawn = ended.err.splitlines()
    assert told.startswith("lab scaling: why scores are divided by sqrt(d)")
    assert told.endswith("; takes some seconds")
    assert drawn == f"drawn: {tmp_path / 'a.png'}"
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scalling",), f"'scalling' is none of: {', '.join([*EXPERIMENTS, *TRAINED])}. Did you mean 'scaling'?"),
        (("--png", "a.png"), "a picture needs the name of an experiment"),
        (("--html", "page.html"), "a page needs the name of an experiment"),
        (("scaling", "--seed", "-1"), "--seed"),
        (("representation", "--html", "page.html"), "representation has no page: its curves are measured"),
        (("scaling", "--workers", "2"), "scaling has no --workers"),
        (("scaling", "--quick"), "scaling has no --quick"),
        (("scaling", "--results", "x.json"), "scaling has no --results"),
        (("collapse", "--seed", "3"), "collapse runs over several seeds: use --seeds."),
        (("collapse", "--results", "x.json", "--steps", "3"), "shows finished results: leave out the other options."),
        (("collapse", "--workers", "0"), "Invalid value for '--workers'"),
    ],
)
def test_bad_usage_and_options_that_would_do_nothing_end_with_2_and_write_nothing(
    command, asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
):
    monkeypatch.chdir(tmp_path)
    bad_usage(command(*arguments), message)
    assert not list(tmp_path.iterdir())
    assert not asked


def test_what_keeps_a_picture_from_being_drawn_is_told_before_the_experiment_runs(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lab, "run", lambda *_, **__: pytest.fail("the experiment ran"))
    one_line(command("scaling", "--png", tmp_path / "x.jpg"), 1, "a PNG picture needs a name that ends in .png")
    ended = command("scaling", "--png", tmp_path / "no" / "a.png")
    one_line(ended, 1, "No such file or directory")
    assert ended.err.startswith("attemper: the picture cannot be written to")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    one_line(command("scaling", "--png", tmp_path / "a.png"), 1, "pip install 'attemper[plot]'")
    assert not list(tmp_path.iterdir())


def test_a_page_is_written_where_the_curves_are_formulas(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lab, "run", lambda name, seed: Experiment(name, "?", seed, (), ()))
    ended = command("scaling", "--html", tmp_path / "page.html")
    assert ended.code == 0
    assert f"page: {tmp_path / 'page.html'}" in ended.err
    assert "Why are scores divided by" in (tmp_path / "page.html").read_text("utf-8")


# --- experiments that train ---


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
