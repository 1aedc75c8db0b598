"""A run of Parquet parts is read like any other."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import attemper
from attemper.errors import InputError, MissingExtraError
from attemper.store import filesystem
from attemper.store.folder import delete_run, is_run
from attemper.store.writer import open_writer
from tests.support.samples import samples

pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra parquet)")


@pytest.fixture(params=["folder", "url"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place that takes no live file, with two ranks' parts of 150 samples."""
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    monkeypatch.setattr(filesystem, "kind", lambda folder: "" if "shared" in folder.parts else "ext4")
    place = str(tmp_path / "shared" / "run")
    if request.param == "url":
        memory = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")
        memory.MemoryFileSystem.store.clear()
        place = "memory://bucket/run"
    for rank in (0, 1):
        writer = open_writer(place, rank=rank, about={"model": "tiny"})
        for one in samples(150):
            writer.take(one)
        writer.close()
    return place


def test_parts_give_the_history_of_the_run(where: str, tmp_path: Path) -> None:
    local = open_writer(tmp_path / "local-run")
    for one in samples(150):
        local.take(one)
    local.close()
    with attemper.open_run(where) as run, attemper.open_run(tmp_path / "local-run") as expected:
        assert run.name == "run"
        assert run.about["model"] == "tiny"
        np.testing.assert_array_equal(run.history("entropy").values, expected.history("entropy").values)
        assert run.at(149).reading.sites == expected.at(149).reading.sites
        assert not run.live
        assert "written by several ranks" in run.remarks[0]


def test_a_folder_of_parts_is_a_run_and_deleted_as_one(where: str) -> None:
    if "://" in where:
        return
    assert is_run(Path(where))
    delete_run(Path(where))
    assert not Path(where).exists()


def test_without_pyarrow_the_extra_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"attemper\[parquet\]"):
        attemper.open_run(where)


def test_a_url_without_a_run_is_told_so() -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(InputError, match="there is no run at memory://nowhere/run"):
        attemper.open_run("memory://nowhere/run")
