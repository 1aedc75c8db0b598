"""One writer for each fragment: a lock that ends with its process, also where that is killed.

POSIX record locks are not inherited by a forked child, and other processes see them on every local file system. The
process that holds one does not see it itself, and loses it with the first descriptor of the file that it closes: what
it holds stands in a list of its own.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from pathlib import Path

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_HELD.clear)
