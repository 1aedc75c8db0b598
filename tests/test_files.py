"""Whoever replaces a file whole syncs it before its name, and the folder after."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper import files
from attemper.control.temperature_file import write
from attemper.files import replace_synced
from attemper.lab import model as lab
from attemper.lab.trained.summary import written
from attemper.report.target import write_whole

WRITERS: dict[str, Callable[[Path], Any]] = {
    "pages": lambda folder: write_whole(folder / "file", "text"),
    "temperatures": lambda folder: write(folder / "file", {"a": torch.ones(1)}, "kind"),
    "results of the lab": lambda folder: written({"runs": []}, folder / "file"),
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


def test_a_sync_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "new").write_text("new")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_synced(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "old"
