"""``attemper check``: the table, JSON, the page, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support import encoder
from tests.support.command import Run, one_line

SHORT = ("--max-length", "64", "--batch-size", "2")


def test_the_model_that_ships_keeps_what_is_declared_of_it(run: Run, tmp_path: Path):
    page = tmp_path / "check.html"
    code, out, err = run("check", *SHORT, "--json", "--html", page)
    assert (code, err) == (0, "")
    verdicts = {rule["name"]: rule["verdict"] for rule in json.loads(out)["rules"]}
    assert (verdicts["batch"], verdicts["documents"]) == ("kept", "not declared")
    assert "No rule is broken" in page.read_text("utf-8")


def test_what_is_not_proved_is_an_exit_code_where_that_is_asked(run: Run):
    code, out, _ = run("check", *SHORT, "--strict")
    assert code == 3
    assert "not declared" in out


@pytest.mark.slow("takes many seconds")
def test_an_encoder_is_padded_on_the_side_of_its_tokenizer_and_only_the_left_is_blamed(run: Run, tmp_path: Path):
    pytest.importorskip("transformers")
    code, out, _ = run("check", encoder.folder(), *SHORT, "--json")
    rule = {rule["name"]: rule for rule in json.loads(out)["rules"]}["padding"]
    assert (code, rule["verdict"]) == (0, "kept")
    folder = tmp_path / "left"
    shutil.copytree(encoder.folder(), folder)
    about = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**about, "padding_side": "left"}), "utf-8")
    code, out, _ = run("check", folder, *SHORT, "--json")
    rules = {rule["name"]: rule for rule in json.loads(out)["rules"]}
    assert (code, rules["padding"]["site"]) == (3, "embeddings.position_embeddings")
    assert rules["padding"]["message"].endswith("or pad on the right.")
    assert "proved at" in rules["padding"]["observed"]  # its mask is right


def test_a_model_that_is_not_there_is_one_line(run: Run, tmp_path: Path):
    one_line(run("check", "--text", tmp_path / "none.txt"), 1, "the text")
