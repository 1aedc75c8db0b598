"""A process that writes a run: the lock of its file, what it writes before it ends, and what it leaves where it cannot.

A lock ends with its process, also where that is killed. POSIX record locks are not inherited by a forked child, and
other processes see them on every local file system. The process that holds one does not see it itself, and loses it
with the first descriptor of the file that it closes: what it holds stands in a list of its own.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attemper.store.writer import Writer

try:
    import fcntl
except ImportError:
    fcntl = None

_HELD: set[str] = set()
"""Paths that this process holds."""
_TAKEN = {errno.EACCES, errno.EAGAIN, errno.EDEADLK}
"""What the system says where another process has the lock."""
_TRIALS = 4
"""``is_held`` takes a lock for an instant."""


class LockHeldError(Exception):
    """Another writer has it."""


class Lock:
    """The lock at a path, held from its creation until ``release``.

    Raises:
        LockHeldError: another writer has it, of this process or of another.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._key = path, os.path.realpath(path)
        if self._key in _HELD:
            raise LockHeldError(path.name)
        self._file = _open_and_lock(path)
        _HELD.add(self._key)

    def release(self) -> None:
        """Gives it back. Twice is once; in a forked child nothing happens."""
        if self._key not in _HELD:
            return
        with suppress(OSError):
            self.path.unlink()
        os.close(self._file)
        _HELD.discard(self._key)


def is_held(path: Path) -> bool:
    """Whether a writer holds the lock at ``path`` now: in this process or in another of this machine."""
    if os.path.realpath(path) in _HELD:
        return True
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _open_and_lock(path: Path) -> int:
    for _ in range(_TRIALS):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if _lock(file) and _still_there(file, path):  # else its earlier holder removed it in between
            return file
        os.close(file)
        time.sleep(0.05)
    raise LockHeldError(path.name)


def _still_there(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(file: int) -> bool:
    """Whether it is ours now. Where the file system knows no locks it is, too: then only this process keeps order."""
    try:
        if fcntl is not None:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
    except OSError as error:
        return error.errno not in _TAKEN
    return True


# --- its end ---

FLUSH_SECONDS = 1.7
"""How long the end of a process waits for what is not written yet."""
WRITE_SECONDS = 0.7
"""So much of it is left to write what watches hand over at the end."""
ENDING_SIGNALS = ("SIGTERM", "SIGHUP")
"""Signals at which Python runs nothing more; Ctrl-C raises KeyboardInterrupt and ends with ``atexit``."""


_live: list[Writer] = []
_ours: set[int] = set()
"""Signals that this file handles: those that nobody else did."""


def enter(live: Writer) -> None:
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


def leave(live: Writer) -> None:
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
    _HELD.clear()
    _live.clear()
    with suppress(ValueError):  # forked in another thread than the main one: the handler finds nothing to do then
        _return_signals()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_on_fork)


# --- what it leaves ---

UNNOTED = "the disk was full or failed to the end of the process"
"""Why samples are lost that a fragment itself could not note."""


def leave_lost(fragment: Path, samples: int) -> None:
    """Leaves a number of lost samples as the name of an empty file beside the fragment, which takes no room."""
    with suppress(OSError):
        fragment.with_name(f"{fragment.stem}.lost-{samples}").touch()


def lost_beside(fragment: Path) -> list[tuple[Path, int]]:
    """Files beside a fragment, or its lock, that say of lost samples, and how many each."""
    found = ((path, path.suffix.removeprefix(".lost-")) for path in fragment.parent.glob(f"{fragment.stem}.lost-*"))
    return [(path, int(number)) for path, number in found if number.isdecimal()]
