"""A run as a table, and as a copy of itself, has the numbers of its history."""

from __future__ import annotations

import csv
import importlib.util
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attemper.errors import InputError
from attemper.results.run import open_run
from attemper.store import export
from attemper.store.fragment import Fragment
from tests.support.runs import written
from tests.support.samples import sample, samples, sites


def test_a_frame_has_a_row_for_each_step_and_head(tmp_path: Path) -> None:
    both = (*sites(1), replace(sites(2)[1], layer=None, heads=2, mode="eval"))
    written(tmp_path / "a", (sample(step, both[: 1 + step % 2]) for step in range(150)))
    run = open_run(tmp_path / "a")
    frame: Any = run.to_pandas()
    assert list(frame.columns) == [*export.PLACE, *run.statistics]
    assert len(frame) == 150 * 3 + 75 * 2
    head = frame[(frame["site"] == "layers.0.attn") & (frame["head"] == 2)]
    np.testing.assert_array_equal(head["step"], run.steps)
    np.testing.assert_array_equal(head["max_logit"], run.history("max_logit", "layers.0.attn", 2).values)
    assert str(frame["nonfinite_rows"].dtype) == "Int64"
    assert frame[frame["mode"] == "eval"]["layer"].isna().all()
    assert (frame[frame["mode"] == "eval"]["step"] % 2 == 1).all()


def test_a_number_of_the_loop_is_a_column_at_the_steps_that_were_sampled(tmp_path: Path) -> None:
    written(tmp_path / "a", samples(20, every=5))
    fragment = Fragment(tmp_path / "a" / "fragment-0.sqlite")
    fragment.keep_scalars([(step, {"loss": step / 2}) for step in range(10, 200)])
    fragment.close()
    run = open_run(tmp_path / "a")
    frame: Any = run.to_pandas()
    assert list(frame.columns) == [*export.PLACE, *run.statistics]
    assert frame.columns[-1] == "loss"
    assert len(frame) == 20 * 6
    assert frame[frame["step"] < 10]["loss"].isna().all()
    later = frame[frame["step"] >= 10]
    np.testing.assert_array_equal(later["loss"], later["step"] / 2)
    assert export.to_csv(run.ranks, tmp_path / "a.csv") == 120
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text("utf-8").splitlines()))
    assert (rows[0]["loss"], rows[-1]["loss"]) == ("", "47.5")
    if importlib.util.find_spec("pyarrow") is not None:
        import pyarrow.parquet

        run.to_parquet(tmp_path / "a.parquet")
        table = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pandas()
        np.testing.assert_array_equal(table["loss"], frame["loss"])


def test_a_run_without_a_sample_is_an_empty_frame(tmp_path: Path) -> None:
    written(tmp_path / "a", ())
    assert list(open_run(tmp_path / "a").to_pandas().columns) == list(export.PLACE)


def test_csv_has_the_same_rows_in_the_fewest_digits_and_whole_counts(tmp_path: Path) -> None:
    written(tmp_path / "a", samples(140))
    run = open_run(tmp_path / "a")
    assert export.to_csv(run.ranks, tmp_path / "a.csv") == 140 * 6
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text("utf-8").splitlines()))
    assert len(rows) == 140 * 6
    head = [row for row in rows if (row["site"], row["head"]) == ("layers.1.attn", "0")]
    found = np.array([np.float32(row["entropy_nats"]) for row in head])
    np.testing.assert_array_equal(found, run.history("entropy", "layers.1.attn", 0).values)
    assert all(row["nonfinite_rows"].isdigit() for row in rows)
    assert (head[0]["layer"], head[0]["kind"], head[0]["mode"]) == ("1", "self", "train")
    written(tmp_path / "b", [sample(1, (replace(sites(1)[0], name="=1+1"),))])
    export.to_csv(open_run(tmp_path / "b").ranks, tmp_path / "b.csv")
    assert {row["site"] for row in csv.DictReader((tmp_path / "b.csv").read_text("utf-8").splitlines())} == {"'=1+1"}


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_parquet_has_the_same_rows(tmp_path: Path) -> None:
    import pyarrow.parquet

    written(tmp_path / "a", samples(140))
    run = open_run(tmp_path / "a")
    table = pyarrow.parquet.read_table(run.to_parquet(tmp_path / "a.parquet"))
    frame = run.to_pandas()
    assert table.column_names == list(frame.columns)
    np.testing.assert_array_equal(table["entropy_nats"].to_numpy(), frame["entropy_nats"])
    assert table["site"].to_pylist() == list(frame["site"])
    assert table["nonfinite_rows"].to_pylist() == list(frame["nonfinite_rows"])


def test_a_copy_of_a_live_run_is_a_run(tmp_path: Path) -> None:
    fragment = Fragment(tmp_path / "fragment-0.sqlite")
    for one in samples(150):
        fragment.append(one)
        fragment.fold()
    run = open_run(tmp_path)
    assert export.to_sqlite(run.ranks, tmp_path / "copy.sqlite") == 1
    fragment.append(sample(150))
    copy = open_run(tmp_path / "copy.sqlite")
    np.testing.assert_array_equal(copy.history("entropy").values, run.history("entropy", stop=150).values)
    with sqlite3.connect(tmp_path / "copy.sqlite") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    fragment.close()


def test_a_copy_of_several_ranks_is_a_folder(tmp_path: Path) -> None:
    for rank in (0, 3):
        written(tmp_path / "a", samples(3, labels=sites(4)[rank : rank + 1]), rank=rank)
    run = open_run(tmp_path / "a")
    assert export.to_sqlite(run.ranks, tmp_path / "b") == 2
    np.testing.assert_array_equal(open_run(tmp_path / "b").history("entropy").values, run.history("entropy").values)


def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    written(tmp_path / "a", samples(3))
    with pytest.raises(InputError, match="cannot be written"):
        export.to_csv(open_run(tmp_path / "a").ranks, tmp_path / "missing" / "a.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("write", [export.to_csv, export.to_sqlite])
def test_no_export_takes_the_place_of_the_file_of_a_run(tmp_path: Path, write: Callable[..., int]) -> None:
    written(tmp_path / "a", samples(3))
    written(tmp_path / "b", samples(5))
    run = open_run(tmp_path / "a")
    (tmp_path / "link.csv").symlink_to(tmp_path / "a" / "fragment-0.sqlite")
    for target in (tmp_path / "a" / "fragment-0.sqlite", tmp_path / "b" / "fragment-0.sqlite", tmp_path / "link.csv"):
        with pytest.raises(InputError, match=r"is a file of a run, and would be lost\. Name another"):
            write(run.ranks, target)
    assert (len(open_run(tmp_path / "a")), len(open_run(tmp_path / "b"))) == (3, 5)
    write(run.ranks, tmp_path / "a" / "copy.sqlite")


def test_a_copy_of_several_ranks_does_not_take_the_place_of_its_own_run(tmp_path: Path) -> None:
    for rank in (0, 1):
        written(tmp_path / "a", samples(3, labels=sites(4)[rank : rank + 1]), rank=rank)
    with pytest.raises(InputError, match="is a file of a run"):
        export.to_sqlite(open_run(tmp_path / "a").ranks, tmp_path / "a")
