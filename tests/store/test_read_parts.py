"""A run of Parquet parts is read like any other."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attemper
from attemper.errors import InputError, MissingExtraError
from attemper.readings.sample import Sample
from attemper.store import place as live_place
from attemper.store.folder import delete_run, is_run
from attemper.store.fragment import Fragment
from attemper.store.parts import FolderTarget, Parts
from attemper.store.writer import open_writer
from tests.support.runs import written
from tests.support.samples import sample, samples, sites

pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra parquet)")


@pytest.fixture(params=["folder", "url"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place that takes no live file, with two ranks' parts of 150 samples."""
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    monkeypatch.setattr(live_place, "kind", lambda folder: "" if "shared" in folder.parts else "ext4")
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
    with attemper.open(where) as run, attemper.open(tmp_path / "local-run") as expected:
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


def written_apart(folder: Path, ranks: Iterable[int], times: Iterable[float]) -> None:
    """What ranks publish of samples that were taken at these times, as parts."""
    for rank in ranks:
        fragment = Fragment(None, rank=rank)
        for step, moment in enumerate(times):
            fragment.append(replace(sample(step), time=moment))
        Parts(fragment, FolderTarget(folder), rank).publish()


def test_counts_beyond_float32_are_exact_in_parts(tmp_path: Path) -> None:
    fragment = Fragment(None)
    for step in range(3):
        values = np.array([np.full(6, 0.5), np.arange(6) + 2**24 - 1.0])
        fragment.append(Sample(step, 1000.0 + step, sites(), ("entropy_nats", "rows"), values))
    Parts(fragment, FolderTarget(tmp_path), 0).publish()
    run = attemper.open(tmp_path)
    assert run.statistics == ("entropy_nats", "rows")
    np.testing.assert_array_equal(run.history("rows").values.reshape(3, 6), [np.arange(6) + 2**24 - 1] * 3)


def test_ranks_of_files_and_ranks_of_parts_are_one_run(tmp_path: Path) -> None:
    written(tmp_path, samples(20))
    written_apart(tmp_path, [1], range(30))
    run = attemper.open(tmp_path)
    assert [reader.rank for reader in run.ranks.readers] == [0, 1]
    assert len(run) == 30


@pytest.mark.parametrize(("many", "read"), [(30, "parts are read"), (10, "file is read"), (20, "file is read")])
def test_of_a_rank_with_a_file_and_parts_what_goes_further_is_read_and_that_is_said(tmp_path, many, read) -> None:
    written(tmp_path, samples(20))
    written_apart(tmp_path, [0], [1000.0 + step for step in range(many)])
    run = attemper.open(tmp_path)
    assert len(run) == max(many, 20)
    (remark,) = run.remarks
    assert remark.startswith("rank 0 has a file of 20 samples up to step 19 and Parquet parts of")
    assert remark.endswith(f"{many} samples up to step {many - 1}: the {read}")


def test_a_damaged_file_beside_parts_and_damaged_parts_beside_a_file_are_said(tmp_path: Path) -> None:
    (tmp_path / "fragment-0.sqlite").write_bytes(b"garbage" * 1000)
    written_apart(tmp_path, [0], range(5))
    run = attemper.open(tmp_path)
    assert len(run) == 5
    assert "fragment-0.sqlite is not a file of an attemper run" in run.remarks[0]
    (tmp_path / "fragment-0.sqlite").unlink()
    written(tmp_path, samples(7))
    (part,) = tmp_path.glob("*.parquet")
    part.write_bytes(b"garbage")
    run = attemper.open(tmp_path)
    assert len(run) == 7
    assert "the Parquet parts of rank 0 are not read: fragment-0" in run.remarks[0]
    run.close()


@pytest.mark.parametrize(
    ("ages", "live"),
    [
        ([0], True),
        ([110], True),
        ([130], False),
        ([700, 400], True),
        ([1300, 1000], False),
        ([90_000, 7000], True),
        ([90_000, 7400], False),
    ],
)
def test_parts_are_live_while_the_newest_is_so_new_that_another_may_follow(tmp_path: Path, ages, live: bool) -> None:
    now = time.time()
    written_apart(tmp_path, [0], [now - age for age in ages])
    with attemper.open(tmp_path) as run:
        assert run.live == live
    if live:
        with pytest.raises(InputError, match=r"may be written to on some machine: .* until \d\d:\d\d:\d\d UTC"):
            delete_run(tmp_path)
        assert len(attemper.open(tmp_path)) == len(ages)
    else:
        delete_run(tmp_path)
        assert not tmp_path.exists()


def test_parts_that_cannot_be_read_are_not_deleted_while_they_are_new(tmp_path: Path) -> None:
    written_apart(tmp_path, [0], [0.0])
    (part,) = tmp_path.glob("*.parquet")
    part.write_bytes(b"garbage")
    with pytest.raises(InputError, match="may be written to"):
        delete_run(tmp_path)
    os.utime(part, (0, 0))
    delete_run(tmp_path)


def test_without_pyarrow_the_extra_is_named(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"attemper\[parquet\]"):
        attemper.open(where)


def test_a_url_without_a_run_is_told_so() -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(InputError, match="there is no run at memory://nowhere/run"):
        attemper.open("memory://nowhere/run")
