"""One writer for each fragment: in a process, among processes, after a kill, beside a fork."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from attemper.store import process
from attemper.store.process import Lock, LockHeldError, is_held

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def in_child(work) -> int:
    """Exit status of a forked child that returns ``work()``."""
    child = os.fork()
    if not child:
        try:
            os._exit(int(work() or 0))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(path) -> bool:
    try:
        Lock(path)
    except LockHeldError:
        return True
    return False


@pytest.fixture
def path(tmp_path):
    return tmp_path / "fragment-0.lock"


def test_a_lock_is_held_until_it_is_released_and_its_file_goes(path):
    assert not is_held(path)
    held = Lock(path)
    assert refused(path)
    for _ in range(3):  # to ask gives nothing back
        assert is_held(path)
    assert in_child(lambda: refused(path)) == 1
    assert in_child(lambda: is_held(path)) == 1
    held.release()
    held.release()
    assert not path.exists()
    assert not is_held(path)
    Lock(path).release()


def test_a_child_neither_has_nor_releases_the_lock_of_its_parent(path):
    held = Lock(path)
    in_child(lambda: held.release())
    assert path.exists()
    assert in_child(lambda: refused(path)) == 1
    held.release()


def test_the_lock_of_a_killed_process_is_free(path):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        Lock(path)
        os.write(writing, b"x")
        signal.pause()
    os.read(reading, 1)
    assert refused(path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.exists()
    assert not is_held(path)
    Lock(path).release()


def test_another_name_of_the_same_file_is_the_same_lock(path, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    held = Lock(path)
    assert refused(tmp_path / "link" / path.name)
    held.release()


def test_a_lock_whose_file_its_holder_removed_meanwhile_is_taken_anew(path, monkeypatch):
    taken, original = [], process._lock

    def removed_before_the_first(file: int) -> bool:
        if not taken:
            path.unlink()
        taken.append(file)
        return original(file)

    monkeypatch.setattr(process, "_lock", removed_before_the_first)
    held = Lock(path)
    assert len(taken) == 2
    assert os.path.samestat(os.fstat(held._file), path.stat())
    held.release()


def test_a_file_system_without_locks_is_kept_in_order_within_a_process(path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(process.fcntl, "lockf", refuse)
    held = Lock(path)
    assert refused(path)
    held.release()


def test_a_folder_that_is_missing_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        Lock(tmp_path / "missing" / "fragment-0.lock")
