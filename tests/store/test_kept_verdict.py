"""What a writer has judged is kept in its file: a reader goes on from there, and shows what it would have computed."""

from __future__ import annotations

import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tests.support.runs import change, collapsing, in_turns, of_site, restless, taken_by, with_gaps

FILE = "fragment-0.sqlite"


def part(first: int, last: int) -> list[Sample]:
    return list(restless(last, 1))[first:]


@pytest.fixture(autouse=True, scope="module")
def soon() -> Iterator[None]:
    """Short runs are judged as long ones are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verdict, "FEWEST_KEPT", 64)
        patched.setattr(verdict, "TOGETHER", 128)
        patched.setattr(writer, "JUDGE_SECONDS", 60.0)
        yield


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


@pytest.fixture(scope="module")
def judged(soon: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 200 samples that was judged to its end."""
    folder = tmp_path_factory.mktemp("judged") / "a"
    session(folder, part(0, 200))
    return folder


@pytest.fixture
def folder(judged: Path, tmp_path: Path) -> Path:
    """Such a run, to be changed."""
    return shutil.copytree(judged, tmp_path / "a")


def alarms(folder: Path, limits: AlarmLimits | None = None) -> list[str]:
    """As text: NaN is no number's equal."""
    with attemper.open(folder) as run:
        return list(map(str, run.alarms(limits)))


def told(folder: Path, quarters: Sequence[int] = (1,)) -> dict[str, Any]:
    """All that a judge says of a run, and of its steps after so many quarters."""
    with attemper.open(folder) as run:
        steps = [int(run.steps[(len(run) - 1) * place // 4]) for place in quarters]
        one = run.judge
        return {
            "alarms": list(map(str, run.alarms())),
            "standing": str(one.standing),
            "state": (one.step, one.untrained, one.held_back, one.notes),
            "steps": [str(run.at(step).alarms) for step in steps],
        }


def kept(folder: Path) -> list[int]:
    """How many samples were judged, of each verdict in a file."""
    with closing(sqlite3.connect(folder / FILE)) as connection:
        return [many for (many,) in connection.execute("SELECT samples FROM verdict ORDER BY samples")]


def without(folder: Path) -> Path:
    """A copy without any verdict."""
    copy = shutil.copytree(folder, folder.with_name(f"{folder.name} without"), dirs_exist_ok=True)
    for path in copy.glob("*.sqlite"):
        change(path, "DELETE FROM verdict")
    return copy


KINDS: tuple[str, ...] = (
    "whole", "with gaps", "collapsing", "short", "interrupted", "continued", "resumed and went back",
    "went back to the beginning", "went back in one process", "turns",
)  # fmt: skip


def sessions(kind: str) -> list[tuple[Sequence[Sample], bool]]:
    """What processes wrote one after another, and whether each was killed."""
    seed = sum(map(ord, kind))
    taken = list(restless(400, seed))
    gaps = list(with_gaps(taken, seed))
    found: tuple[Callable[[], list[tuple[Sequence[Sample], bool]]], ...] = (
        lambda: [(taken, False)],
        lambda: [(gaps, False)],
        lambda: [(list(collapsing(400)), False)],
        lambda: [(gaps[:60], False)],
        lambda: [(gaps[:379], True)],
        lambda: [(gaps[:150], False), (gaps[150:290], True), (gaps[290:], False)],
        lambda: [(gaps[:150], False), (gaps[110:270], False), (gaps[240:], True)],
        lambda: [(gaps[:300], False), (gaps[:260], False)],
        lambda: [([*gaps[:280], *gaps[240:330], *gaps[320:]], False)],
        lambda: [(list(in_turns(taken[:260])), False), (list(in_turns(taken[250:])), False)],
    )
    return dict(zip(KINDS, found, strict=True))[kind]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick("resumed and")
def test_what_was_kept_is_what_would_be_computed(tmp_path: Path, fed: list[int], kind: str) -> None:
    folder = tmp_path / "a"
    for taken, killed in sessions(kind):
        session(folder, taken, killed=killed)
        fed.clear()
        found, anew = told(folder, (2,)), sum(fed)
        assert found == told(without(folder), (2,))
        if kept(folder):
            assert anew < sum(fed) - anew
    assert bool(kept(folder)) == (kind != "short")
    assert len(kept(folder)) <= 2


def test_a_run_that_was_judged_to_its_end_is_not_judged_again(judged: Path, fed: list[int]) -> None:
    with attemper.open(judged) as run:
        assert len(run.alarms()) > 50
        assert run.alarms(run.judge.limits) == run.alarms()
    assert not fed


def test_of_a_run_that_was_killed_a_reader_judges_what_came_after_what_was_kept_and_writes_nothing(
    tmp_path: Path, fed: list[int]
) -> None:
    session(tmp_path, part(0, 260), killed=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    fed.clear()
    assert alarms(tmp_path)
    assert sum(fed) == 260 - kept(tmp_path)[-1] == 260 - 256
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow("takes a second")
@pytest.mark.parametrize(("start", "anew", "verdicts"), [(200, 200, [328, 400]), (190, 272, [256, 400])])
@pytest.mark.quick("190-")
def test_a_process_that_goes_on_judges_only_what_is_new_and_after_what_was_kept_if_it_goes_back(
    folder: Path, fed: list[int], start: int, anew: int, verdicts: list[int]
) -> None:
    assert kept(folder) == [128, 200]
    session(folder, part(start, 400))
    assert sum(fed) == anew
    assert kept(folder) == verdicts
    assert told(folder) == told(without(folder))


@pytest.mark.parametrize("what", ["version", "kinds", "limits", "fewest keys"])
@pytest.mark.quick("version")
def test_a_verdict_by_other_laws_is_not_taken_and_the_next_writer_replaces_it(
    folder: Path, fed: list[int], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = kept(folder)
    match what:
        case "version":
            monkeypatch.setattr(judge, "VERSION", judge.VERSION + 1)
        case "kinds":
            changed = [replace(one, least_rows=9) if one.name == "falling" else one for one in judge.OF_HEADS]
            monkeypatch.setattr(judge, "OF_HEADS", tuple(changed))
        case _:
            fragment = Fragment(folder / FILE)
            fragment.describe({"limits": {"logits": 7.0}} if what == "limits" else {"fewest_keys": 9})
            fragment.close()
    alarms(folder)
    assert sum(fed) == 200
    assert kept(folder) == before
    session(folder, part(200, 270))
    assert kept(folder)[-1] == 270
    assert alarms(folder) == alarms(without(folder))
    with closing(sqlite3.connect(folder / FILE)) as connection:
        assert connection.execute("SELECT count(DISTINCT laws) FROM verdict").fetchone() == (1,)


def test_texts_are_those_of_the_version_that_reads(judged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = attemper.open(judged).alarms()
    for one in judge.OF_HEADS:
        monkeypatch.setitem(vars(one), "advice", "Another one.")
    after = attemper.open(judged).alarms()
    assert all(alarm.advice.startswith("Another one.") for alarm in after)
    assert [alarm.message for alarm in after] == [alarm.message for alarm in before]


@pytest.mark.slow("takes a second")
def test_several_ranks_are_judged_as_one_model_whatever_each_of_them_kept(judged: Path, tmp_path: Path) -> None:
    for rank in (0, 1):
        session(tmp_path / "b", of_site(part(0, 200), rank), rank=rank)
    assert kept(tmp_path / "b")
    found = told(tmp_path / "b")
    assert found == told(without(tmp_path / "b"))
    assert found["alarms"] == alarms(judged)


@pytest.mark.slow("takes many seconds")
def test_a_run_that_was_thinned_has_no_verdict_also_where_it_goes_on(folder: Path, fed: list[int]) -> None:
    session(folder, restless(1000, 8), max_bytes=100_000)
    assert attemper.open(folder).remarks
    assert not kept(folder)
    fed.clear()
    session(folder, (replace(one, step=one.step + 10_000) for one in part(0, 150)))
    assert not fed
    assert not kept(folder)


def test_a_reader_goes_on_from_what_was_kept_while_the_run_is_written(tmp_path: Path, fed: list[int]) -> None:
    fragment = Fragment(tmp_path / FILE)
    keeper, readers = Keeper(fragment), []
    for start, end in ((0, 150), (150, 200), (200, 300), (300, 390)):
        for one in part(start, end):
            fragment.append(one)
            if fragment.fold():
                keeper.follow(time.monotonic() + 60)
        readers.append(attemper.open(tmp_path))
        for run in readers:
            fed.clear()
            assert list(map(str, run.alarms())) == list(map(str, readers[-1].alarms()))
        assert not kept(tmp_path) or sum(fed) < 150
    fragment.close()


@pytest.mark.slow("takes many seconds")
def test_what_cannot_be_judged_at_once_is_judged_little_by_little(folder: Path, fed: list[int]) -> None:
    change(folder / FILE, "DELETE FROM verdict")
    fragment = Fragment(folder / FILE)
    keeper = Keeper(fragment)
    for one in part(200, 400):
        fragment.append(one)
        if fragment.fold():
            keeper.follow(0.0)
    assert fed == [128] * 2
    keeper.follow(0.0, end=True)
    fragment.close()
    assert kept(folder)[-1] == 384
    assert told(folder) == told(without(folder))


# --- damage ---


@pytest.mark.parametrize("wrong", ["samples = samples - 1", "judged = judged + 1", "numbers = x'00'", "crc = crc + 1"])
@pytest.mark.quick("numbers", "crc")
def test_a_verdict_that_was_damaged_is_an_error(folder: Path, wrong: str) -> None:
    change(folder / FILE, f"UPDATE verdict SET {wrong}")
    with attemper.open(folder) as run, pytest.raises(InputError, match="its file is damaged"):
        run.alarms()


@pytest.mark.slow("takes a second")
def test_numbers_that_are_none_are_not_taken_though_their_checksum_fits(folder: Path, fed: list[int]) -> None:
    with attemper.open(folder) as run:
        assert isinstance(run.judge, RunJudge)
        right = run.judge.to_bytes()
    numbers = zlib.decompress(right)
    all_wrong = {
        "nothing": b"",
        "no numbers": b"\x00" * 100,
        "cut off": right[: len(right) // 2],
        "of other heads": RunJudge().to_bytes(),
        "far too much": zlib.compress(numbers + bytes(1 << 24)),
        "steps that are none": zlib.compress(b"\xff" * len(numbers)),
    }
    expected = alarms(without(folder))
    with closing(sqlite3.connect(folder / FILE)) as connection:
        rows = connection.execute("SELECT * FROM verdict").fetchall()
    for what, wrong in all_wrong.items():
        for *row, _, _ in rows:
            new = (wrong, checksum("verdict", (*row, wrong)), row[1])
            change(folder / FILE, "UPDATE verdict SET numbers = ?, crc = ? WHERE samples = ?", new)
        fed.clear()
        assert alarms(folder) == expected, what
        assert sum(fed) == 200, what


# --- the writer ---


def test_what_goes_wrong_while_a_run_is_judged_loses_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(RunJudge, "feed_all", lambda *_: 1 / 0)
        run = taken_by(open_writer(tmp_path / "a"), part(0, 150))
    assert (run.written, run.dropped) == (150, 0)
    assert not kept(tmp_path / "a")
    assert alarms(tmp_path / "a")


@pytest.mark.slow("takes a second")
def test_a_writer_in_memory_judges_nothing(fed: list[int]) -> None:
    taken_by(open_writer(None), part(0, 150))
    assert not fed
