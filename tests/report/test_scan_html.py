"""``scan --html``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import encoder
from tests.support.command import run_command

pytest.importorskip("transformers")


@pytest.mark.slow("takes many seconds")
def test_scan_html_writes_the_page_beside_one_json_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    ended = run_command(monkeypatch, capsys, "scan", encoder.folder(), "--json", "--html", page)
    assert ended.code == 0
    assert json.loads(ended.out)["sites"][3]["name"] in page.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "missing" / "page.html"
    ended = run_command(monkeypatch, capsys, "scan", "no/such/model", "--html", page)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err.startswith("attemper: the page cannot be written to ")
