"""Files are written whole or not at all, and a place where none can be is refused before the work."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attemper import files
from attemper.control.saved_model import write
from attemper.errors import InputError
from attemper.file_schema import read_foreign
from attemper.files import write_whole
from attemper.lab import model as lab
from attemper.lab.trained.summary import write_results
from attemper.report.page import scan_page
from attemper.results.scan import Scan
from tests.report import readings

WRITERS: dict[str, Callable[[Path], Any]] = {
    "pages": lambda folder: write_whole(folder / "file", "text"),
    "temperatures": lambda folder: write(folder / "file", {"a": torch.ones(1)}, "kind"),
    "results of the lab": lambda folder: write_results({"runs": []}, folder / "file"),
    "weights of the lab": lambda folder: lab.save(lab.load(), folder / "file"),
}
SOURCE = Path(__file__).parents[1] / "src" / "attemper"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, name of the file) of each sync and rename."""
    found: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def told_sync(descriptor: int) -> None:
        found.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        sync(descriptor)

    def told_replace(source: Path, target: Path) -> None:
        found.append(("replace", os.path.basename(source)))
        replace(source, target)

    monkeypatch.setattr(files.os, "fsync", told_sync)
    monkeypatch.setattr(files.os, "replace", told_replace)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux which file a descriptor is of")
@pytest.mark.parametrize("writer", WRITERS)
def test_the_content_is_synced_before_the_rename_and_the_folder_after(
    writer: str, tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    WRITERS[writer](tmp_path)
    (_, part), *_ = calls
    assert part != "file"
    assert calls == [("sync", part), ("replace", part), ("sync", tmp_path.name)]
    assert os.listdir(tmp_path) == ["file"]


def test_nobody_renames_a_file_of_a_users_without_it() -> None:
    renames = re.compile(r"os\.(replace|rename)\(|\b(part|partial|whole|temporary|finished)\.(replace|rename)\(")
    found = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if renames.search(path.read_text())}
    # The compiler's libraries can be built again, and are checked by their stamp.
    assert found == {"files.py", "backends/native/build.py"}


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_page_is_written_as_any_new_file_is_also_over_an_earlier_one_and_through_a_link(tmp_path: Path) -> None:
    files.check_target(tmp_path / "page.html")
    assert listing(tmp_path) == [], "checking a place leaves nothing there"
    written = Scan(readings.minilm(), None).to_html(tmp_path / "page.html")
    (tmp_path / "plain").touch()
    assert written == (tmp_path / "page.html").resolve()
    assert stat.S_IMODE(written.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert listing(tmp_path) == ["page.html", "plain"]
    assert written.read_text(encoding="utf-8") == scan_page(readings.minilm())
    written.write_text("old")
    written.chmod(0o640)
    link = tmp_path / "link.html"
    link.symlink_to(written)
    Scan(readings.minilm(), None).to_html(str(link))
    assert link.is_symlink()
    assert written.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert stat.S_IMODE(written.stat().st_mode) == 0o640


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
        files.check_target(tmp_path / place)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert listing(tmp_path) == ["file"]


@pytest.mark.parametrize("what", files.SUFFIXES)
def test_any_name_will_do_but_that_of_another_kind_of_file(tmp_path: Path, what: str) -> None:
    own = files.SUFFIXES[what]
    for suffix in (own, own.upper(), "", ".st", ".v2"):
        files.check_target(tmp_path / f"file{suffix}", what)
    for suffix in {*files.SUFFIXES.values(), ".gguf", ".GGUF"} - {own}:
        with pytest.raises(
            InputError, match=rf"would be taken for a {re.escape(suffix.lower())} file.*{what}\{own}\.$"
        ):
            files.check_target(tmp_path / f"file{suffix}", what)
    with pytest.raises(InputError, match=f"the {what} cannot be written to .*No such file"):
        write_whole(tmp_path / "missing" / "file", "text", what)


def test_sums_of_a_scan_in_a_json_file_are_refused_with_what_writes_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"taken for a \.json file; for a scan as JSON: to_json\(\), or --json\. Name"):
        files.check_target(tmp_path / "scan.json", "reading")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_earlier_page_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    monkeypatch.setattr(files.os, step, Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(InputError, match="No space left on device"):
        Scan(readings.minilm(), None).to_html(path)
    assert path.read_text() == "old"
    assert listing(tmp_path) == ["page.html"]


def test_a_replacement_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(TypeError), files.replacement(tmp_path / "file") as part:
        part.write_text(None)  # type: ignore[arg-type]
    assert (tmp_path / "file").read_text() == "old"
    assert listing(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe\xff", "cannot be read: it is not JSON"),
        (b"[" * 100_000, "cannot be read: it is not JSON"),
        (b"9" * 5000, "cannot be read: it is not JSON"),
        (b"[1]", "cannot be read: it must be an object, got list of 1"),
        (b'{"architectures": 3}', r"it\.architectures must be a list or null, got 3"),
    ],
)
def test_a_config_of_other_software_that_is_none_is_one_error(tmp_path, data, message):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_foreign(path, {"architectures?": ([str], None)})


def test_a_config_of_other_software_may_hold_infinite_numbers(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_foreign(path) == {"time_step_limit": [0.0, float("inf")]}
    with pytest.raises(InputError, match=r"none\.json cannot be read: No such file"):
        read_foreign(tmp_path / "none.json")
