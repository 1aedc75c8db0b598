"""A page is written whole or not at all, and a place where that cannot be is told before the work."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from attemper import files, report
from attemper.errors import InputError
from tests.report import readings


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_page_is_written_as_any_new_file_is(tmp_path: Path) -> None:
    written = report.write(readings.minilm(), tmp_path / "page.html")
    (tmp_path / "plain").touch()
    assert written == (tmp_path / "page.html").resolve()
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert listing(tmp_path) == ["page.html", "plain"]
    assert written.read_text(encoding="utf-8") == report.page(readings.minilm())


def test_an_earlier_page_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    path.chmod(0o640)
    report.write(readings.minilm(), str(path))
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "page.html"
    link.symlink_to(tmp_path / "there" / "real.html")
    report.write(readings.minilm(), link)
    assert link.is_symlink()
    assert listing(tmp_path / "there") == ["real.html"]


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("missing/page.html", "No such file or directory"),
        ("file/page.html", "Not a directory"),
        (".", "a folder or a device"),
        ("/dev/null", "a folder or a device"),
        ("a\x00b.html", "null byte"),
        ("x" * 300 + ".html", "too long"),
    ],
)
def test_a_place_where_no_file_can_be_is_refused_in_one_line(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"the page cannot be written to .*Name a file") as refused:
        report.checked_target(tmp_path / place)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert listing(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_the_earlier_page_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        report.write(readings.minilm(), path)
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["page.html"]


def test_checking_a_place_leaves_nothing_there(tmp_path: Path) -> None:
    report.checked_target(tmp_path / "page.html")
    assert listing(tmp_path) == []
