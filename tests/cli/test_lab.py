"""``attemper lab`` as a person meets it: tables that fit the terminal, JSON alone on stdout, mistakes told early."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from attemper import lab
from attemper.cli.lab import _print_rows
from attemper.cli.output import cell_text
from attemper.lab import EXPERIMENTS, TRAINED
from attemper.lab.experiment import Column, Experiment, Table
from tests.support.command import Run, bad_usage, one_line
from tests.support.experiments import Run as Experiments


@pytest.fixture
def command(run: Run) -> Run:
    return partial(run, "lab")


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
    ],
)
def test_bad_usage_ends_with_2_and_writes_nothing(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
):
    monkeypatch.chdir(tmp_path)
    bad_usage(command(*arguments), message)
    assert not list(tmp_path.iterdir())


def test_what_keeps_a_picture_from_being_drawn_is_told_before_the_experiment_runs(
    command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lab, "run", lambda *_, **__: pytest.fail("the experiment ran"))
    one_line(command("scaling", "--png", tmp_path / "x.jpg"), 1, "a PNG picture needs a name that ends in .png")
    ended = command("scaling", "--png", tmp_path / "no" / "a.png")
    one_line(ended, 1, "there is no folder")
    assert ended.err.startswith("attemper: no picture can be written to")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    one_line(command("scaling", "--png", tmp_path / "a.png"), 1, "pip install 'attemper[plot]'")
    assert not list(tmp_path.iterdir())


def test_a_page_is_written_where_the_curves_are_formulas(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lab, "run", lambda name, seed: Experiment(name, "?", seed, (), ()))
    ended = command("scaling", "--html", tmp_path / "page.html")
    assert ended.code == 0
    assert f"page: {tmp_path / 'page.html'}" in ended.err
    assert "Why are scores divided by" in (tmp_path / "page.html").read_text("utf-8")
