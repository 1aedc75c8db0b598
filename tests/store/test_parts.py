"""A run as Parquet parts: what is in a part, when it is published, put together again, and read like any other."""

from __future__ import annotations

import io
import json
import math
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
from attemper.store import parts
from attemper.store.compaction import round_bits
from attemper.store.folder import delete_run, is_run
from attemper.store.fragment import Fragment
from attemper.store.parts import FolderTarget, Parts, open_target
from attemper.store.scalars import read
from attemper.store.schema import Tables
from attemper.store.series import FragmentReader
from attemper.store.writer import Writer, open_writer
from tests.support.runs import taken_by, written
from tests.support.samples import NAMES, assert_same, sample, samples, sites

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra parquet)")


def named(where) -> list[str]:
    return sorted(parts.parts(open_target(where)))


def write(where, taken, **options) -> Writer:
    run = open_writer(where, **options)
    for one in taken:
        run.take(one)
        run.flush(10)
    return run


def published(folder: Path, ranks: Iterable[int], times: Iterable[float]) -> None:
    """What ranks publish of samples that were taken at these times."""
    for rank in ranks:
        fragment = Fragment(None, rank=rank)
        for step, moment in enumerate(times):
            fragment.append(replace(sample(step), time=moment))
        Parts(fragment, FolderTarget(folder), rank).publish()


def taken_in(tables: Tables) -> list[Sample]:
    return list(FragmentReader(tables).replay(0, 1000).values())


def test_every_128_samples_are_published_and_the_rest_at_the_end(where):
    run = write(where, samples(300))
    assert [name[-17:] for name in named(where)] == ["000000000.parquet", "000000128.parquet"]
    run.close()
    assert [name[-17:] for name in named(where)][2:] == ["000000256.parquet"]
    assert not [name for name in open_target(where).names() if name.endswith("tmp")]


def test_after_a_minute_what_is_new_is_published_also_when_no_sample_comes(where, monkeypatch):
    monkeypatch.setattr(parts, "PART_SECONDS", 0.05)
    run = write(where, samples(3))
    deadline = 200
    while not named(where) and deadline:
        deadline -= 1
        run._thread.join(0.05)
    assert named(where)
    run.close()


def test_a_part_has_a_row_per_head_and_says_what_it_holds(where):
    numbers = sample(8).values.copy()
    numbers[0, 1] = np.nan
    one = sample(8)
    run = write(where, [sample(7), type(one)(8, 9.5, one.sites, NAMES, numbers, 3)], about={"rows": 128}, rank=2)
    run.cover({("b", "self", "train"): "it was not called"})
    run.close()
    (name,) = named(where)
    assert name.startswith("fragment-2-")
    table = pq.read_table(io.BytesIO(open_target(where).read(name)))
    labels = ["name", "kind", "mode", "layer", "attention", "normalizer"]
    assert table.column_names == ["sample", "step", "time", "tokens", *labels, "head", "first_head", *NAMES]
    rows = table.to_pylist()
    assert len(rows) == 2 * 6
    assert rows[7]["entropy_nats"] is None
    assert {key: rows[10][key] for key in ("sample", "step", "time", "tokens", "name", "layer", "head")} == {
        "sample": 1,
        "step": 8,
        "time": 9.5,
        "tokens": 3,
        "name": "layers.1.attn",
        "layer": 1,
        "head": 1,
    }
    assert rows[10]["max_logit"] == round_bits(numbers[2, 4:5], 15)[0]
    assert rows[10]["nonfinite_rows"] == numbers[3, 4]
    facts = json.loads(table.schema.metadata[parts.KEY])
    assert facts["version"] == 2
    assert facts["about"]["rows"] == 128
    assert facts["units"]["entropy_nats"] == "nats"
    assert facts["segment"]["first_step"] == 7
    assert facts["coverage"] == [["b", "self", "train", "it was not called"]]


def test_the_parts_of_a_run_are_put_together_again(where):
    evaluation = sites(1, 2, "eval")
    labels = [evaluation if step % 3 == 1 else None for step in range(200)]
    taken = [sample(step, one, NAMES[: 3 + step % 2]) for step, one in enumerate(labels)]
    run = write(where, taken[:150], about={"rows": 128})
    run.cover({("b", "self", "train"): "it was not called"})
    run.close()
    again = open_writer(where)
    assert again.last_step == 149
    taken_by(again, taken[150:])
    fragment = parts.restore(open_target(where), 0)
    tables = fragment.tables()
    assert_same(taken_in(tables), taken)
    assert tables.rows("SELECT first_step FROM segment WHERE first_step IS NOT NULL") == [(0,), (150,)]
    assert tables.rows("SELECT value FROM about WHERE name = 'rows'") == [("128",)]
    assert tables.rows("SELECT * FROM coverage") == [("b", "self", "train", "it was not called")]


def test_a_run_that_goes_back_keeps_its_segments(where):
    steps = [0, 1, 2, 3, 2, 3, 4]
    write(where, [sample(step) for step in steps]).close()
    tables = parts.restore(open_target(where), 0).tables()
    assert [one.step for one in taken_in(tables)] == steps
    assert tables.rows("SELECT first_sample, first_step FROM segment WHERE first_step IS NOT NULL") == [(0, 0), (4, 2)]


def test_on_another_machine_a_run_goes_on_after_the_last_step_that_was_published(where, tmp_path, monkeypatch):
    write(where, samples(5)).close()
    (tmp_path / "another").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "another"))
    second = open_writer(where)
    assert second.last_step == 4
    taken_by(second, [sample(5)])
    found = taken_in(parts.restore(open_target(where), 0).tables())
    assert [one.step for one in found] == [0, 1, 2, 3, 4, 5]


def test_what_a_killed_process_did_not_publish_the_next_one_does(where):
    run = write(where, samples(5))
    run._parts = None  # it never comes to it
    run.close()
    assert named(where) == []
    open_writer(where).close()
    assert len(named(where)) == 1
    assert len(taken_in(parts.restore(open_target(where), 0).tables())) == 5


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_a_target_that_fails_costs_one_warning_and_is_tried_again(where, monkeypatch, caplog):
    write_one, failures = FolderTarget.write, iter([True, True])

    def fail(target: FolderTarget, name: str, data: bytes) -> None:
        if name.endswith("parquet") and next(failures, False):
            raise OSError(116, "Stale file handle")
        write_one(target, name, data)

    monkeypatch.setattr(FolderTarget, "write", fail)
    run = write(where, samples(3 * 128))
    run.close()
    assert (run.written, run.dropped) == (3 * 128, 0)
    assert len(named(where)) == 3
    (record,) = caplog.records
    assert "Stale file handle" in record.message


def test_a_foreign_part_and_one_of_a_newer_version_are_told(where):
    write(where, samples(2)).close()
    target, (name,) = open_target(where), named(where)
    table = pq.read_table(io.BytesIO(target.read(name)))
    for metadata, message in [
        ({}, "is not part of an attemper run"),
        ({parts.KEY: b'{"version": 3}'}, "was written by a newer attemper: its version is 3"),
    ]:
        file = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), file)
        target.write(name, file.getvalue())
        with pytest.raises(InputError, match=message):
            parts.restore(target, 0)


@pytest.mark.parametrize("data", [b"no parquet", "a table of somebody else", "an empty table"])
def test_a_foreign_file_that_is_named_as_a_part_costs_one_warning(where, caplog, data):
    if isinstance(data, str):
        file, values = io.BytesIO(), [1] if data.startswith("a table") else []
        pq.write_table(pytest.importorskip("pyarrow").table({"x": values}), file)
        data = file.getvalue()
    name = f"fragment-0-{10**15:016d}-000000000.parquet"
    open_target(where).write(name, data)
    run = write(where, [sample(3)])
    run.close()
    assert (run.written, run.dropped) == (0, 1)
    assert [one.step for one in taken_in(run.open_reader())] == [3]
    (record,) = caplog.records
    assert "run cannot be stored: fragment-0-" in record.message
    assert open_target(where).read(name) == data


def test_numbers_of_every_step_are_published_and_put_together_again(where):
    for steps in (range(3), range(2, 6)):
        run = open_writer(where)
        run.keep_scalars([(step, {"loss": step / 2, "lr": 1.0} if step else {"loss": math.nan}) for step in steps])
        for step in steps:
            run.take(sample(step))
        run.flush(10)
        assert run._parts is not None
        run._parts.publish()
        run.keep_scalars([(steps[-1] + 1, {}), (steps[-1] + 1, {"loss": 9.0})])
        run.close()
    found = read(parts.restore(open_target(where), 0).tables().rows)
    assert found["loss"].steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert np.isnan(found["loss"].values[0])
    assert found["loss"].values[1:].tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, 9.0]
    assert found["lr"].steps.tolist() == [1, 2, 3, 4, 5]
    names = [name for name in open_target(where).names() if "scalars" in name]
    assert len(names) == 4
    assert all(parts.OURS.fullmatch(name) for name in names)
    with attemper.open(where) as found:
        assert found.history("loss").values[-1] == 9.0


def test_other_files_are_no_parts_and_a_damaged_one_of_numbers_is_told(tmp_path):
    for name in ("fragment-0.sqlite", "fragment-0-1-1.parquet", "a.parquet", "fragment-0.token"):
        (tmp_path / name).touch()
    target = FolderTarget(tmp_path)
    assert parts.parts(target) == {}
    target.write("fragment-0-0000000000000001-000000000.scalars", b"nothing")
    with pytest.raises(InputError, match="is not part of a run, or is damaged"):
        parts.restore(target, 0)


# --- a run of parts is read like any other ---


def test_parts_give_the_history_of_the_run(where: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        taken_by(open_writer(where, rank=rank, about={"model": "tiny"}), samples(150))
    written(tmp_path / "local-run", samples(150))
    with attemper.open(where) as run, attemper.open(tmp_path / "local-run") as expected:
        assert run.name == "run"
        assert run.about["model"] == "tiny"
        np.testing.assert_array_equal(run.history("entropy").values, expected.history("entropy").values)
        assert run.at(149).reading.sites == expected.at(149).reading.sites
        assert not run.live
        assert "written by several ranks" in run.remarks[0]
    if "://" not in where:
        assert is_run(Path(where))
        delete_run(Path(where))
        assert not Path(where).exists()


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
    published(tmp_path, [1], range(30))
    run = attemper.open(tmp_path)
    assert [reader.rank for reader in run.ranks.readers] == [0, 1]
    assert len(run) == 30


@pytest.mark.parametrize(("many", "read"), [(30, "parts are read"), (10, "file is read"), (20, "file is read")])
def test_of_a_rank_with_a_file_and_parts_what_goes_further_is_read_and_that_is_said(tmp_path, many, read) -> None:
    written(tmp_path, samples(20))
    published(tmp_path, [0], [1000.0 + step for step in range(many)])
    run = attemper.open(tmp_path)
    assert len(run) == max(many, 20)
    (remark,) = run.remarks
    assert remark.startswith("rank 0 has a file of 20 samples up to step 19 and Parquet parts of")
    assert remark.endswith(f"{many} samples up to step {many - 1}: the {read}")


def test_a_damaged_file_beside_parts_and_damaged_parts_beside_a_file_are_said(tmp_path: Path) -> None:
    (tmp_path / "fragment-0.sqlite").write_bytes(b"garbage" * 1000)
    published(tmp_path, [0], range(5))
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
    published(tmp_path, [0], [now - age for age in ages])
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
    published(tmp_path, [0], [0.0])
    (part,) = tmp_path.glob("*.parquet")
    part.write_bytes(b"garbage")
    with pytest.raises(InputError, match="may be written to"):
        delete_run(tmp_path)
    os.utime(part, (0, 0))
    delete_run(tmp_path)


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published(tmp_path, [0], range(2))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"attemper\[parquet\]"):
        attemper.open(tmp_path)


def test_a_url_without_a_run_is_told_so() -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(InputError, match="there is no run at memory://nowhere/run"):
        attemper.open("memory://nowhere/run")
