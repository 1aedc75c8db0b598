"""Takes samples off the training thread: a queue, one thread that writes, and nothing that could stop the training.

``take`` copies nothing and waits for nothing. The thread commits every sample as it comes, so that a killed process
loses at most what stands in the queue; every 128 samples it folds. Where the disk is full, failed or gone, one warning
says so. What cannot be written waits in the queue and is tried again every second; what does not fit into the queue is
dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

from attemper.errors import InputError
from attemper.readings.sample import Sample, SiteKey
from attemper.store import process
from attemper.store.compaction import CHUNK
from attemper.store.fragment import Fragment
from attemper.store.parts import Parts
from attemper.store.place import MAY_END, Earlier, Opening
from attemper.store.process import LockHeldError, leave_lost
from attemper.store.scalars import Steps, by_step
from attemper.store.schema import FORKED, Tables
from attemper.store.series import FragmentReader
from attemper.store.store import DEFAULT_BITS, Store
from attemper.store.verdict import Keeper
from attemper.text import clean_name

logger = logging.getLogger("attemper")

WAITING_BYTES = 64 << 20
"""Samples that wait to be written take at most so much."""
FEWEST_WAITING = 8
"""So many may wait however large they are."""
RETRY_SECONDS = 1.0
"""After a failure of the disk, until the next trial; for so long trials are repeated at the end of the run."""
HURRIED_SECONDS = 0.05
"""Until the next trial at the end of the run."""
CLOSE_SECONDS = 10.0
"""How long ``close`` waits; the end of the process waits ``process.FLUSH_SECONDS``."""
GRACE_SECONDS = 0.3
"""What the thread may take beyond a deadline, to finish the statement that it is at."""
TROUBLE = (OSError, sqlite3.Error)
"""What a disk may raise, and may stop to raise."""
GIVEN_UP = (
    "attemper: the run is not stored, without a retry: %s. Its history stays in memory, and its samples count as "
    "dropped."
)
"""Where what stands in the place of the file turns out to be another writer's, say."""
JUDGE_SECONDS = 0.25
"""Samples are judged for about so long at each fold, so that those of a run that went back follow in turns."""
MEMORY_BYTES = 64 << 20
"""A history without a store takes at most about so much."""


class Writer:
    """Writes samples of one process into its fragment, in the background."""

    def __init__(
        self,
        fragment: Fragment,
        *,
        opening: Opening | None = None,
        parts: Parts | None = None,
        refused: str | None = None,
    ) -> None:
        """
        Args:
            fragment: written to from now on by this writer's thread only.
            opening: of the run's file; None for a history in memory.
            parts: publishes what is written, where the run's folder takes no live file.
            refused: why samples cannot be stored where they were to be: ``fragment`` is one in memory. With ``opening``
                that may end: the file is tried every second, and takes what memory holds.
        """
        self._fragment, self._opening, self._parts, self._refused = fragment, opening, parts, refused
        self._keeper = Keeper(fragment)
        self.pending = refused is not None and opening is not None
        self._due = time.monotonic() + RETRY_SECONDS
        self._process = os.getpid()
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # Each of these is written by one thread: what the training thread hands over, and what this one settles.
        self._handed = self._handed_bytes = self._overflowed = 0
        self._settled = self._settled_bytes = self._failed = 0
        self._noted = 0
        self._why = "the disk was slow, full or failed"
        """Why samples were dropped last."""
        self.written = 0
        """Samples that a killed process would not lose."""
        self.trouble: str | None = refused
        """Why samples cannot be written now; None where they are."""
        self.last_step = None if opening is None else opening.last_step
        """Of the last sample that was taken, or that an earlier process wrote."""
        self.earlier: Earlier | None = None if opening is None else opening.earlier
        """What the file held when it was opened."""
        self.source: weakref.WeakMethod[Callable[[float], object]] | None = None
        """Asked at the end of the process for the samples that were not handed over yet, until a moment (monotonic)."""
        self.owner: weakref.WeakMethod[Callable[[], object]] | None = None
        """Ends the watch that hands samples over."""
        self._told = refused is not None
        self._deadline: float | None = None
        self._patience = float("inf")
        self._thread = threading.Thread(target=self._work, name="attemper store", daemon=True)
        self._worked = False
        self._begin()
        if opening is not None:  # a history in memory ends with its process
            process.enter(self)

    @property
    def live(self) -> bool:
        """Whether samples are taken: not after ``close``, and not in a process that was forked off."""
        return os.getpid() == self._process and self._deadline is None

    @property
    def dropped(self) -> int:
        """Samples that are not in the store: the queue was full, the disk refused them, or the run was over."""
        if self._refused and not (self.pending and self.live):
            return self._overflowed + self._handed
        late = self._deadline is not None and time.monotonic() > self._deadline
        return self._overflowed + self._failed + (self._handed - self._settled if late else 0)

    @property
    def waiting(self) -> int:
        """Samples that the disk does not take now; they are tried again."""
        if not (self.trouble and self.live) or (self._refused and not self.pending):
            return 0
        return self._handed - (0 if self.pending else self._settled)

    @property
    def thinned(self) -> bool:
        """Whether older samples were thinned."""
        return self._fragment.thinned

    def take(self, sample: Sample) -> bool:
        """Hands a sample over; False if it was dropped. Its values must not be changed afterwards."""
        if not self.live:
            self.drop(1, "it came after the end of the run")
            return False
        size = sample.values.nbytes
        waiting, waiting_bytes = self._handed - self._settled, self._handed_bytes - self._settled_bytes
        if waiting >= FEWEST_WAITING and waiting_bytes + size > WAITING_BYTES:
            self.drop(1, self.trouble or "the disk is slower than the samples come")
            return False
        self._handed, self._handed_bytes = self._handed + 1, self._handed_bytes + size
        self.last_step = sample.step
        self._queue.put(lambda: self._append(sample))
        self._begin()
        return True

    def _begin(self) -> bool:
        """Whether the thread was started; where the system has no room for one, that is tried with each sample."""
        try:
            if self._thread.ident is None:
                self._thread.start()
        except (RuntimeError, MemoryError) as error:
            self.trouble = str(error)
            self._warn(self.last_step, self.trouble)
        return self._thread.ident is not None

    def drop(self, samples: int, reason: str) -> None:
        """Counts samples that are not handed over."""
        if samples and os.getpid() == self._process:
            self._overflowed += samples
            self._why = reason
            self._warn(self.last_step, reason)

    def cover(self, sites: Mapping[SiteKey, str | None]) -> None:
        """Keeps which sites were expected: None for one that is read, else the reason why it is not."""
        sites = dict(sites)
        self._do(lambda: self._fragment.cover(sites))

    def keep_scalars(self, steps: Steps) -> None:
        self._do(lambda: self._fragment.keep_scalars(steps))

    def describe(self, about: Mapping[str, object]) -> None:
        """Keeps what is known of the run."""
        about = dict(about)
        self._do(lambda: self._fragment.describe(about))

    def open_reader(self) -> Tables:
        """What is written so far, to be read; ``flush`` first for all that was taken."""
        if os.getpid() != self._process:  # its locks may be held for ever
            raise InputError(FORKED)
        return self._fragment.tables()

    def flush(self, seconds: float = process.FLUSH_SECONDS) -> bool:
        """Waits until all that was taken is written; False if it was not within ``seconds``."""
        if not self.live:
            return not self._thread.is_alive()
        if not self._begin():
            return False
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(seconds)

    def hand_over(self, until: float) -> None:
        """Takes what its watch still holds, at ``until`` (monotonic) at the latest."""
        give = None if self.source is None or not self.live else self.source()
        if give is not None:
            with suppress(Exception):  # the others have their turn
                give(until)

    @property
    def target(self) -> object:
        """Where it is written: the same of two that would write one file; None for a history in memory."""
        return None if self._opening is None else self._opening.target

    def give_way(self) -> None:
        """Ends it with its watch: another of this process is to write there."""
        end = None if self.owner is None else self.owner()
        if end is not None:
            with suppress(Exception):  # it is the other's error
                end()
        self.close()

    def end(self, deadline: float) -> None:
        """Asks for the end, at ``deadline`` (monotonic) at the latest; returns at once."""
        if os.getpid() != self._process:
            return
        first = self._deadline is None
        self._deadline = min(deadline, self._deadline or deadline)
        self._patience = min(self._patience, time.monotonic() + RETRY_SECONDS)
        if first:
            self._queue.put(None)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Writes what is left, in at most so many seconds, and ends the file. Twice is once."""
        if os.getpid() != self._process:
            return
        self.end(time.monotonic() + seconds)
        if threading.current_thread() is self._thread:  # garbage is collected in any thread
            return
        if self._thread.ident is None:  # none could start
            if not self._worked:
                self._work()
            return
        self._thread.join(max(0.0, (self._deadline or 0.0) + GRACE_SECONDS - time.monotonic()))
        if not self._thread.is_alive():
            process.leave(self)
        elif not self._told:
            self._warn(self.last_step, "the disk is too slow for the end of the run")

    # --- the thread ---

    def _work(self) -> None:
        self._worked = True
        try:
            while (task := self._next_task()) is not None:
                task()
            if self.pending:
                self._insist(self._open, self.last_step)
            self._note_losses()
            self._publish()
            self._judge(end=True)
            self._attempt(lambda: self._fragment.close(self._deadline or 0.0))
        finally:
            unnoted = self.dropped - self._noted
            if self._opening is not None:
                if unnoted and self._opening.path is not None:
                    leave_lost(self._opening.path, unnoted)
                self._opening.release()
            process.leave(self)

    def _next_task(self) -> Callable[[], object] | None:
        while self.pending:
            try:
                return self._queue.get(timeout=self._due - time.monotonic())
            except (queue.Empty, ValueError):  # it is time, or past it
                self._try_to_open()
        while self._parts is not None:
            try:
                return self._queue.get(timeout=self._parts.seconds_left)
            except queue.Empty:
                self._publish()
        return self._queue.get()

    def _try_to_open(self) -> None:
        try:
            self._open()
        except MAY_END as error:
            self.trouble = str(error)
        except Exception as error:  # for good
            self.pending = False
            self._refused = self.trouble = _reason(error)
            logger.warning(GIVEN_UP, self._refused)
        self._due = time.monotonic() + RETRY_SECONDS

    def _open(self) -> None:
        """Opens the file that the disk did not take before, and writes what memory holds into it."""
        assert self._opening is not None
        fragment, self._parts = self._opening.open()
        memory, self._fragment, self._keeper = self._fragment.tables(), fragment, Keeper(fragment)
        ((left, end),) = memory.rows("SELECT count(*), coalesce(max(id), -1) FROM sample")
        self._settled -= left
        self._failed = self._settled  # thinned meanwhile
        self.pending, self._refused, self.trouble = False, None, None
        held = FragmentReader(memory)
        self._insist(lambda: fragment.describe(held.about), self.last_step)
        self._insist(lambda: fragment.cover(held.coverage), self.last_step)
        self._insist(lambda: fragment.keep_scalars(by_step(held.scalars)), self.last_step)
        for first in range(0, end + 1, CHUNK):
            for sample in held.replay(first, first + CHUNK - 1).values():
                self._settled_bytes -= sample.values.nbytes
                self._append(sample)

    def _publish(self) -> None:
        if self._parts is not None:
            self._attempt(self._parts.publish)

    def _append(self, sample: Sample) -> None:
        kept = self._insist(lambda: self._fragment.append(sample), sample.step)
        if not kept or (self._refused and not self.pending):
            self._failed += 1
        elif not self.pending:
            self.written += 1
        self._settled, self._settled_bytes = self._settled + 1, self._settled_bytes + sample.values.nbytes
        if kept:
            self._note_losses()
            folded = self._attempt(self._fragment.fold)
            if folded or (self._parts is not None and not self._parts.seconds_left):
                self._publish()
            if folded:
                self._judge()

    def _judge(self, *, end: bool = False) -> None:
        """Parts are read without what is kept beside the fragment."""
        until = min(time.monotonic() + JUDGE_SECONDS, self._deadline or float("inf"))
        if self._parts is None and time.monotonic() < until:
            self._attempt(lambda: self._keeper.follow(until, end=end))

    def _do(self, action: Callable[[], object]) -> None:
        if self.live:
            self._queue.put(lambda: self._insist(action, self.last_step))

    def _insist(self, action: Callable[[], object], step: int | None) -> bool:
        """Tries until it is done; False once the run ends and it still fails, or there is no time left."""
        while self._deadline is None or time.monotonic() < self._deadline:
            hurried = self._deadline is not None
            try:
                action()
            except TROUBLE as error:
                self.trouble = str(error)
                self._warn(step, self.trouble)
                if hurried and time.monotonic() >= self._patience:
                    return False
                self._pause(HURRIED_SECONDS if hurried else RETRY_SECONDS)
            except Exception as error:  # ours: the thread must live on
                self._warn(step, f"{type(error).__name__}: {error}")
                return False
            else:
                self.trouble = self._refused
                return True
        return False

    def _pause(self, seconds: float) -> None:
        """Until the next trial; short once the run ends. Without a lock, which a signal could meet in other hands."""
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            time.sleep(HURRIED_SECONDS)
            if self._deadline is not None:
                return

    def _attempt(self, action: Callable[[], object]) -> object:
        """Tries once: what fails here is tried again with later samples."""
        try:
            return action()
        except Exception as error:
            self._warn(self.last_step, f"{type(error).__name__}: {error}")
            return None

    def _note_losses(self) -> None:
        """Keeps in the file how many samples are not in it."""
        lost = self.dropped - self._noted
        if lost and not self._refused:
            try:
                self._fragment.lose(lost, self.last_step, self.trouble or self._why)
                self._noted += lost
            except Exception as error:
                logger.info("attemper: %d samples of the run are lost: %s.", lost, error)

    def _warn(self, step: int | None, reason: str) -> None:
        """Once: training goes on, and what is lost is counted."""
        if not self._told:
            self._told = True
            logger.warning(
                "attemper: the store failed at step %s: %s. Training goes on. The watch and `attemper show` say "
                "how many samples are lost.",
                step,
                reason,
            )


def open_writer(
    store: Store | str | os.PathLike[str] | None,
    *,
    rank: int = 0,
    about: Mapping[str, object] | None = None,
    versions: Mapping[str, str] | None = None,
) -> Writer:
    """The writer of this process' fragment of a run; None for a history in memory, bounded and thinned with age.

    A watch of this process that writes the same file is closed first, and one warning says so. Where the disk takes no
    file now, one warning says so, and the history stays in memory until it does. Where the folder holds something else,
    or another process writes it, it stays there, and every sample counts as dropped.
    """
    if store is None:
        return _describe(Writer(_in_memory(versions)), about or {})
    options = store if isinstance(store, Store) else Store(store)
    if not options.is_url and os.path.isfile(options.path):
        raise InputError(
            f"{clean_name(options.last_name)} is a file. A run is stored in a folder: name a new one, or one of a run."
        )
    told = {"name": options.name, "tags": list(options.tags), "notes": options.notes}
    facts = {"bits": options.bits, **(about or {}), **{name: fact for name, fact in told.items() if fact}}
    opening = Opening(options, rank, versions)
    if process.end_others(opening.target):
        logger.warning(
            "attemper: an earlier watch of this process wrote to %s. It has ended, and this one replaces it.",
            clean_name(options.last_name),
        )
    try:
        fragment, parts = opening.open()
    except Exception as error:  # whatever it is, training goes on
        return _describe(_refuse(options, opening, error, versions), facts)
    return _describe(Writer(fragment, opening=opening, parts=parts), facts)


def _in_memory(versions: Mapping[str, str] | None, bits: int | None = DEFAULT_BITS) -> Fragment:
    return Fragment(None, bits=bits, max_bytes=MEMORY_BYTES, versions=versions)


def _describe(writer: Writer, facts: Mapping[str, object]) -> Writer:
    writer.describe(facts)
    return writer


def _refuse(options: Store, opening: Opening, error: Exception, versions: Mapping[str, str] | None) -> Writer:
    pending, reason = isinstance(error, MAY_END), _reason(error)
    logger.warning(
        "attemper: the run %s cannot be stored: %s. Training goes on; its history stays in memory and %s.",
        clean_name(options.path),
        reason,
        "is stored once that ends (retried every second). Samples not stored at the end count as dropped"
        if pending
        else "ends with this process, and all of its samples count as dropped",
    )
    if not pending:
        opening.release()
        return Writer(_in_memory(versions), refused=reason)
    return Writer(_in_memory(versions, options.bits), opening=opening, refused=reason)


def _reason(error: Exception) -> str:
    """Why a run cannot be stored."""
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, sqlite3.DatabaseError) and "malformed" in reason:
        return f"its file is damaged or cut off ({reason})"
    if isinstance(error, LockHeldError):
        return "another watch is writing to it. Give each run a separate folder"
    return reason.rstrip(".")
