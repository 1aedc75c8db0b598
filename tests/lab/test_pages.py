"""The pages of docs/lab: each shows what its experiment prints, and the check finds one that does not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType

import pytest

from attemper import lab
from attemper.lab import EXPERIMENTS, TRAINED
from tests.support.experiments import Run

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "lab"


@pytest.mark.long("takes a minute")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_shows_what_its_experiment_prints_and_the_figure_that_it_draws(
    script: ModuleType, name: str, experiment: Run, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lab, "run", experiment)
    assert script.differences(name) == []


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_names_its_command_and_shows_its_figure(script: ModuleType, name: str):
    text = (PAGES / f"{name}.md").read_text("utf-8")
    assert f"\n    attemper lab {name}\n" in text
    assert f"]({name}.png)" in text
    picture = (PAGES / f"{name}.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert script.drawn_by(picture).startswith(b"Matplotlib version")
    assert script.block(text).startswith("\n```text\n" + name + ": ")


def test_the_first_page_lists_every_experiment():
    listed = re.findall(r"^\| \[([\w-]+)\]\(([\w-]+)\.md\)", (PAGES / "README.md").read_text("utf-8"), re.MULTILINE)
    assert [name for name, _ in listed] == [page for _, page in listed] == [*EXPERIMENTS, *TRAINED]


def test_the_check_finds_another_digit_a_missing_figure_and_a_missing_page(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(script, "PAGES", tmp_path)
    assert script.differences("scaling") == ["docs/lab/scaling.md is missing", "docs/lab/scaling.png is missing"]
    text = (PAGES / "scaling.md").read_text("utf-8")
    figure = (PAGES / "scaling.png").read_bytes()
    (tmp_path / "scaling.png").write_bytes(figure)

    def output(name: str, picture: Path) -> str:
        picture.write_bytes(figure)
        return script.block(text).split("```text\n")[1].split("\n```")[0]

    monkeypatch.setattr(script, "output", output)
    (tmp_path / "scaling.md").write_text(text, "utf-8")
    assert script.differences("scaling") == []
    (tmp_path / "scaling.md").write_text(text.replace("0.86681", "0.86682"), "utf-8")
    assert "is not what `attemper lab scaling` prints" in script.differences("scaling")[0]
    (tmp_path / "scaling.md").write_text(text.replace("](scaling.png)", "](other.png)"), "utf-8")
    assert script.differences("scaling") == ["docs/lab/scaling.md does not show scaling.png"]
    (tmp_path / "scaling.md").write_text(text, "utf-8")
    (tmp_path / "scaling.png").write_bytes(figure[:-20] + b"x" + figure[-19:])
    assert "docs/lab/scaling.png is not what" in script.differences("scaling")[0]
    (tmp_path / "scaling.png").write_bytes(figure.replace(b"Matplotlib version", b"Matplotlib version0."))
    assert script.differences("scaling") == []


def test_the_check_compares_the_counted_tables_of_a_page_with_measured_ones(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(script, "PAGES", tmp_path)
    text = (PAGES / "complexity.md").read_text("utf-8")
    now = script.block(text).split("```text\n")[1].split("\n```")[0]

    def output(name: str, picture: Path) -> str:
        picture.write_bytes(b"another figure")
        return now

    monkeypatch.setattr(script, "output", output)
    (tmp_path / "complexity.png").write_bytes((PAGES / "complexity.png").read_bytes())
    measured = next(part for part in now.split("\n\n") if script.MEASURED in part)
    (tmp_path / "complexity.md").write_text(text.replace(measured, measured.replace("│ ", "│ 9")), "utf-8")
    assert script.differences("complexity") == []
    for counted in ("116.44", "8.1875"):
        (tmp_path / "complexity.md").write_text(text.replace(counted, "12345"), "utf-8")
        assert "docs/lab/complexity.md is not what" in script.differences("complexity")[0], counted


def test_a_page_leaves_out_the_tables_and_rows_that_are_listed_and_says_how_many(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    printed = (
        "scaling: why?\n\na table\n1 2\na note\n\nanother (measured on this machine)\n│ 3 │ 4 │\n│ 30 │ 5 │\n│ 6 │ 7 │"
    )
    left = "scaling: why?\n\nanother (measured on this machine)\n│ 3 │ 4 │"
    tables: dict[str, list[str] | None] = {"a table": None}
    monkeypatch.setitem(script.LEFT_OUT, "scaling", tables)
    assert script.shortened("scaling", printed) == f"{left}\n│ 30 │ 5 │\n│ 6 │ 7 │\n\n(1 more table in the terminal)"
    tables["another"] = ["3"]
    assert script.shortened("scaling", printed) == f"{left}\n\n(1 more table and 2 more rows in the terminal)"
    with_threads = printed.replace("another (", "another, 16 threads (")
    assert script.shortened("scaling", with_threads) == (
        "scaling: why?\n\nanother, 16 threads (measured on this machine)\n│ 3 │ 4 │\n\n"
        "(1 more table and 2 more rows in the terminal)"
    )
    assert script.shortened("entropy-of-none", printed) == printed
    tables["another"] = ["3 4", "4"]
    with pytest.raises(ValueError, match="no row begins with '4'"):
        script.shortened("scaling", printed)
    with pytest.raises(ValueError, match="scaling prints no table with the title 'a table'"):
        script.shortened("scaling", "scaling: why?\n\nanother\n3 4")
    with pytest.raises(ValueError, match="a page needs one <!-- output: begin -->"):
        script.block("nothing")


def test_the_output_is_that_of_a_terminal_of_110_columns_and_leaves_the_environment(
    script: ModuleType, experiment: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lab, "run", experiment)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    printed = script.output("scaling")
    assert 80 < max(map(len, printed.splitlines())) <= 110
    assert "\x1b" not in printed
    assert (os.environ["COLUMNS"], os.environ["FORCE_COLOR"]) == ("40", "1")


def test_numbers_that_a_page_quotes_are_those_of_its_experiment(experiment: Run):
    text = (PAGES / "temperature.md").read_text("utf-8").partition("## Output")[0]
    advised = experiment("temperature").table("temperatures that are advised, as starting points")
    rows = {str(row[0]): row for row in advised.rows}
    pretraining, late = rows["pretraining"], rows["late training"]
    assert f"{pretraining[2]:.0f}% of log n in a random row and {pretraining[4]:.0f}% in a trained model" in text
    assert isinstance(late[3], float)
    assert late[3] < 2
