"""Numbers of every step in a fragment's file: few bytes, thinned with age, told when they are damaged."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attemper.errors import InputError
from attemper.report.texts import Message, note
from attemper.store import scalars, series
from attemper.store.folder import open_stored
from attemper.store.fragment import Fragment
from attemper.store.ranks import Ranks
from attemper.store.run import StoredRun
from attemper.store.scalars import BLOCK, Series, as_float32, by_step, pack, read, unpack
from attemper.store.series import FragmentReader
from tests.support.runs import change


def losses(many: int) -> np.ndarray:
    drawn = np.random.default_rng(0).normal(2.0, 0.1, many).astype(np.float32)
    drawn[many // 3], drawn[many // 2] = 50.0, np.nan
    return drawn


def written(path: Path | None, many: int, at_once: int = 100, **options) -> Fragment:
    fragment = Fragment(path, **options)
    found = losses(many).tolist()
    for first in range(0, many, at_once):
        fragment.keep_scalars([(step, {"loss": found[step]}) for step in range(first, min(many, first + at_once))])
    return fragment


def loss_of(fragment: Fragment) -> Series:
    return read(fragment.tables().rows)["loss"]


@pytest.mark.parametrize("many", [1, BLOCK, 3 * BLOCK + 7])
def test_every_number_is_read_back_bit_for_bit(tmp_path, many):
    found = loss_of(written(tmp_path / "fragment-0.sqlite", many))
    assert np.array_equal(found.steps, np.arange(many))
    assert np.array_equal(found.values, losses(many), equal_nan=True)


@pytest.mark.parametrize("value", [0.1, 1e300, -1e300, 3.5e38, math.inf, 1e-50, 2.0])
def test_what_is_judged_is_what_is_kept(value):
    fragment = Fragment(None)
    fragment.keep_scalars([(0, {"loss": value})])
    assert loss_of(fragment).values.tolist() == [as_float32(value)]
    assert math.isnan(as_float32(math.nan))


def test_a_number_takes_few_bytes(tmp_path):
    path = tmp_path / "fragment-0.sqlite"
    written(path, 20_000, at_once=1000).close()
    empty = tmp_path / "fragment-1.sqlite"
    Fragment(empty).close()
    assert path.stat().st_size - empty.stat().st_size < 5 * 20_000


def test_old_numbers_are_thinned_and_no_spike_is_lost():
    many = 120_000
    fragment = written(None, many, at_once=4000, max_bytes=1 << 18)
    found = loss_of(fragment)
    assert fragment.bytes_used < 1 << 18
    assert len(found.steps) < 0.6 * many
    assert np.array_equal(found.steps[-BLOCK:], np.arange(many - BLOCK, many))
    assert 50.0 in found.values
    assert np.isnan(found.values).any()
    kept = dict(zip(found.steps.tolist(), found.values.tolist(), strict=True))
    whole = losses(many)
    assert all(value == whole[step] or math.isnan(value) for step, value in kept.items())
    with StoredRun(Ranks([FragmentReader(fragment.tables())])) as run:
        (said,) = run.remarks
        step = int(re.sub(r"numbers per step are thinned up to step ([\d,]+): .*", r"\1", said).replace(",", ""))
        assert found.steps[-1] > step in found.steps
        assert isinstance(note(said), Message)
    old = np.diff(found.steps[: len(found.steps) // 4])
    assert old.max() > np.diff(found.steps[-3 * BLOCK :]).max()


def test_what_waits_for_a_file_goes_into_it_as_it_was():
    fragment = Fragment(None)
    fragment.keep_scalars([(0, {"loss": 1.0, "lr": 0.5}), (1, {"loss": 2.0}), (1, {"loss": 3.0})])
    assert by_step(read(fragment.tables().rows)) == [(0, {"loss": 1.0, "lr": 0.5}), (1, {"loss": 3.0})]


def test_a_transaction_that_fails_leaves_what_was_there(monkeypatch):
    fragment = written(None, 10)
    with monkeypatch.context() as patched:
        patched.setattr(scalars, "put", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fragment.keep_scalars([(10, {"loss": 1.0})])
    fragment.keep_scalars([(10, {"loss": 4.0})])
    assert loss_of(fragment).values[-2:].tolist() == [losses(10)[-1], 4.0]


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE scalar SET numbers = x'00'",
        "UPDATE scalar SET name = 'los'",
        "UPDATE scalar SET since = 5",
    ],
)
def test_a_damaged_row_is_told(tmp_path, statement):
    path = tmp_path / "fragment-0.sqlite"
    written(path, 10).close()
    change(path, statement)
    with open_stored(str(tmp_path), StoredRun) as run, pytest.raises(InputError, match="table scalar does not fit"):
        run.history("loss")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zlib",
        pack(Series(np.array([3, 3]), np.zeros(2, np.float32))),
        pack(Series(np.arange(9), np.zeros(9)))[:-3],
    ],
)
def test_a_damaged_block_is_told(data):
    with pytest.raises(InputError, match="a block of its scalars"):
        unpack(data)


def test_numbers_are_read_again_only_where_there_are_others(tmp_path, monkeypatch):
    calls: list[int] = []
    monkeypatch.setattr(series, "read", lambda ask: calls.append(1) or read(ask))
    fragment = written(tmp_path / "fragment-0.sqlite", 10)
    with open_stored(str(tmp_path), StoredRun) as run:
        for _ in range(3):
            assert len(run.history("loss")) == 10
        assert len(calls) == 1
        fragment.keep_scalars([(10, {"loss": 1.0})])
        assert len(run.history("loss")) == 11
        fragment.keep_scalars([(5, {})])
        assert run.history("loss").steps.tolist() == [*range(6)]
        assert len(calls) == 3
    fragment.close()


def test_a_number_of_several_ranks_is_that_of_the_first(tmp_path):
    for rank, steps in ((0, (0, 2)), (1, (0, 1, 2, 3))):
        fragment = Fragment(tmp_path / f"fragment-{rank}.sqlite", rank=rank)
        fragment.keep_scalars([(step, {"loss": 10.0 * rank + step}) for step in steps])
        fragment.close()
    with open_stored(str(tmp_path), StoredRun) as run:
        assert run.history("loss").steps.tolist() == [0, 1, 2, 3]
        assert run.history("loss").values.tolist() == [0, 11, 2, 13]


def test_a_number_of_the_step_has_no_site(tmp_path):
    written(tmp_path / "fragment-0.sqlite", 10).close()
    with open_stored(str(tmp_path), StoredRun) as run:
        places: list[dict[str, Any]] = [{"site": "a"}, {"head": 0}, {"mode": "train"}]
        for place in places:
            with pytest.raises(InputError, match="'loss' is a number of the whole step: ask for it without site, head"):
                run.history("loss", **place)
        with pytest.raises(InputError, match=r"history\(start="):
            run.history("loss", start=1.5)  # pyright: ignore[reportArgumentType]
