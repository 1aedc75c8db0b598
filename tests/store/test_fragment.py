"""What was appended is read back: hot, folded, over segments, layouts, thinned; sizes; what a failure leaves."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attemper.readings.sample import Sample
from attemper.store import compaction
from attemper.store.compaction import CHUNK, unpack
from attemper.store.fragment import Fragment
from attemper.store.series import FragmentReader
from tests.support.samples import NAMES, assert_same, sample, samples, sites


def written(path: Path | None, taken, **options) -> Fragment:
    return written_on(Fragment(path, **options), taken)


def written_on(fragment: Fragment, taken) -> Fragment:
    for one in taken:
        fragment.append(one)
        fragment.fold()
    return fragment


def assert_holds(fragment: Fragment, taken: list[Sample], bits: int | None = 15, first: int = 0) -> None:
    """Whether its samples from ``first`` on are these, with so many bits."""
    found = FragmentReader(fragment.tables()).replay(first, first + len(taken) - 1)
    assert list(found) == list(range(first, first + len(taken)))
    assert_same(found.values(), taken, bits)


@pytest.mark.parametrize(
    ("many", "bits"), [(1, 15), (CHUNK - 1, None), (CHUNK, 8), (CHUNK + 1, 23), (2 * CHUNK + 7, 15), (CHUNK + 9, None)]
)
def test_every_number_is_read_back_with_its_bits_and_counts_with_all(tmp_path, many, bits):
    taken = list(samples(many))
    fragment = written(tmp_path / "f.sqlite", taken, bits=bits)
    assert_holds(fragment, taken, bits)
    (hot,) = fragment.connection.execute("SELECT count(*) FROM hot").fetchone()
    assert hot == many % CHUNK
    fragment.close()


def test_steps_times_tokens_labels_and_units_are_kept(tmp_path):
    fragment = written(tmp_path / "f.sqlite", [sample(7), sample(9)], rank=3, versions={"attemper": "1"})
    rows = fragment.tables().rows
    assert rows("SELECT id, step, time, tokens FROM sample") == [(0, 7, 1007.0, 64), (1, 9, 1009.0, 64)]
    assert rows("SELECT name, kind, mode, layer, attention, normalizer, heads FROM site") == [
        ("layers.0.attn", "self", "train", 0, "full", "softmax", 3),
        ("layers.1.attn", "self", "train", 1, "full", "softmax", 3),
    ]
    assert rows("SELECT name, unit, exact FROM statistic")[::3] == [
        ("entropy_nats", "nats", 0),
        ("nonfinite_rows", "rows", 1),
    ]
    assert rows("SELECT first_sample, first_step, rank, versions FROM segment") == [(0, 7, 3, '{"attemper": "1"}')]
    fragment.close()


def test_a_summary_of_each_site_answers_plain_sql(tmp_path):
    one = sample(5)
    numbers = one.values.copy()
    numbers[1, 0], numbers[2, 3:] = np.nan, np.nan
    taken = [replace(one, values=numbers), sample(6, names=("entropy_nats",))]
    fragment = written(tmp_path / "f.sqlite", taken, bits=None)
    columns = "normalized_entropy, least_normalized_entropy, max_logit, nonfinite_rows"
    asked = f"SELECT {columns} FROM summary JOIN sample ON sample.id = sample WHERE step = ? ORDER BY site"
    first, second = fragment.tables().rows(asked, (5,))
    assert first[:3] == pytest.approx((numbers[1, 1:3].mean(), numbers[1, 1:3].min(), numbers[2, :3].max()))
    assert first[3] == int(numbers[3, :3].astype(np.float64).sum())
    assert second[2] is None
    assert fragment.tables().rows(asked, (6,)) == [(None,) * 4] * 2
    fragment.close()


def test_a_site_with_another_label_is_another_row(tmp_path):
    taken = [sample(0), sample(1, sites(heads=4))]
    fragment = written(tmp_path / "f.sqlite", taken)
    assert fragment.tables().rows("SELECT heads FROM site") == [(3,), (3,), (4,), (4,)]
    assert fragment.tables().rows("SELECT count(*) FROM layout") == [(2,)]
    fragment.close()


# --- segments ---


def test_a_resumed_run_goes_on_in_a_new_segment_and_folds_across(tmp_path):
    taken = list(samples(CHUNK + 50, every=10))
    written(tmp_path / "f.sqlite", taken[:100]).close()
    second = written(tmp_path / "f.sqlite", ())
    assert second.last_step == 990
    written_on(second, taken[100:])
    assert_holds(second, taken)
    rows = second.tables().rows
    assert rows("SELECT first_sample, first_step FROM segment") == [(0, 0), (100, 1000)]
    assert rows("SELECT (SELECT count(*) FROM site), count(*) FROM layout") == [(2, 1)]
    second.close()


def test_what_a_killed_process_left_hot_is_folded_by_the_next(tmp_path):
    taken = list(samples(2 * CHUNK + 3))
    first = Fragment(tmp_path / "f.sqlite")
    for one in taken:
        first.append(one)  # and never fold
    first.connection.close()
    second = Fragment(tmp_path / "f.sqlite")
    assert second.tables().rows("SELECT count(*) FROM chunk") == [(2,)]
    assert_holds(second, taken)
    second.close()


# --- the pyramid ---


def pyramid_of(fragment: Fragment, level: int, statistic: str, site: int) -> dict[int, np.ndarray]:
    """First sample of a block -> [4, heads]."""
    rows = fragment.connection.execute(
        "SELECT first, numbers, heads FROM pyramid JOIN statistic ON statistic.id = statistic "
        "JOIN site ON site.id = site WHERE level = ? AND statistic.name = ? AND site = ?",
        (level, statistic, site),
    )
    return {
        first + (place << level): block
        for first, data, heads in rows
        for place, block in enumerate(unpack(data).reshape(-1, 4, heads))
    }


@pytest.mark.parametrize("chunks", [10, pytest.param(36, marks=pytest.mark.slow("takes many seconds"))])
def test_every_level_of_the_pyramid_has_the_blocks_of_its_samples(chunks):
    many = chunks * CHUNK
    fragment = written(None, samples(many))
    taken = np.stack([one.values for one in samples(many)])
    for level in (5, 7, 9)[: 3 if chunks > 32 else 2]:
        found = pyramid_of(fragment, level, "max_logit", 2)
        complete = many if level == 5 else many - many % compaction.row_span(level - compaction.LEVEL_STEP)
        assert list(found) == list(range(0, complete, 1 << level))
        expected = compaction.blocks_of(taken[:complete, 2, 3:].reshape(-1, 1 << level, 3))
        np.testing.assert_allclose(np.stack(list(found.values())), expected, rtol=3e-3)
    fragment.close()


# --- room ---


def test_a_run_is_thinned_with_age_and_says_so(tmp_path, caplog):
    many, most = 24 * CHUNK, 330_000
    with caplog.at_level("INFO"):
        fragment = written(tmp_path / "f.sqlite", samples(many), max_bytes=most)
    assert fragment.thinned
    (record,) = caplog.records
    assert "f.sqlite has reached max_bytes, 0.3 MB: its oldest samples are thinned" in record.message
    assert fragment.bytes_used < most
    tables = fragment.tables()
    steps = np.array([row[0] for row in tables.rows("SELECT step FROM sample ORDER BY id")])
    assert steps[0] == 0
    assert (np.diff(steps)[-CHUNK:] == 1).all()
    spacing = np.diff(steps)
    assert (np.diff(spacing) <= 0).all()  # the older, the fewer
    ((told,),) = tables.rows("SELECT value FROM about WHERE name = 'thinned'")
    assert json.loads(told)["largest_spacing"] == spacing.max() > 4
    assert tables.rows("SELECT count(DISTINCT sample) FROM summary") == [(len(steps),)]
    left = FragmentReader(tables).replay(0, many)
    assert list(left) == steps.tolist()
    assert_same(left.values(), [sample(step) for step in left])
    fragment.close()
    assert (tmp_path / "f.sqlite").stat().st_size < most


@pytest.mark.slow("takes many seconds")
def test_evaluations_between_are_thinned_like_the_others():
    evaluation = sites(1, 2, "eval")
    taken = [sample(step, evaluation if step % 4 == 3 else None) for step in range(16 * CHUNK)]
    fragment = written(None, taken, max_bytes=200_000)
    assert fragment.thinned
    kept = dict(fragment.connection.execute("SELECT layout, count(*) FROM sample GROUP BY layout"))
    assert 0.2 < kept[2] / sum(kept.values()) < 0.3
    fragment.close()


@pytest.mark.slow("takes many seconds")
def test_what_went_stays_in_the_pyramid_until_its_blocks_are_shorter_than_the_gaps():
    many = 160 * CHUNK
    fragment = written(None, samples(many, labels=sites(1, 1)), max_bytes=120_000)
    taken = np.stack([one.values for one in samples(many, labels=sites(1, 1))])
    spans = dict(fragment.connection.execute("SELECT first, span FROM chunk"))
    coarsest = {first: span // CHUNK for first, span in spans.items()}
    assert max(coarsest.values()) >= 64
    for level in (5, 7, 9):
        for first, block in pyramid_of(fragment, level, "max_logit", 1).items():
            expected = compaction.blocks_of(taken[None, first : first + (1 << level), 2])[0]
            np.testing.assert_allclose(block, expected, rtol=3e-3)
    thinnest = [first for first, spacing in coarsest.items() if spacing >= 64]
    fine = pyramid_of(fragment, 5, "max_logit", 1)
    assert all(not (first <= block < first + spans[first]) for first in thinnest for block in fine)
    coarse = pyramid_of(fragment, 7, "max_logit", 1)
    assert all(
        block in coarse
        for first in thinnest
        if coarsest[first] < 128
        for block in range(first, first + spans[first], 128)
    )
    fragment.close()


def test_a_closed_file_is_one_file_without_free_room(tmp_path):
    fragment = written(tmp_path / "f.sqlite", samples(3 * CHUNK, labels=sites(8, 16)))
    fragment.close()
    assert [path.name for path in tmp_path.iterdir()] == ["f.sqlite"]
    connection = sqlite3.connect(tmp_path / "f.sqlite")
    assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


# --- what is told of the run ---


def test_what_is_told_of_a_run_has_no_folders_of_the_machine(tmp_path):
    fragment = Fragment(tmp_path / "f.sqlite")
    fragment.describe(
        {
            "model": "/home/ada/models/tiny",
            "configuration": {"_name_or_path": "C:\\models\\tiny", "rope": {"factor": 2.0}, "kinds": ["a/b", "~/c"]},
            "limit": float("nan"),
            "dtype": np.dtype("float32"),
            "odd": "\ud800",
        }
    )
    fragment.describe({"name": "one"})
    fragment.describe({"name": "two"})
    rows = {name: json.loads(value) for name, value in fragment.tables().rows("SELECT * FROM about")}
    assert rows == {
        "model": "tiny",
        "configuration": {"_name_or_path": "tiny", "rope": {"factor": 2.0}, "kinds": ["a/b", "c"]},
        "limit": "nan",
        "dtype": "float32",
        "odd": "?",
        "name": "two",
    }
    fragment.close()


# --- failures ---


@pytest.mark.parametrize("table", ["hot", "summary", "layout", "site"])
def test_a_sample_that_fails_half_way_leaves_nothing_and_the_next_is_kept(tmp_path, table):
    fragment = Fragment(tmp_path / "f.sqlite")
    fragment.connection.execute(
        f"CREATE TEMP TRIGGER full BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    )
    with pytest.raises(sqlite3.Error, match="disk full"):
        fragment.append(sample(0))
    assert fragment.last_step is None
    for name in ("sample", "hot", "summary", "layout", "site", "statistic"):
        assert fragment.tables().rows(f"SELECT count(*) FROM {name}") == [(0,)]
    fragment.connection.execute("DROP TRIGGER full")
    taken = list(samples(5))
    assert_holds(written_on(fragment, taken), taken)
    fragment.close()


def test_a_fold_that_fails_leaves_samples_hot_and_the_next_folds_them(tmp_path):
    fragment = Fragment(tmp_path / "f.sqlite")
    fragment.connection.execute(
        "CREATE TEMP TRIGGER full BEFORE INSERT ON pyramid BEGIN SELECT RAISE(ABORT, 'disk full'); END"
    )
    taken = list(samples(2 * CHUNK))
    for one in taken[:CHUNK]:
        fragment.append(one)
    with pytest.raises(sqlite3.Error, match="disk full"):
        fragment.fold()
    assert_holds(fragment, taken[:CHUNK])
    fragment.connection.execute("DROP TRIGGER full")
    for one in taken[CHUNK:]:
        fragment.append(one)
    assert fragment.fold()
    assert fragment.tables().rows("SELECT count(*) FROM chunk") == [(2,)]
    assert_holds(fragment, taken)
    fragment.close()


def test_samples_between_two_numbers_are_those_that_were_taken():
    evaluation = sites(1, 2, "eval")
    taken = [sample(step, evaluation if step % 5 == 2 else None, NAMES[: 3 + step % 2]) for step in range(3 * CHUNK)]
    fragment = written(None, taken[: 2 * CHUNK], bits=None)
    for one in taken[2 * CHUNK :]:
        fragment.append(one)
    for first, last in ((0, 3 * CHUNK - 1), (100, 140), (128, 255), (300, 300)):
        assert_holds(fragment, taken[first : last + 1], None, first)
