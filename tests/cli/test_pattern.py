"""``attemper pattern``: the page of all heads on a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.conftest import shown_text
from tests.report.test_page import data_of
from tests.support import encoder
from tests.support.command import Run, bad_usage, one_line


def test_the_page_of_all_heads_is_written_and_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("so they went, and they went on " * 9, "utf-8")
    ended = run("pattern", "--text", tmp_path / "text.txt")
    assert ended.code == 0, ended.err
    assert "attemper-attemper-s-byte-level-model.html: attemper's byte-level model: 16 heads of 4 sites" in ended.err
    html = next(tmp_path.glob("*.html")).read_text("utf-8")
    (stack,) = data_of(html)["stacks"]
    assert [len(site["heads"]) for site in stack["sites"]] == [4] * 4
    assert "".join(stack["sites"][0]["tokens"]).startswith("so they went, and")
    assert len(stack["sites"][0]["tokens"]) == 64


def test_one_layer_or_head_and_what_there_is_not(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "one.html"
    ended = run("pattern", "--layer", 1, "--head", 2, "--json", "--html", place)
    assert ended.code == 0, ended.err
    (head,) = json.loads(ended.out)["heads"]
    assert (head["layer"], head["head"]) == (1, 2)
    assert "1 head" in shown_text(place.read_text("utf-8"))
    ended = run("pattern", "--layer", 9, "--html", place)
    one_line(ended, 1, "there is no such layer. Layers: 0, 1, 2, 3")
    bad_usage(run("pattern", "--layer", 1, "--site", "blocks.1.attention"), "leave out --site or --layer")


@pytest.mark.slow("loads transformers")
def test_a_pretrained_model_names_its_tokens(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    place = tmp_path / "page.html"
    ended = run("pattern", encoder.folder(), "--max-length", 16, "--html", place)
    assert ended.code == 0, ended.err
    assert data_of(place.read_text("utf-8"))["stacks"][0]["sites"][0]["tokens"][0] == "[CLS]"
