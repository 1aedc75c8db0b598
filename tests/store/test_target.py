"""Folders and object stores take files whole."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from attemper.errors import MissingExtraError
from attemper.store.place import FolderTarget, open_target


@pytest.fixture(params=["folder", "memory", "local"])
def target(request, tmp_path):
    if request.param == "folder":
        return open_target(tmp_path / "runs" / "a")
    memory = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")
    if request.param == "local":
        return open_target((tmp_path / "runs" / "a").as_uri())
    memory.MemoryFileSystem.store.clear()
    return open_target("memory://bucket/run/")


def test_files_are_listed_read_and_replaced(target):
    assert target.names() == []
    target.write("b.parquet", b"two")
    target.write("a.parquet", b"one")
    target.write("b.parquet", b"three")
    assert target.names() == ["a.parquet", "b.parquet"]
    assert (target.read("a.parquet"), target.read("b.parquet")) == (b"one", b"three")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    target = FolderTarget(tmp_path)
    target.write("a", b"one")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="No space left"):
        target.write("a", b"two")
    assert os.listdir(tmp_path) == ["a"]
    assert target.read("a") == b"one"


def test_a_protocol_that_nobody_knows_is_an_error_of_the_system():
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(OSError, match="nosuch:// cannot be reached"):
        open_target("nosuch://bucket/run")


def test_a_url_without_fsspec_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"a run at s3:// needs the package fsspec.*attemper\[parquet\]"):
        open_target("s3://bucket/run")


def test_a_relative_path_is_of_the_folder_in_which_it_was_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = open_target("run")
    monkeypatch.chdir(tmp_path.parent)
    target.write("one", b"1")
    assert (tmp_path / "run" / "one").read_bytes() == b"1"
