"""``attemper fingerprint`` and ``attemper compare --explain``: files, their mistakes, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import attemper
from tests.support.command import Run, bad_usage, one_line
from tests.support.engine_faults import FAULTS
from tests.support.engine_models import tiny, tokens


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same one with a wrong scale."""
    folder = tmp_path_factory.mktemp("pair")
    fault = next(one for one in FAULTS if one.kind == "scale")
    model = tiny("llama", layers=2)
    a = attemper.fingerprint(model.model, [tokens()]).save(folder / "a.safetensors")
    with fault.patch(model, [1], 0.5):
        b = attemper.fingerprint(model.model, [tokens()]).save(folder / "b.safetensors")
    return a, b


def test_a_fault_is_named_also_on_a_page_and_the_exit_code_says_so(run: Run, pair: tuple[Path, Path], tmp_path: Path):
    code, out, _ = run("compare", *pair, "--explain", "--html", tmp_path / "page.html")
    assert code == 3
    assert "scores of run b are 0.5 times" in (tmp_path / "page.html").read_text("utf-8")
    assert out.startswith("scale at layers.1.self_attn, final score (1 of 2 sites): scores of run b are 0.5 times")
    code, out, _ = run("compare", *pair, "--explain", "--json")
    assert code == 3
    assert json.loads(out)["value"] == 0.5
    code, out, _ = run("compare", pair[0], pair[0], "--explain")
    assert (code, out.split(":")[0]) == (0, "none")


def test_the_model_that_ships_is_kept_without_its_text(run: Run, tmp_path: Path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20, "utf-8")
    path = tmp_path / "one.safetensors"
    code, out, err = run("fingerprint", "--text", tmp_path / "text.txt", "--out", path, "--sequences", 2)
    assert (code, out) == (0, "")
    assert "no text and no ids are in it" in err
    assert b"quick brown" not in path.read_bytes()
    assert attemper.open(path).sites


def test_a_folder_of_an_engine_takes_the_place_of_a_model(run: Run, tmp_path: Path):
    from tests.fingerprints.test_folder import layers

    folder, path = layers(tmp_path / "engine"), tmp_path / "out.safetensors"
    assert run("fingerprint", "--from", folder, "--out", path)[0] == 0
    assert len(attemper.open(path).sites) == 3
    assert run("fingerprint", "--from", folder, "--out", path, "--heads", "0, 1")[0] == 0
    assert [site.numbers for site in attemper.open(path).sites] == [(0, 1)] * 3


def test_mistakes_are_told(run: Run, pair: tuple[Path, Path], tmp_path: Path):
    a, out, cut = pair[0], tmp_path / "x.safetensors", tmp_path / "cut.safetensors"
    cut.write_bytes(a.read_bytes()[:5000])
    for arguments, message in (
        (("fingerprint",), "--out"),
        (("fingerprint", "--out", out, "--heads", "0-3"), "expected numbers: 0,4"),
        (("compare", *pair, "--explain", "--sort", "normalized_entropy"), "head by head"),
        (("compare", *pair, "--explain", "--text", tmp_path / "x.txt"), "both A and B are fingerprints"),
    ):
        bad_usage(run(*arguments), message)
    for arguments, message in (
        (("fingerprint", "--from", tmp_path / "gone", "--out", out), "is not a folder"),
        (("compare", *pair), "--explain` reads it"),
        (("compare", *pair, "--explain", "--html", tmp_path / "no folder" / "x.html"), "no folder"),
        (("compare", a, cut, "--explain"), "cut.safetensors is cut off"),
    ):
        one_line(run(*arguments), 1, message)


def test_a_run_that_is_not_finite_is_a_fault(run: Run, pair: tuple[Path, Path], tmp_path: Path):
    a: Any = attemper.open(pair[0])
    query = a.sites[1].query.copy()
    query[0, :, 0] = float("nan")
    b = replace(a, sites=(a.sites[0], replace(a.sites[1], query=query), *a.sites[2:]))
    page = tmp_path / "page.html"
    code, out, _ = run("compare", pair[0], b.save(tmp_path / "b.safetensors"), "--explain", "--html", page)
    assert code == 3
    assert "0 of 1024 of run a and 8 of 1024 of run b are not finite" in out
    assert "8 of 1024 of run b are not finite" in page.read_text(encoding="utf-8")
