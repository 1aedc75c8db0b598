"""Experiments that train: a registry of their own, arguments that are checked, and pages that show their results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attemper import lab
from attemper.errors import InputError
from attemper.lab import EXPERIMENTS, RESEARCH, TRAINED, read_results, train
from attemper.lab.trained.summary import read_summary, write_results

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "lab"


@pytest.mark.parametrize("name", TRAINED)
def test_a_page_shows_its_results_their_command_and_where_they_were_measured(script: ModuleType, name: str):
    text = (PAGES / f"{name}.md").read_text("utf-8")
    assert f"\n    attemper lab {name} --workers 2\n" in text
    assert f"](results/{name}.json)" in text
    assert f"]({name}.png)" in text
    assert script.block(text) == f"\n```text\n{script.output(name)}\n```\n"
    kept = (PAGES / "results" / f"{name}.json").read_text("utf-8")
    assert len(kept) < 250_000
    assert not re.search(r"/(home|root|tmp|work|Users)/", kept)
    content = read_summary(PAGES / "results" / f"{name}.json", name)
    for environment in content["environments"]:
        assert f"Python {environment['python']}, torch {environment['torch']}" in text
    assert f"{len(content['runs'])} of {content['planned']} runs" in text


@pytest.mark.slow("draws pictures")
@pytest.mark.parametrize("name", TRAINED)
def test_a_figure_is_that_of_its_results(script: ModuleType, name: str):
    pytest.importorskip("matplotlib")
    assert script.differences(name) == []


def test_a_name_of_the_other_kind_lists_the_right_ones(tmp_path: Path):
    assert not set(TRAINED) & set(EXPERIMENTS)
    with pytest.raises(InputError, match=r"lab collapse: it trains models. Take attemper.lab.train\('collapse', out"):
        lab.run("collapse")
    for call in (lambda: train("scaling", out=tmp_path), lambda: read_results("scaling", tmp_path / "x")):
        with pytest.raises(InputError, match=r"lab experiment that trains must be one of 'collapse'"):
            call()


ANYTHING: Any = 1.5


@pytest.mark.parametrize("given", [{"steps": 0}, {"seeds": ANYTHING}, {"steps": True}])
def test_numbers_that_are_none_are_refused(given: dict[str, Any], tmp_path: Path):
    with pytest.raises(InputError, match=f"lab collapse: {next(iter(given))} must be an int of at least 1, got"):
        train("collapse", out=tmp_path, **given)


def test_a_file_of_results_has_a_line_for_each_run_and_comes_back_the_same(tmp_path: Path):
    content = {"schema": 1, "experiment": "collapse", "planned": 2, "runs": [{"run": {"a": 1}}, {"run": {"a": None}}]}
    path = write_results(content, tmp_path / "results.json")
    assert json.loads(path.read_text("utf-8")) == content == read_summary(path, "collapse")
    assert '{"run": {"a": 1}},\n{"run": {"a": null}}\n' in path.read_text("utf-8")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "experiment": "collapse"}', '{"schema": 1}'])
def test_a_file_of_something_else_is_refused(text: str, tmp_path: Path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=r"Name the results\.json that the experiment wrote into its folder of runs"):
        read_results("collapse", tmp_path / "x.json")


@pytest.mark.parametrize("name", TRAINED)
def test_results_that_were_cut_are_refused_by_what_is_missing(tmp_path: Path, name: str):
    content = json.loads((PAGES / "results" / f"{name}.json").read_text("utf-8"))
    kept = {key: content[key] for key in ("schema", "experiment")}
    (tmp_path / "results.json").write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(InputError, match=rf"lab {name}: .* was cut or is of another version .*KeyError: '\w+'"):
        read_results(name, tmp_path / "results.json")


def test_a_folder_without_runs_is_named_where_none_is_trained(tmp_path: Path):
    with pytest.raises(InputError, match=r"there are no runs in '.*nowhere', and at_most=0 trains none"):
        train("collapse", out=tmp_path / "nowhere", at_most=0)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", RESEARCH)
def test_an_experiment_that_left_the_package_says_where_it_is(name: str, tmp_path: Path):
    assert not {name} & {*EXPERIMENTS, *TRAINED}
    for call in (lambda: lab.run(name), lambda: train(name, out=tmp_path), lambda: read_results(name, tmp_path)):
        with pytest.raises(InputError, match=rf"has moved out of the package.*: `python -m research {name}`"):
            call()
