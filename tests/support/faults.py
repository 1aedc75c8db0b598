"""What may happen to a run's file while it is written, each as a function that does it and says what came of it.

``tests/store/test_faults.py`` holds the short forms, ``benchmarks/faults.py`` prints the long ones. Each fault runs in
a forked child of this process, which loads no torch: limits, users and signals of one do not touch the next.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import os
import pickle
import random
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attemper.errors import InputError
from attemper.readings.sample import SiteLabel
from attemper.store import process, schema, writer
from attemper.store.fragment import Fragment
from attemper.store.series import FragmentReader
from attemper.store.writer import Writer, open_writer
from tests.support.samples import assert_same, sample

PACE_SECONDS = 0.002
"""What a step of the loop takes."""
AT_A_TIME = 4
EVERYTHING = 1 << 60
"""Above the number of every sample."""


@dataclass
class Outcome:
    """What came of a fault."""

    fault: str
    went_on: bool = False
    """Whether the loop came to its end, by itself and with no error."""
    taken: int = 0
    written: int = 0
    dropped: int = 0
    warnings: list[str] = field(default_factory=list)
    read: int | None = None
    """Samples that a reader finds afterwards; None where no file can be opened."""
    note: str = ""


class _Heard(logging.Handler):
    """Warnings that a user would see."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def heard() -> Iterator[list[str]]:
    handler, logger = _Heard(), logging.getLogger("attemper")
    logger.addHandler(handler)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)


def count_read(folder: Path) -> int | None:
    """Samples that can be read whole: every number of them is compared."""
    try:
        tables = schema.open_to_read(folder / "fragment-0.sqlite")
    except (InputError, OSError):
        return None
    reader = FragmentReader(tables)
    found = reader.replay(0, EVERYTHING).values()
    assert_same(found, [sample(one.step, one.sites, one.quantities) for one in found])
    assert tables.rows("PRAGMA integrity_check") == [("ok",)]
    reader.close()
    return len(found)


def loop(
    fault: str,
    store: Path,
    many: int,
    during: Callable[[int, Writer], None] = lambda step, run: None,
    *,
    reads: bool = True,
) -> Outcome:
    """A training loop that hands over ``many`` samples, and what a reader finds afterwards, if one ``reads``."""
    outcome = Outcome(fault)
    with heard() as messages:
        run = open_writer(store)
        for step in range(many):
            during(step, run)
            run.take(sample(step))
            outcome.taken += 1
            time.sleep(PACE_SECONDS)
        run.close()
    outcome.went_on, outcome.written, outcome.dropped = True, run.written, run.dropped
    outcome.warnings = messages
    outcome.read = count_read(store) if reads else None
    return outcome


# --- killed ---


def killed(folder: Path, times: int, labels: tuple[SiteLabel, ...] | None = None, longest: float = 0.15) -> Outcome:
    """Kills a process at a random moment, ``times`` times; five in a row resume the same run."""
    outcome = Outcome("killed at random" + (f", {len(labels)} sites" if labels else ""), went_on=True)
    drawn, lost, before = random.Random(0), 0, 0
    for trial in range(times):
        store = folder / f"run{trial // 5}"
        before = 0 if trial % 5 == 0 else before
        acknowledged = mmap.mmap(-1, 16)
        child = os.fork()
        if not child:
            _take_until_killed(store, acknowledged, labels)
        # Until its run is open, and each second time until it has written, however busy the machine is.
        while not (acknowledged[8] and (trial % 2 == 0 or any(acknowledged[:8]))):
            time.sleep(0.001)
        time.sleep(drawn.random() * longest)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        (written,) = struct.unpack("<q", acknowledged[:8])
        found = count_read(store)
        assert found is not None, f"trial {trial}: the file does not open"
        lost += max(0, before + written - found)
        outcome.taken += written
        before = found
        outcome.read = (outcome.read or 0) + written
    assert not lost, f"{lost} acknowledged samples are lost"
    outcome.written, outcome.note = outcome.taken, f"{times} of {times} files open, {lost} acknowledged samples lost"
    return outcome


def _take_until_killed(store: Path, acknowledged: mmap.mmap, labels: tuple[SiteLabel, ...] | None) -> None:
    run = open_writer(store)
    first = (run.last_step or 0) + 1
    acknowledged[8:9] = b"\1"
    for step in range(first, first + EVERYTHING):
        run.take(sample(step, labels))
        while run.written < step - first - 20:
            time.sleep(0)
        acknowledged[:8] = struct.pack("<q", run.written)


# --- the disk ---


def file_too_large(folder: Path, many: int) -> Outcome:
    """The system refuses to let files grow, as a full disk does; then there is room again."""
    import resource

    writer.WAITING_BYTES = 40 * sample(0).values.nbytes
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def during(step: int, run: Writer) -> None:
        if step == many // 3:
            run.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / "fragment-0.sqlite").stat().st_size, hard))
        if step == 2 * many // 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            run.flush()

    return loop("disk full (RLIMIT_FSIZE)", folder, many, during)


def full_at_the_start(folder: Path, many: int) -> Outcome:
    """The disk has room for tables and for no sample when the run begins; in its middle there is more."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))

    def during(step: int, run: Writer) -> None:
        if step == many // 2:
            run.flush()
            assert (run.written, run.dropped, run.waiting) == (0, 0, step), "they wait"
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return loop("disk full at the start", folder, many, during)


def full_from_start_to_end(folder: Path, many: int) -> Outcome:
    """The same, and no room comes."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    outcome = loop("disk full from start to end", folder, many, reads=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    outcome.note = ", ".join(os.listdir(folder))
    return outcome


def no_more_pages(folder: Path, many: int) -> Outcome:
    """SQLite finds the disk full, to the end of the run."""
    writer.WAITING_BYTES = 40 * sample(0).values.nbytes

    def during(step: int, run: Writer) -> None:
        if step == many // 3:
            run.flush()
            pages = run._fragment.connection.execute("PRAGMA page_count").fetchone()[0]
            run._fragment.connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()

    return loop("disk full (max_page_count)", folder, many, during)


def read_only_folder(folder: Path, many: int) -> Outcome:
    """Nobody may write to the folder."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.setuid(65534)
    return loop("read-only folder", folder / "run", many, reads=False)


def deleted_folder(folder: Path, many: int) -> Outcome:
    """The folder of the run is removed while it is written to."""

    def during(step: int, run: Writer) -> None:
        if step == many // 2:
            run.flush()
            shutil.rmtree(folder)

    return loop("deleted folder", folder, many, during, reads=False)


def slow_disk(folder: Path, many: int) -> Outcome:
    """Each sample takes 50 ms to be written, and few may wait."""
    append = Fragment.append
    writer.WAITING_BYTES = 10 * sample(0).values.nbytes

    def slow(fragment: Fragment, one: Any) -> None:
        time.sleep(0.05)
        append(fragment, one)

    Fragment.append = slow  # type: ignore[method-assign]
    start = time.perf_counter()
    outcome = loop("slow disk", folder, many)
    Fragment.append = append  # type: ignore[method-assign]
    outcome.note = (
        f"{many} steps and the end took {time.perf_counter() - start:.1f} s; all written would be {many / 20:.0f} s"
    )
    return outcome


# --- other files and processes ---


def forked(folder: Path, many: int) -> Outcome:
    """Children take samples and end in every way that Python has, while their parent writes."""
    ends: list[int] = []

    def during(step: int, run: Writer) -> None:
        if step % (many // 3):
            return
        for end in (lambda: sys.exit(7), lambda: os._exit(7), lambda: os.kill(os.getpid(), signal.SIGTERM)):
            child = os.fork()
            if not child:
                try:
                    assert not run.take(sample(1_000_000))
                    run.flush()
                    run.close()
                finally:
                    end()
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    outcome = loop("fork", folder, many, during)
    assert set(ends) == {7, -signal.SIGTERM}, ends
    return outcome


def garbage_file(folder: Path, many: int) -> Outcome:
    """Something else stands where the file of the run would."""
    folder.mkdir(exist_ok=True)
    (folder / "fragment-0.sqlite").write_bytes(random.Random(0).randbytes(10_000))
    outcome = loop("garbage file", folder, many, reads=False)
    assert (folder / "fragment-0.sqlite").read_bytes() == random.Random(0).randbytes(10_000)
    return outcome


def data_loader_workers(folder: Path, many: int) -> Outcome:
    """Workers of a ``DataLoader`` are forked, run and end while samples are taken."""
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(
        torch.arange(float(many)).tolist(),  # pyright: ignore[reportArgumentType]
        num_workers=2,
        multiprocessing_context="fork",
    )
    batches = iter(loader)

    def during(step: int, run: Writer) -> None:
        assert float(next(batches)) == step

    return loop("DataLoader workers", folder, many, during)


@contextmanager
def other_process(work: Callable[[], object]) -> Iterator[None]:
    """Another process that did ``work`` and keeps what it holds."""
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        held = work()
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        del held
        os._exit(0)
    os.read(ready[0], 1)
    try:
        yield
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)


def two_writers(folder: Path, many: int) -> Outcome:
    """Another process writes to the same run; the second one in this process is refused, too."""

    def first() -> Writer:
        run = open_writer(folder)
        run.take(sample(0))
        run.flush()
        return run

    with other_process(first):
        outcome = loop("two writers", folder, many, reads=False)
    outcome.read = count_read(folder)
    return outcome


def exclusive_from_the_start(folder: Path, many: int) -> Outcome:
    """Another process holds SQLite's exclusive lock for good: a file system that refuses locks."""
    folder.mkdir(exist_ok=True)
    open_writer(folder).close()

    def first() -> sqlite3.Connection:
        connection = sqlite3.connect(folder / "fragment-0.sqlite", isolation_level=None)
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        return connection

    with other_process(first):
        return loop("locks refused at the start", folder, many, reads=False)


def exclusive_for_a_while(folder: Path, many: int) -> Outcome:
    """Another process holds the lock in the middle of the run, longer than SQLite waits, and gives it back."""

    def first() -> sqlite3.Connection:
        connection = sqlite3.connect(folder / "fragment-0.sqlite", isolation_level=None)
        connection.execute("BEGIN EXCLUSIVE")
        return connection

    def during(step: int, run: Writer) -> None:
        if step == many // 2:
            run.flush()
            with other_process(first):
                for further in range(step, step + 20):
                    run.take(sample(further))
                time.sleep(3 * schema.PATIENCE_SECONDS)

    outcome = loop("locks refused for a while", folder, many, during)
    outcome.taken += 20  # beside those of the loop
    return outcome


# --- ends ---


def ended_by(folder: Path, number: int, many: int = 200) -> Outcome:
    """A signal ends the process right after the last sample was handed over."""
    outcome = Outcome(f"ended by {signal.Signals(number).name}", taken=many)
    child = os.fork()
    if not child:
        # As a process begins: the one that runs this may ignore a signal (nohup), or handle it for a run of its own.
        for ending in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            run = open_writer(folder)
            for step in range(many):
                run.take(sample(step))
            os.kill(os.getpid(), number)
            time.sleep(60)
        except KeyboardInterrupt:
            sys.exit(130)  # as Python does, by way of atexit
    start = time.perf_counter()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcome.went_on = status == (130 if number == signal.SIGINT else -number)
    outcome.note = f"ended within {time.perf_counter() - start:.1f} s, status {status}"
    outcome.read = outcome.written = count_read(folder) or 0
    assert [path.name for path in folder.iterdir()] == ["fragment-0.sqlite"], "a log or a lock was left"
    return outcome


def ended_by_an_exception(folder: Path, many: int = 200) -> Outcome:
    """The loop raises, and nobody catches it."""
    outcome = Outcome("ended by an exception", taken=many)
    child = os.fork()
    if not child:
        sys.excepthook = lambda *error: None
        run = open_writer(folder)
        for step in range(many):
            run.take(sample(step))
        raise RuntimeError("a loss that is not finite")
    os.waitpid(child, 0)
    outcome.read = outcome.written = count_read(folder) or 0
    outcome.went_on = True
    return outcome


def all_faults(folder: Path, *, kills: int, many: int) -> Iterator[Callable[[], Outcome]]:
    """Every fault, in its own folder."""
    yield lambda: killed(folder / "killed", kills)
    several = (
        file_too_large,
        full_at_the_start,
        full_from_start_to_end,
        no_more_pages,
        read_only_folder,
        deleted_folder,
        slow_disk,
        forked,
        garbage_file,
        two_writers,
        exclusive_from_the_start,
        exclusive_for_a_while,
    )
    for fault in several:
        yield lambda fault=fault: fault(folder / fault.__name__, many)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        yield lambda number=number: ended_by(folder / str(number), number)
    yield lambda: ended_by_an_exception(folder / "exception")


def apart(fault: Callable[[], Outcome]) -> Callable[[], Outcome]:
    """Begins a fault in a forked child; call the result for what comes of it, or its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        own = os.getpid()
        try:
            told: Any = fault()
        except BaseException as error:
            if os.getpid() != own:  # a child of the fault, which ends as Python does
                raise
            told = Outcome("?", note=f"{type(error).__name__}: {error}")
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(asdict(told), pipe)
        os._exit(0)
    os.close(writing)

    def ended() -> Outcome:
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
        os.waitpid(child, 0)
        return Outcome(**pickle.loads(data)) if data else Outcome("?", note="the process died")

    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--many", type=int, default=150)
    arguments = parser.parse_args()
    schema.PATIENCE_SECONDS, writer.RETRY_SECONDS, process.FLUSH_SECONDS = 0.1, 0.05, 1.7
    logging.lastResort = None
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    begun: deque[Callable[[], Outcome]] = deque()
    for fault in (*all_faults(folder, kills=arguments.kills, many=arguments.many), *[None] * AT_A_TIME):
        if len(begun) == AT_A_TIME or fault is None:  # most of them wait for something most of the time
            print(json.dumps(asdict(begun.popleft()())), flush=True)
        if fault is not None:
            begun.append(apart(fault))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
