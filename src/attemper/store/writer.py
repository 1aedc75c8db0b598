"""Takes samples off the training thread: a queue, one thread that writes, and nothing that could stop the training.

``take`` copies nothing and waits for nothing. The thread commits every sample as it comes, so that a killed process
loses at most what still stood in the queue; every 128 samples it folds. Where the disk is full, failed or gone, one
warning tells so, samples that cannot be written are counted, and writing goes on as soon as it can.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from attemper.store.fragment import Fragment, Sample

logger = logging.getLogger("attemper")

WAITING = 256
"""Samples that may wait to be written; one more is dropped."""
FLUSH_SECONDS = 2.0
"""How long the end of a process waits for what is in the queue."""
ENDING_SIGNALS = ("SIGTERM", "SIGHUP")


class Writer:
    """Writes samples of one process into its fragment, in the background."""

    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._process = os.getpid()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(WAITING)
        self._handlers: dict[int, Any] = {}
        self.dropped = 0
        """Samples that are lost: the queue was full, or the disk refused them."""
        self.written = 0
        """Samples that a killed process would not lose."""
        self.trouble: str | None = None
        """Why the last sample could not be written; None where it was."""
        self._told = False
        self._thread = threading.Thread(target=self._work, name="attemper store", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._watch_signals()

    @property
    def live(self) -> bool:
        """Whether this process may write: not a copy of it that was forked, and not after ``close``."""
        return os.getpid() == self._process and self._thread.is_alive()

    def take(self, sample: Sample) -> bool:
        """Hands a sample over; False if it was dropped. In a forked process nothing is taken."""
        return self.live and self._put(lambda: self._append(sample), sample.step)

    def do(self, action: Callable[[Fragment], None]) -> None:
        """Lets the thread do something with the fragment, in turn."""
        if self.live:
            self._put(lambda: action(self._fragment), None)

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Waits until all that was taken is written; False if it was not within ``seconds``."""
        if not self.live:
            return False
        done = threading.Event()
        try:
            self._queue.put(done.set, timeout=seconds)
        except queue.Full:
            return False
        return done.wait(seconds)

    def close(self) -> None:
        """Writes what is left, ends the file and gives signals back. Twice is once."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        self._return_signals()
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=FLUSH_SECONDS)
            except queue.Full:
                logger.warning("attemper: the run's last samples were not written: the disk is too slow.")
            self._thread.join(FLUSH_SECONDS)

    def _put(self, action: Callable[[], None], step: int | None) -> bool:
        try:
            self._queue.put_nowait(action)
        except queue.Full:
            self._lose(step, "the disk is slower than the samples come")
            return False
        return True

    # --- the thread ---

    def _work(self) -> None:
        while (action := self._queue.get()) is not None:
            action()
        try:
            self._note_losses()
        finally:
            self._fragment.close()

    def _append(self, sample: Sample) -> None:
        try:
            self._fragment.append(sample)
            self.written += 1
            self.trouble = None
            self._fragment.fold()
        except (OSError, sqlite3.Error) as error:
            self._lose(sample.step, str(error))

    def _lose(self, step: int | None, reason: str) -> None:
        self.dropped += 1
        self.trouble = reason
        if not self._told:
            self._told = True
            logger.warning(
                "attemper: a sample of the run (step %s) could not be stored: %s. Training goes on; what is lost is "
                "counted, and `attemper show` tells how much.", step, reason,
            )  # fmt: skip

    def _note_losses(self) -> None:
        if self.dropped:
            try:
                self._fragment.lose(self.dropped, None, self.trouble or "the disk could not be written to")
            except (OSError, sqlite3.Error) as error:
                logger.warning("attemper: %d samples of the run are lost: %s.", self.dropped, error)

    # --- the end of the process ---

    def _watch_signals(self) -> None:
        """Python runs nothing when a signal ends it: where nobody handles these, the queue is written first."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in ENDING_SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and _ours_or_default(signal.getsignal(number)):
                self._handlers[number] = signal.signal(number, self._ended)

    def _return_signals(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._ended:
                signal.signal(number, handler)
        self._handlers.clear()

    def _ended(self, number: int, frame: FrameType | None) -> None:
        del frame
        earlier = self._handlers.get(number, signal.SIG_DFL)
        self.close()
        # To the writer that was here before this one, or to what the system does.
        signal.signal(number, earlier)
        os.kill(os.getpid(), number)


def _ours_or_default(handler: Any) -> bool:
    return handler is signal.SIG_DFL or isinstance(getattr(handler, "__self__", None), Writer)


def now() -> float:
    """Seconds since 1970, UTC."""
    return time.time()
