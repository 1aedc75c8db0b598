"""The queue and its thread: what is taken is written, what is not is counted; the ends of a writer."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attemper
from attemper import InputError, Store
from attemper.store import place, process, schema, writer
from attemper.store.folder import delete_run
from attemper.store.fragment import Fragment
from attemper.store.series import FragmentReader
from attemper.store.writer import Writer, open_writer
from tests.support.runs import change, taken_by
from tests.support.samples import sample, samples


def steps(run: Writer) -> list[int]:
    tables = run.open_reader()
    found = [row[0] for row in tables.rows("SELECT step FROM sample ORDER BY id")]
    tables.close()
    return found


def warning(caplog: pytest.LogCaptureFixture) -> str:
    """What the one warning said."""
    (record,) = caplog.records
    return record.message


@pytest.fixture(autouse=True)
def _no_writer_is_left() -> Iterator[None]:
    """One that a test leaves open when it fails would keep its handler of signals in all that follow."""
    yield
    for live in list(process._live):
        live.close()


@pytest.fixture
def gate(monkeypatch):
    """The thread waits at each sample until it is opened."""
    opened, append = threading.Event(), Fragment.append

    def wait(fragment: Fragment, one) -> None:
        assert opened.wait(10)
        append(fragment, one)

    monkeypatch.setattr(Fragment, "append", wait)
    yield opened
    opened.set()


@pytest.mark.parametrize("store", [None, "folder"])
def test_what_is_taken_is_written_and_read_beside_the_writer(tmp_path, store):
    run = open_writer(store and tmp_path / "runs" / "a")
    assert run.last_step is None
    for one in samples(300, every=5):
        assert run.take(one)
    assert run.last_step == 1495
    assert run.flush()
    assert (run.written, run.dropped, run.trouble) == (300, 0, None)
    assert steps(run) == list(range(0, 1500, 5))
    run.close()
    run.close()
    assert steps(run) == list(range(0, 1500, 5))
    assert not run.take(sample(2000))
    if store:
        assert os.listdir(tmp_path / "runs" / "a") == ["fragment-0.sqlite"]


def test_what_is_known_of_the_run_is_kept(tmp_path):
    store = Store(tmp_path, name="warm-up", tags=["one", "two"], notes="a note")
    run = open_writer(store, rank=2, about={"model": "/data/tiny", "rows": 128}, versions={"attemper": "9"})
    run.cover({("a", "self", "train"): "it was not called", ("b", "self", "train"): "no attention was seen"})
    run.cover({("a", "self", "train"): None})
    run.describe({"rows": 64})
    run.close()
    tables = schema.open_to_read(tmp_path / "fragment-2.sqlite")
    about = {name: json.loads(value) for name, value in tables.rows("SELECT * FROM about")}
    own = {"name": "warm-up", "tags": ["one", "two"], "notes": "a note", "bits": 15}
    assert about == {**own, "model": "tiny", "rows": 64}
    assert tables.rows("SELECT name, reason FROM coverage ORDER BY name") == [
        ("a", None),
        ("b", "no attention was seen"),
    ]
    assert tables.rows("SELECT rank, versions FROM segment") == [(2, '{"attemper": "9"}')]
    tables.close()


def test_a_run_without_a_name_has_that_of_its_folder_wherever_that_is_moved(tmp_path):
    open_writer(tmp_path / "b").close()
    (tmp_path / "b").rename(tmp_path / "c")
    with attemper.open(tmp_path / "c") as run:
        assert (run.about.get("name"), run.name) == (None, "c")


def test_a_path_that_is_a_file_and_a_path_that_is_none_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file is a file"):
        open_writer(tmp_path / "file")
    with pytest.raises(InputError, match="must be the path of a folder, got 7"):
        open_writer(7)  # pyright: ignore[reportArgumentType]
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        # as a process that was killed leaves it, with rows too short
        ("INSERT INTO hot (sample, numbers) SELECT id, x'00' FROM sample WHERE id < 128; DELETE FROM chunk", ""),
        ("UPDATE site SET name = 'another'", "its file is damaged, its table site does not fit its checksum"),
    ],
)
def test_a_damaged_file_is_refused_with_a_warning_and_stays_as_it_is(tmp_path, caplog, damage, told):
    taken_by(open_writer(tmp_path), samples(130))
    path = tmp_path / "fragment-0.sqlite"
    for statement in damage.split("; "):
        change(path, statement)
    second = taken_by(open_writer(tmp_path), [sample(130)])
    assert (second.written, second.dropped) == (0, 1)
    assert re.search(f"cannot be stored: .*{told}", warning(caplog))
    kept = schema.open_to_read(path).rows("SELECT (SELECT count(*) FROM segment), max(id) FROM sample")
    assert told == "" or kept == [(1, 129)]


def test_more_than_may_wait_is_dropped_and_counted_in_the_file(tmp_path, gate, monkeypatch, caplog):
    monkeypatch.setattr(writer, "WAITING_BYTES", 20 * sample(0).values.nbytes)
    run = open_writer(tmp_path)
    taken = [run.take(one) for one in samples(50)]
    assert taken == [True] * 20 + [False] * 30
    assert run.dropped == 30
    gate.set()
    assert run.flush(10)
    assert run.take(sample(50))
    run.close()
    assert (run.written, run.dropped) == (21, 30)
    assert steps(run) == [*range(20), 50]
    tables = run.open_reader()
    assert tables.rows("SELECT sum(samples) FROM lost") == [(30,)]
    assert tables.rows("SELECT reason FROM lost")[0] == ("the disk is slower than the samples come",)
    tables.close()
    assert "the disk is slower than the samples come" in warning(caplog)


def test_a_few_samples_wait_however_large_they_are(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(writer, "WAITING_BYTES", 1)
    run = open_writer(tmp_path)
    assert [run.take(one) for one in samples(10)] == [True] * writer.FEWEST_WAITING + [False] * 2
    gate.set()
    run.close()


@pytest.fixture
def full(monkeypatch) -> threading.Event:
    """Until it is set, the disk takes no file. The trials come soon."""
    room, fragment = threading.Event(), Fragment

    def refuse(path: Path | None, **options: Any) -> Fragment:
        if path is not None and not room.is_set():
            raise sqlite3.OperationalError("database or disk is full")
        return fragment(path, **options)

    monkeypatch.setattr(place, "Fragment", refuse)
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.02)
    return room


def soon(condition: Callable[[], object]) -> bool:
    """Whether it is so within five seconds."""
    end = time.monotonic() + 5
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def test_a_disk_that_is_full_at_the_start_is_tried_again_and_takes_what_memory_holds(tmp_path, full, caplog):
    run = open_writer(Store(tmp_path, name="a", bits=None), about={"model": "tiny"})
    run.cover({("a", "self", "train"): "no attention was seen"})
    for one in samples(300):
        run.take(one)
    assert run.flush(10)
    assert (run.written, run.dropped, run.waiting) == (0, 0, 300)
    assert "database or disk is full" in str(run.trouble)
    assert len(steps(run)) == 300, "in memory they can be read"
    full.set()
    assert soon(lambda: run.written == 300)
    for one in (sample(300), sample(250)):
        run.take(one)
    run.close()
    assert (run.written, run.dropped, run.waiting, run.trouble) == (302, 0, 0, None)
    assert os.listdir(tmp_path) == ["fragment-0.sqlite"]
    with attemper.open(tmp_path) as found:
        assert (found.name, found.about["model"], found.lost) == ("a", "tiny", ())
        assert [site.name for site in found.coverage.skipped] == ["a"]
        assert found.steps.tolist() == list(range(251))
        assert found.history("max_logit").values.dtype == np.float32
    tables = schema.open_to_read(tmp_path / "fragment-0.sqlite")
    for one in list(FragmentReader(tables).replay(0, 299).values()):
        assert np.array_equal(one.values, sample(one.step).values), "with all their bits"
    tables.close()
    assert len(caplog.records) == 1


def test_a_run_that_goes_on_while_the_disk_is_full_keeps_its_steps(tmp_path, full, caplog):
    full.set()
    taken_by(open_writer(tmp_path), [sample(40)])
    full.clear()
    second = open_writer(tmp_path)
    assert second.last_step == 40
    assert second.earlier is not None
    second.take(sample(41))
    second.flush()
    full.set()
    second.close()
    assert (second.written, second.dropped) == (1, 0)
    assert steps(second) == [40, 41]


def test_what_could_not_be_read_before_is_not_hidden_by_a_run_that_is_stored_later(tmp_path, full, monkeypatch, caplog):
    full.set()
    taken_by(open_writer(tmp_path), [sample(40)])
    full.clear()
    with monkeypatch.context() as patch:
        patch.setattr(place, "open_to_read", lambda path: schema.open_to_read(path.with_name("none")))
        second = open_writer(tmp_path)
    assert second.last_step is None
    second.take(sample(0))
    full.set()
    assert soon(lambda: not second.pending)
    second.close()
    assert (second.written, second.dropped) == (0, 1)
    assert "fragment-0.sqlite has samples to step 40 that could not be read before" in caplog.records[-1].message
    with attemper.open(tmp_path) as found:
        assert found.steps.tolist() == [40]
        assert [one.samples for one in found.lost] == [1]


def test_a_new_training_moves_the_earlier_run_once_however_often_the_disk_is_tried(tmp_path, full):
    full.set()
    open_writer(tmp_path / "a").close()
    full.clear()
    run = open_writer(Store(tmp_path / "a", new=True))
    run.take(sample(0))
    time.sleep(0.2)
    full.set()
    run.close()
    assert run.written == 1
    assert sorted(os.listdir(tmp_path)) == ["a", "a-1"]


def test_a_folder_in_which_nothing_could_be_stored_says_what_is_lost(tmp_path, full):
    run = taken_by(open_writer(tmp_path / "a"), [sample(0)])
    assert (run.dropped, run.waiting) == (1, 0)
    with pytest.raises(InputError, match=r"there is no sample in .*a: 1 sample was lost, since the disk was full"):
        attemper.open(tmp_path / "a")
    full.set()
    open_writer(tmp_path / "a").close()
    with attemper.open(tmp_path / "a") as found:
        assert [one.samples for one in found.lost] == [1]


def test_while_the_disk_fails_the_trouble_is_told_and_flush_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Fragment, "append", fail)
    run = open_writer(tmp_path)
    run.take(sample(0))
    assert not run.flush(0.1)
    assert "No space left on device" in str(run.trouble)
    assert (run.waiting, run.dropped) == (1, 0)
    run.close()
    assert (run.written, run.waiting, run.dropped) == (0, 0, 1)


def test_an_error_of_ours_costs_one_sample_and_not_the_thread(tmp_path, monkeypatch, caplog):
    append = Fragment.append

    def fail(fragment: Fragment, one) -> None:
        if one.step == 1:
            raise ValueError("a mistake")
        append(fragment, one)

    monkeypatch.setattr(Fragment, "append", fail)
    run = taken_by(open_writer(tmp_path), samples(4))
    assert (run.written, run.dropped) == (3, 1)
    assert steps(run) == [0, 2, 3]
    assert "failed at step 1: ValueError: a mistake" in warning(caplog)


def test_what_is_too_late_at_the_end_is_counted(tmp_path, gate, monkeypatch, caplog):
    monkeypatch.setattr(writer, "GRACE_SECONDS", 0.0)
    run = open_writer(tmp_path)
    for one in samples(3):
        run.take(one)
    run.close(0.01)
    assert (run.written, run.dropped) == (0, 3)
    assert "the disk is too slow for the end of the run" in warning(caplog)
    gate.set()
    run._thread.join(10)
    process.leave(run)


@pytest.mark.slow("takes many seconds")
def test_a_history_in_memory_is_bounded_and_says_that_it_is_thinned(monkeypatch, caplog):
    monkeypatch.setattr(writer, "MEMORY_BYTES", 100_000)
    with caplog.at_level("INFO"):
        run = open_writer(None)
        for one in samples(10 * 128):
            run.take(one)
            if one.step % 256 == 0:
                run.flush(10)
        run.close()
    assert run.thinned
    assert run.written == 10 * 128
    assert "the history in memory has reached 0.1 MB: its oldest samples are thinned" in warning(caplog)


def test_samples_after_the_end_are_counted_with_one_warning(tmp_path, caplog):
    run = taken_by(open_writer(tmp_path), [sample(0)])
    assert not any(run.take(sample(step)) for step in range(1, 4))
    assert (run.written, run.dropped) == (1, 3)
    assert "it came after the end of the run" in warning(caplog)


def test_a_writer_that_is_closed_in_its_own_thread_ends(tmp_path):
    run, raised = open_writer(tmp_path), []

    def close() -> None:  # as by a collection of garbage there
        try:
            run.close()
        except BaseException as error:
            raised.append(error)

    run._queue.put(close)
    run._thread.join(10)
    assert not raised
    assert not run._thread.is_alive()
    assert os.listdir(tmp_path) == ["fragment-0.sqlite"]
    run.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow("takes a second")
def test_what_a_disk_that_is_full_to_the_end_took_stands_beside_the_file_until_there_is_room(
    tmp_path, monkeypatch, caplog
):
    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    run = open_writer(tmp_path)
    run.take(sample(0))
    run.flush()
    (pages,) = run._fragment.connection.execute("PRAGMA page_count").fetchone()
    run._fragment.connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    for one in range(1, 40):
        run.take(sample(one))
    with monkeypatch.context() as patch:
        patch.setattr(Fragment, "lose", refuse)
        run.close(3)
    assert run.written + run.dropped == 40
    assert "database or disk is full" in warning(caplog)
    lost = f"fragment-0.lost-{run.dropped}"
    assert sorted(os.listdir(tmp_path)) == [lost, "fragment-0.sqlite"]

    def told() -> list[tuple[int, str]]:
        with attemper.open(tmp_path) as found:
            return [(one.samples, one.reason) for one in found.lost]

    before = told()
    assert before == [(run.dropped, "the disk was full or failed to the end of the process")]
    open_writer(tmp_path).close()
    assert os.listdir(tmp_path) == ["fragment-0.sqlite"]
    assert told() == before
    (tmp_path / lost).touch()
    delete_run(tmp_path)
    assert not tmp_path.exists()


def test_signals_are_handled_while_a_writer_to_a_file_lives_and_as_before_afterwards(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL
    memory = open_writer(None)
    assert signal.getsignal(signal.SIGTERM) is before
    assert memory not in process._live
    first, second = open_writer(tmp_path / "a"), open_writer(tmp_path / "b")
    ours = signal.getsignal(signal.SIGTERM)
    assert ours is not before
    first.close()
    assert signal.getsignal(signal.SIGTERM) is not before
    second.close()
    assert signal.getsignal(signal.SIGTERM) is before
    memory.close()
    signal.signal(signal.SIGTERM, ours)  # as somebody who puts it back
    open_writer(tmp_path / "c").close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_all_writers_have_one_deadline_at_the_end_of_the_process(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(process, "FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(writer, "GRACE_SECONDS", 0.5)
    runs = [open_writer(tmp_path / str(number)) for number in range(8)]
    for run in runs:
        run.take(sample(0))
    start = time.monotonic()
    process._end_all()
    assert time.monotonic() - start < 2.5, "0.7 s together, not 0.5 s for each"
    gate.set()
    for run in runs:
        run._thread.join(10)
        run.close()


def test_what_a_watch_still_holds_is_handed_over_at_the_end_of_the_process(tmp_path):
    class Holder:
        left = 0.0

        def give(self, until: float) -> None:
            self.left = until - time.monotonic()
            run.take(sample(7))

        def fail(self, until: float) -> None:
            raise ValueError(until)

    run, broken, holder = open_writer(tmp_path / "a"), open_writer(tmp_path / "b"), Holder()
    run.source, broken.source = weakref.WeakMethod(holder.give), weakref.WeakMethod(holder.fail)
    process._end_all()
    assert steps(run) == [7]
    assert 0 < holder.left <= process.FLUSH_SECONDS - process.WRITE_SECONDS
    run.close()
    broken.close()


@pytest.mark.slow("a process of its own")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("store", [None, "folder"])
@pytest.mark.quick("folder")
def test_a_child_does_not_wait_for_a_lock_that_was_held_when_it_was_forked(tmp_path, store):
    run = open_writer(store and tmp_path / "run")
    run.take(sample(0))
    run.flush()
    reader, held = run.open_reader(), threading.Event()

    def hold() -> None:
        with run._fragment.lock:
            held.set()
            time.sleep(0.02)

    for number in range(10):
        held.clear()
        run._queue.put(hold)
        run.take(sample(number + 1))
        held.wait(10)
        child = os.fork()
        if not child:
            signal.alarm(10)
            refused = 0
            for ask in (run.open_reader, reader.snapshot().__enter__, lambda: reader.rows("SELECT 1")):
                try:
                    ask()
                except InputError:
                    refused += 1
            run.flush()
            run.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert run.flush(10)
    assert len(steps(run)) == 11
    reader.close()
    run.close()


@pytest.mark.parametrize("later", [False, True])
def test_a_handler_of_the_users_own_stays(tmp_path, later):
    try:
        run = open_writer(tmp_path) if later else None
        assert signal.signal(signal.SIGTERM, signal.SIG_IGN) is (process._on_signal if later else signal.SIG_DFL)
        run = run or open_writer(tmp_path)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        run.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_the_first_process_of_a_container_writes_what_it_has_and_goes_on(tmp_path, monkeypatch):
    run = open_writer(tmp_path)
    run.take(sample(0))
    with monkeypatch.context() as patch:
        patch.setattr(process.os, "getpid", lambda: 1)
        patch.setattr(run, "_process", 1)
        process._on_signal(signal.SIGTERM, None)
        assert run.written == 1
        assert run.take(sample(1))
    run.close()
    assert steps(run) == [0, 1]


def test_a_writer_that_is_opened_in_another_thread_writes_too(tmp_path):
    runs: list[Writer] = []
    thread = threading.Thread(target=lambda: runs.append(open_writer(Path(tmp_path))))
    thread.start()
    thread.join()
    assert taken_by(runs[0], [sample(0)]).written == 1
