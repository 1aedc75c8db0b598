"""A run as Parquet parts: what is in a part, when it is published, and a run that is put together again."""

from __future__ import annotations

import io
import json
import math
import os
import tempfile

import numpy as np
import pytest

from attemper.errors import InputError
from attemper.readings.sample import Sample
from attemper.results.run import open_run
from attemper.store import parts, place
from attemper.store.compaction import round_bits
from attemper.store.parts import FolderTarget, open_target
from attemper.store.scalars import read
from attemper.store.schema import Tables
from attemper.store.series import FragmentReader
from attemper.store.writer import Writer, open_writer
from tests.support.samples import NAMES, assert_same, sample, samples, sites

pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra parquet)")


@pytest.fixture(params=["folder", "url"])
def where(request, tmp_path, monkeypatch):
    """A place that takes no live file."""
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    if request.param == "folder":
        monkeypatch.setattr(place, "kind", lambda folder: "" if "shared" in folder.parts else "ext4")
        return tmp_path / "shared" / "run"
    memory = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")
    memory.MemoryFileSystem.store.clear()
    return "memory://bucket/run"


def named(where) -> list[str]:
    return sorted(parts.parts(open_target(where)))


def write(where, taken, **options) -> Writer:
    run = open_writer(where, **options)
    for one in taken:
        run.take(one)
        run.flush(10)
    return run


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
    for one in taken[150:]:
        again.take(one)
    again.close()
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
    second.take(sample(5))
    second.close()
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


def test_other_files_are_no_parts(tmp_path):
    for name in ("fragment-0.sqlite", "fragment-0-1-1.parquet", "a.parquet", "fragment-0.token"):
        (tmp_path / name).touch()
    assert parts.parts(open_target(tmp_path)) == {}
    assert sorted(os.listdir(tmp_path))


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
    with open_run(where) as found:
        assert found.history("loss").values[-1] == 9.0


def test_a_damaged_part_of_numbers_is_told(tmp_path):
    target = FolderTarget(tmp_path)
    target.write("fragment-0-0000000000000001-000000000.scalars", b"nothing")
    with pytest.raises(InputError, match="is not part of a run, or is damaged"):
        parts.restore(target, 0)
