"""``scan --html``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import run_command

pytest.importorskip("transformers")


def test_a_page_that_cannot_be_written_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "missing" / "page.html"
    ended = run_command(monkeypatch, capsys, "scan", "no/such/model", "--html", page)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err.startswith("attemper: the page cannot be written to ")
