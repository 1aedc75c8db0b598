"""What a writer has judged is kept in its file: a reader goes on from there, and shows what it would have computed."""

from __future__ import annotations

import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attemper
from attemper.errors import InputError
from attemper.readings import judge
from attemper.readings.limits import AlarmLimits
from attemper.readings.run_judge import RunJudge
from attemper.readings.sample import Sample, Samples
from attemper.store import verdict, writer
from attemper.store.checksum import checksum
from attemper.store.fragment import Fragment
from attemper.store.verdict import Keeper
from attemper.store.writer import open_writer
from tests.support.runs import collapsing, restless, with_gaps

FILE = "fragment-0.sqlite"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs are judged as long ones are."""
    monkeypatch.setattr(verdict, "FEWEST_KEPT", 64)
    monkeypatch.setattr(verdict, "TOGETHER", 128)
    monkeypatch.setattr(writer, "JUDGE_SECONDS", 60.0)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each block that a judge of runs is given, how many samples it has."""
    found: list[int] = []
    feed_all = RunJudge.feed_all

    def count(self: RunJudge, blocks: Iterable[Samples]) -> None:
        def each() -> Iterator[Samples]:
            for one in blocks:
                found.append(len(one.steps))
                yield one

        feed_all(self, each())

    monkeypatch.setattr(RunJudge, "feed_all", count)
    return found


def session(folder: Path, taken: Iterable[Sample], *, killed: bool = False, rank: int = 0, **options: Any) -> None:
    """What one process writes, and judges as it goes."""
    folder.mkdir(exist_ok=True)
    fragment = Fragment(folder / f"fragment-{rank}.sqlite", rank=rank, **options)
    keeper = Keeper(fragment)
    for one in taken:
        fragment.append(one)
        if fragment.fold():
            keeper.follow(time.monotonic() + 60)
    if not killed:
        keeper.follow(time.monotonic() + 60, end=True)
    fragment.close()


def told(folder: Path, limits: AlarmLimits | None = None) -> dict[str, Any]:
    """All that a judge says of a run, as text: NaN is no number's equal."""
    with attemper.open(folder) as run:
        steps = [int(run.steps[len(run) * place // 4]) for place in (1, 3)]
        one = run.judge
        return {
            "alarms": list(map(str, run.alarms(limits))),
            "standing": str(one.standing),
            "state": (one.step, one.untrained, one.held_back, one.notes),
            "steps": [str(run.at(step).alarms) for step in (*steps, run.steps[-1])],
        }


def kept(folder: Path) -> list[int]:
    """How many samples were judged, of each verdict in a file."""
    with closing(sqlite3.connect(folder / FILE)) as connection:
        return [many for (many,) in connection.execute("SELECT samples FROM verdict ORDER BY samples")]


def computed(folder: Path, limits: AlarmLimits | None = None) -> dict[str, Any]:
    """As ``told``, of a copy without any verdict."""
    copy = folder.with_name(f"{folder.name} without")
    shutil.copytree(folder, copy)
    for path in copy.glob("*.sqlite"):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DELETE FROM verdict")
    found = told(copy, limits)
    shutil.rmtree(copy)
    return found


def in_turns(taken: Sequence[Sample]) -> Iterator[Sample]:
    """Evaluations between steps of training, and some steps with two passes."""
    for place, one in enumerate(taken):
        yield one
        if place % 5 == 0:
            yield replace(one, sites=tuple(replace(site, mode="eval") for site in one.sites))
        if place % 7 == 0:
            yield one


def sessions(seed: int) -> dict[str, list[tuple[list[Sample], bool]]]:
    """Name -> what processes wrote one after another, and whether each was killed."""
    taken = list(restless(600, seed))
    gaps = list(with_gaps(taken, seed))
    back = [*gaps[:300], *gaps[240:420], *gaps[400:]]
    return {
        "whole": [(taken, False)],
        "with gaps": [(gaps, False)],
        "collapsing": [(list(collapsing(500)), False)],
        "short": [(gaps[:60], False)],
        "interrupted": [(gaps[:571], True)],
        "continued": [(gaps[:150], False), (gaps[150:430], True), (gaps[430:], False)],
        "went back": [(gaps[:200], False), (gaps[150:390], False), (gaps[350:], True)],
        "went back to the beginning": [(gaps[:300], False), (gaps[:260], False)],
        "went back in one process": [(back, False)],
        "turns": [(list(in_turns(taken[:400])), False), (list(in_turns(taken[390:])), False)],
    }


@pytest.mark.parametrize("kind", sessions(0))
@pytest.mark.quick("whole", "went back")
def test_what_was_kept_is_what_would_be_computed(tmp_path: Path, fed: list[int], kind: str) -> None:
    folder = tmp_path / "a"
    for taken, killed in sessions(sum(map(ord, kind)))[kind]:
        session(folder, taken, killed=killed)
        fed.clear()
        found, anew = told(folder), sum(fed)
        assert found == computed(folder)
        if kept(folder):
            assert anew < sum(fed) - anew
    assert bool(kept(folder)) == (kind != "short")
    assert len(kept(folder)) <= 2


def test_a_run_that_was_judged_to_its_end_is_not_judged_again(tmp_path: Path, fed: list[int]) -> None:
    session(tmp_path / "a", restless(333, 1))
    fed.clear()
    with attemper.open(tmp_path / "a") as run:
        assert len(run.alarms()) > 100
        assert run.alarms(run.judge.limits) == run.alarms()
    assert not fed


def test_of_a_run_that_was_killed_a_reader_judges_what_came_after_what_was_kept(tmp_path: Path, fed: list[int]) -> None:
    session(tmp_path / "a", restless(900, 1), killed=True)
    fed.clear()
    with attemper.open(tmp_path / "a") as run:
        assert run.alarms()
    assert sum(fed) == 900 - kept(tmp_path / "a")[-1] == 900 - 896


def test_a_process_that_goes_on_judges_only_what_is_new(tmp_path: Path, fed: list[int]) -> None:
    taken = list(restless(900, 2))
    session(tmp_path / "a", taken[:700])
    fed.clear()
    session(tmp_path / "a", taken[700:])
    assert sum(fed) == 200
    assert kept(tmp_path / "a") == [828, 900]


def test_one_that_goes_back_a_little_goes_on_from_what_was_kept_before(tmp_path: Path, fed: list[int]) -> None:
    taken = list(restless(900, 3))
    session(tmp_path / "a", taken[:790])
    assert kept(tmp_path / "a") == [768, 790]
    fed.clear()
    session(tmp_path / "a", taken[780:])
    assert sum(fed) == 900 - 768
    assert kept(tmp_path / "a")[-1] == 900
    assert told(tmp_path / "a") == computed(tmp_path / "a")


def test_limits_of_the_watch_are_kept_and_others_are_computed(tmp_path: Path, fed: list[int]) -> None:
    watched = AlarmLimits(logits=5.0, drift=None, sites={"layers.1.*": {"layer_fallen": None, "falling": 0.01}})
    others = AlarmLimits(logits=6.0), AlarmLimits(sites={"layers.1.*": {"logits": 5.0}}), AlarmLimits()
    run = open_writer(tmp_path / "a", about={"limits": watched.to_dict(), "fewest_keys": 8})
    for one in restless(400, 4):
        run.take(one)
    run.close()
    assert kept(tmp_path / "a")[-1] == 400
    fed.clear()
    with attemper.open(tmp_path / "a") as found:
        assert found.alarms(watched) == found.alarms()
    assert not fed
    assert told(tmp_path / "a") == computed(tmp_path / "a")
    for limits in others:
        fed.clear()
        assert told(tmp_path / "a", limits)["alarms"] != told(tmp_path / "a")["alarms"]
        assert sum(fed) >= 400
        assert told(tmp_path / "a", limits) == computed(tmp_path / "a", limits)


@pytest.mark.parametrize("what", ["version", "kinds", "limits", "fewest keys"])
def test_a_verdict_by_other_laws_is_not_taken_and_the_next_writer_replaces_it(
    tmp_path: Path, fed: list[int], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder, taken = tmp_path / "a", list(restless(700, 5))
    session(folder, taken[:400])
    before = kept(folder)
    match what:
        case "version":
            monkeypatch.setattr(judge, "VERSION", judge.VERSION + 1)
        case "kinds":
            changed = [replace(one, least_rows=9) if one.name == "falling" else one for one in judge.ALARMS]
            monkeypatch.setattr(judge, "ALARMS", tuple(changed))
        case _:
            fragment = Fragment(folder / FILE)
            fragment.describe({"limits": {"logits": 7.0}} if what == "limits" else {"fewest_keys": 9})
            fragment.close()
    fed.clear()
    with attemper.open(folder) as run:
        run.alarms()
    assert sum(fed) == 400
    assert kept(folder) == before
    session(folder, taken[400:])
    assert kept(folder)[-1] == 700
    fed.clear()
    assert told(folder)["alarms"] == computed(folder)["alarms"]
    with closing(sqlite3.connect(folder / FILE)) as connection:
        assert connection.execute("SELECT count(DISTINCT laws) FROM verdict").fetchone() == (1,)


def test_texts_are_those_of_the_version_that_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session(tmp_path / "a", restless(300, 6))
    before = attemper.open(tmp_path / "a").alarms()
    for one in judge.ALARMS:
        monkeypatch.setitem(vars(one), "advice", "Another one.")
    after = attemper.open(tmp_path / "a").alarms()
    assert {alarm.advice for alarm in after} == {"Another one."}
    assert [alarm.message for alarm in after] == [alarm.message for alarm in before]


def test_several_ranks_are_judged_as_one_model_whatever_each_of_them_kept(tmp_path: Path) -> None:
    def of_site(place: int) -> Iterator[Sample]:
        for one in restless(300, 7):
            label = one.sites[place]
            yield Sample(one.step, one.time, (label,), one.quantities, one.values[:, one.places[label.key]])

    session(tmp_path / "a", restless(300, 7))
    for rank in (0, 1):
        session(tmp_path / "b", of_site(rank), rank=rank)
    assert kept(tmp_path / "b")
    assert told(tmp_path / "b") == computed(tmp_path / "b")
    assert told(tmp_path / "b")["alarms"] == told(tmp_path / "a")["alarms"]


def test_a_run_that_was_thinned_has_no_verdict_also_where_it_goes_on(tmp_path: Path, fed: list[int]) -> None:
    folder, taken = tmp_path / "a", list(restless(1500, 8))
    session(folder, taken[:300])
    assert kept(folder)
    session(folder, taken[300:1200], max_bytes=100_000)
    assert attemper.open(folder).remarks
    assert not kept(folder)
    fed.clear()
    session(folder, taken[1200:])
    assert not fed
    assert not kept(folder)
    assert told(folder) == computed(folder)


def test_counts_beyond_float32_and_all_bits_are_judged_as_they_are_read(tmp_path: Path) -> None:
    def large() -> Iterator[Sample]:
        for one in restless(300, 9):
            values = one.values.astype(np.float64)
            values[one.quantities.index("rows")] = 2.0**24 + 1 + one.step
            yield replace(one, values=values)

    session(tmp_path / "a", large(), bits=None)
    assert kept(tmp_path / "a")
    assert told(tmp_path / "a") == computed(tmp_path / "a")


def test_a_reader_goes_on_from_what_was_kept_while_the_run_is_written(tmp_path: Path, fed: list[int]) -> None:
    taken = restless(700, 10)
    fragment = Fragment(tmp_path / FILE)
    keeper, readers = Keeper(fragment), []
    for many in (300, 50, 200, 149):
        for one in islice(taken, many):
            fragment.append(one)
            if fragment.fold():
                keeper.follow(time.monotonic() + 60)
        readers.append(attemper.open(tmp_path))
        for run in readers:
            fed.clear()
            assert list(map(str, run.alarms())) == list(map(str, readers[-1].alarms()))
        assert not kept(tmp_path) or sum(fed) < 300
    fragment.close()


def test_a_reader_writes_nothing(tmp_path: Path) -> None:
    session(tmp_path / "a", restless(300, 11), killed=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    told(tmp_path / "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_file_of_the_version_before_is_read_and_judged_by_its_next_writer(tmp_path: Path, fed: list[int]) -> None:
    folder, taken = tmp_path / "a", list(restless(900, 12))
    session(folder, taken[:600])
    expected = told(folder)
    with closing(sqlite3.connect(folder / FILE)) as connection:
        connection.executescript("DROP TABLE verdict; PRAGMA user_version = 3")
    before = (folder / FILE).read_bytes()
    assert told(folder) == expected
    assert (folder / FILE).read_bytes() == before
    fed.clear()
    session(folder, taken[600:])
    assert sum(fed) == 900
    assert kept(folder)[-1] == 900
    assert told(folder) == computed(folder)


def test_what_cannot_be_judged_at_once_is_judged_little_by_little(tmp_path: Path, fed: list[int]) -> None:
    folder, taken = tmp_path / "a", list(restless(1200, 13))
    session(folder, taken[:600])
    with closing(sqlite3.connect(folder / FILE)) as connection, connection:
        connection.execute("DELETE FROM verdict")
    fragment = Fragment(folder / FILE)
    keeper = Keeper(fragment)
    fed.clear()
    for one in taken[600:1000]:
        fragment.append(one)
        if fragment.fold():
            keeper.follow(0.0)
    assert fed == [128] * 3
    keeper.follow(0.0, end=True)
    fragment.close()
    assert kept(folder)[-1] == 512
    assert told(folder) == computed(folder)


# --- damage ---


@pytest.mark.parametrize("change", ["samples = samples - 1", "judged = judged + 1", "numbers = x'00'", "crc = crc + 1"])
def test_a_verdict_that_was_damaged_is_an_error(tmp_path: Path, change: str) -> None:
    session(tmp_path / "a", restless(300, 14))
    with closing(sqlite3.connect(tmp_path / "a" / FILE)) as connection, connection:
        connection.execute(f"UPDATE verdict SET {change}")
    with attemper.open(tmp_path / "a") as run, pytest.raises(InputError, match="its file is damaged"):
        run.alarms()


WRONG: dict[str, Callable[[RunJudge], bytes]] = {
    "nothing": lambda _: b"",
    "no numbers": lambda _: b"\x00" * 100,
    "cut off": lambda one: one.to_bytes()[:-5],
    "of other heads": lambda _: RunJudge().to_bytes(),
    "far too much": lambda one: zlib.compress(zlib.decompress(one.to_bytes()) + bytes(1 << 28)),
    "steps that are none": lambda one: zlib.compress(
        np.full_like(np.frombuffer(zlib.decompress(one.to_bytes()), np.uint8), 0xFF).tobytes()
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_numbers_that_are_none_are_not_taken_though_their_checksum_fits(
    tmp_path: Path, fed: list[int], what: str
) -> None:
    session(tmp_path / "a", restless(300, 15))
    expected = computed(tmp_path / "a")
    with attemper.open(tmp_path / "a") as run:
        assert isinstance(run.judge, RunJudge)
        wrong = WRONG[what](run.judge)
    with closing(sqlite3.connect(tmp_path / "a" / FILE)) as connection, connection:
        for *row, _, _ in connection.execute("SELECT * FROM verdict").fetchall():
            new = (*row, wrong)
            connection.execute(
                "UPDATE verdict SET numbers = ?, crc = ? WHERE samples = ?", (wrong, checksum("verdict", new), row[1])
            )
    fed.clear()
    assert told(tmp_path / "a") == expected
    assert sum(fed) >= 300


# --- the writer ---


@pytest.mark.parametrize("wrong", [InputError("no"), ZeroDivisionError(), sqlite3.OperationalError("disk is full")])
def test_what_goes_wrong_while_a_run_is_judged_loses_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Exception
) -> None:
    def fail(*_: object) -> None:
        raise wrong

    monkeypatch.setattr(RunJudge, "feed_all", fail)
    run = open_writer(tmp_path / "a")
    for one in restless(300, 18):
        run.take(one)
    run.close()
    monkeypatch.undo()
    assert (run.written, run.dropped) == (300, 0)
    assert not kept(tmp_path / "a")
    assert told(tmp_path / "a") == computed(tmp_path / "a")


def test_a_writer_in_memory_judges_nothing(fed: list[int]) -> None:
    run = open_writer(None)
    for one in restless(300, 19):
        run.take(one)
    run.close()
    assert not fed
