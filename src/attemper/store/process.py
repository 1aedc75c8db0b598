"""What happens to a process while it writes: it ends, a signal ends it, or it is copied."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Protocol

FLUSH_SECONDS = 1.7
"""How long the end of a process waits for what is not written yet."""
WRITE_SECONDS = 0.7
"""So much of it is left to write what watches hand over at the end."""
ENDING_SIGNALS = ("SIGTERM", "SIGHUP")
"""Signals at which Python runs nothing more; Ctrl-C raises KeyboardInterrupt and ends with ``atexit``."""


class Live(Protocol):
    """What is to be written before the process ends."""

    @property
    def target(self) -> object:
        """Where it is written: the same of two that would write one file."""
        ...

    def give_way(self) -> None:
        """Ends it with its watch: another of this process is to write there."""

    def hand_over(self, until: float) -> None:
        """Takes what its watch still holds, at ``until`` (monotonic) at the latest."""

    def end(self, deadline: float) -> None:
        """Asks for the end, at ``deadline`` (monotonic) at the latest; returns at once."""

    def close(self) -> None:
        """Waits for it."""

    def flush(self, seconds: float) -> bool:
        """Waits until all that was handed over is written."""
        ...


_live: list[Live] = []
_ours: set[int] = set()
"""Signals that this file handles: those that nobody else did."""


def enter(live: Live) -> None:
    """From now on ``live`` is written when this process ends."""
    _live.append(live)
    if threading.current_thread() is threading.main_thread():
        for name in ENDING_SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) in (signal.SIG_DFL, _on_signal):
                signal.signal(number, _on_signal)
                _ours.add(number)


def end_others(target: object) -> bool:
    """Ends what this process writes to ``target``; whether there was anything."""
    others = [live for live in _live if live.target == target]
    for live in others:
        live.give_way()
    return bool(others)


def leave(live: Live) -> None:
    """It has ended. With the last one, signals are as they were. Twice is once, in any thread."""
    with suppress(ValueError):
        _live.remove(live)
    if not _live and threading.current_thread() is threading.main_thread():
        _return_signals()


@atexit.register
def _end_all() -> None:
    """All have one deadline, however many they are."""
    deadline = time.monotonic() + FLUSH_SECONDS
    for live in list(_live):
        live.hand_over(deadline - WRITE_SECONDS)
    for live in list(_live):
        live.end(deadline)
    for live in list(_live):
        live.close()


def _return_signals() -> None:
    for number in _ours:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)
    _ours.clear()


def _on_signal(number: int, frame: FrameType | None) -> None:
    del frame
    if os.getpid() == 1:  # the first process of a container: the system ignores the signal, and training goes on
        deadline = time.monotonic() + FLUSH_SECONDS
        for live in list(_live):
            live.flush(max(0.0, deadline - time.monotonic()))
        return
    _end_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _on_fork() -> None:
    """In a forked child: it writes nothing, and dies of a signal as it would without us."""
    _live.clear()
    with suppress(ValueError):  # forked in another thread than the main one: the handler finds nothing to do then
        _return_signals()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_on_fork)
