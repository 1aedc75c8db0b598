"""``python -m research``: what it prints, its pages, and runs that come out of one file as they went in."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from research.early_warning import run_file
from research.early_warning.grid import Trial
from research.early_warning.trial import measure_run
from research.packed import pack, unpack

from attemper.errors import InputError
from attemper.lab import RESEARCH
from attemper.lab.trained.summary import read_summary
from research import EXPERIMENTS, RESULTS, TAKES, __main__, module_of
from tests.support.small_runs import corpus, small

PAGES = Path(__file__).parents[2] / "docs" / "research"
RUNS = {"lr-sensitivity": 183, "length": 3, "early-warning": 479, "shipped-alarms": 106}
"""Runs of each that are packed; those of early warning with 88 branches and 10 of an encoder."""


# --- by default ---


def test_every_name_that_left_the_package_is_a_module_here():
    assert set(RESEARCH) <= set(EXPERIMENTS)
    assert list(TAKES) == list(EXPERIMENTS)
    for name in EXPERIMENTS:
        assert name == module_of(name).NAME


def test_without_a_name_they_are_listed_and_an_unknown_one_is_bad_usage(capsys: pytest.CaptureFixture[str]):
    assert __main__.main([]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(EXPERIMENTS)
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["early-warnings"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_results_that_are_there_are_shown_as_on_their_page(script: ModuleType, name: str):
    text = (PAGES / f"{name}.md").read_text("utf-8")
    assert script.block(text) == f"\n```text\n{script.output(name)}\n```\n"


def test_results_that_are_missing_are_an_error(capsys: pytest.CaptureFixture[str]):
    assert __main__.main(["length", "--results", str(RESULTS / "none.json")]) == 1
    assert capsys.readouterr().err.startswith("research: lab length: ")


def test_a_run_is_measured_packed_and_read_again(tmp_path: Path):
    trial = Trial(small(every=1).change(steps=3))
    values, signals = measure_run(trial, corpus())
    name = run_file.file_name(trial, corpus())
    (tmp_path / "runs").mkdir()
    run_file.write(tmp_path / "runs" / name, run_file.identity(trial, corpus()), values, signals)
    pack(tmp_path / "runs", tmp_path / "one.zip")
    unpack(tmp_path / "one.zip", tmp_path / "again")
    found = run_file.read(tmp_path / "again" / name)
    assert Trial.of(found.about["trial"]) == trial
    assert found.signals["loss"] == pytest.approx(signals["loss"], rel=1e-3)


def test_packed_runs_are_the_same_bytes_again_and_fill_only_what_is_missing(tmp_path: Path):
    runs, again = tmp_path / "runs", tmp_path / "again"
    runs.mkdir()
    for name, text in {"b.json": '{"a": 1}', "a.npz": "\0\1", "results.json": "{}", "c.part": ""}.items():
        (runs / name).write_text(text)
    assert pack(runs, tmp_path / "one.zip") == 2
    again.mkdir()
    (again / "b.json").write_text("mine")
    assert unpack(tmp_path / "one.zip", again) == 1
    assert {path.name: path.read_text() for path in again.iterdir()} == {"a.npz": "\0\1", "b.json": "mine"}
    (again / "b.json").write_text('{"a": 1}')
    pack(again, tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    assert unpack(tmp_path / "one.zip", again) == 0


def test_a_folder_without_runs_and_a_file_of_something_else_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="there are no runs in"):
        pack(tmp_path, tmp_path / "one.zip")
    (tmp_path / "one.zip").write_text("no")
    with pytest.raises(InputError, match=r"the runs of '.*one\.zip' cannot be put into '.*out'"):
        unpack(tmp_path / "one.zip", tmp_path / "out")
    for name in ("../a.json", "/a.json", "b/a.json", "a.py"):
        with zipfile.ZipFile(tmp_path / "one.zip", "w") as archive:
            archive.writestr(name, "{}")
        with pytest.raises(InputError, match=r"is no file of a run"):
            unpack(tmp_path / "one.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_finished_runs_lie_in_one_file_and_hold_no_place_of_a_machine(name: str):
    with zipfile.ZipFile(RESULTS / f"{name}.zip") as archive:
        assert len(archive.namelist()) == RUNS[name]
        first = archive.read(archive.namelist()[0])
    text = (RESULTS / f"{name}.json").read_text("utf-8")
    assert len(text) < 250_000
    for kept in (text, first.decode("utf-8", "ignore")):
        assert not re.search(r"/(home|root|tmp|work|Users)/", kept)


# --- with --long ---


@pytest.mark.long("research")
def test_a_quick_run_trains_and_shows_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert __main__.main(["length", "--quick", "--out", str(tmp_path), "--workers", "1", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["experiment"] == "length"
    assert shown.err.splitlines()[-1] == f"written: {tmp_path / 'results.json'}"


@pytest.mark.long("research")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_shows_its_results_their_command_and_where_they_were_measured(script: ModuleType, name: str):
    text = (PAGES / f"{name}.md").read_text("utf-8")
    assert f"\n    python -m research {name} --workers 2\n" in text
    assert f"\n    python -m research {name} --results research/results/{name}.json\n" in text
    for kept in (f"../../research/results/{name}.zip", f"{name}.png"):
        assert f"]({kept})" in text
    assert f"| [{name}]({name}.md)" in (PAGES / "README.md").read_text("utf-8")
    content = read_summary(RESULTS / f"{name}.json", name)
    for environment in content["environments"]:
        assert f"Python {environment['python']}, torch {environment['torch']}" in text
    assert f"{len(content['runs'])} of {content['planned']} runs" in text
    pytest.importorskip("matplotlib")
    assert script.differences(name) == []


@pytest.mark.long("research")
@pytest.mark.parametrize("name", ["length", "lr-sensitivity"])
def test_packed_runs_come_to_the_results_that_are_kept(name: str, tmp_path: Path):
    """Whatever text this machine has: the runs are taken for those of the plan by what they say of themselves."""
    unpack(RESULTS / f"{name}.zip", tmp_path)
    documents = [json.loads(path.read_text("utf-8")) for path in tmp_path.iterdir()]
    found = {json.dumps(document["run"], sort_keys=True): document for document in documents}
    content = read_summary(RESULTS / f"{name}.json", name)
    assert len(found) == len(content["runs"]) == content["planned"]
    for kept in content["runs"]:
        record = found[json.dumps(kept["run"], sort_keys=True)]["record"]
        assert all(record[key] == kept["record"][key] for key in ("held_out", "at_home") if key in record)


@pytest.mark.long("research")
def test_every_packed_run_of_early_warning_is_read(tmp_path: Path):
    unpack(RESULTS / "early-warning.zip", tmp_path)
    content = read_summary(RESULTS / "early-warning.json", "early-warning")
    ends = [run_file.read(path).about["held_out"] for path in sorted(tmp_path.iterdir())]
    assert len(ends) == content["planned"] + content["encoder"]["planned"] + len(content["branches"])
    told = [row["held_out"] for row in content["runs"] + content["encoder"]["runs"]]
    assert not {end for end in told if end is not None} - set(ends)
