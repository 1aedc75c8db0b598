"""Files of other kinds and versions, folders that are write-protected, copies of a live file."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from attemper.errors import InputError
from attemper.store import schema
from attemper.store.fragment import Fragment
from tests.support.samples import samples


def stored(path: Path, many: int = 3) -> Path:
    fragment = Fragment(path)
    for one in samples(many):
        fragment.append(one)
    fragment.close()
    return path


@pytest.fixture
def run(tmp_path):
    return stored(tmp_path / "fragment-0.sqlite")


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (id)")
    connection.commit()
    connection.close()


def newer(path: Path) -> None:
    stored(path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    connection.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (foreign, "not a file of an attemper run"),
        (lambda path: path.write_bytes(os.urandom(5000)), "not a file of an attemper run"),
        (lambda path: path.write_text("text"), "not a file of an attemper run"),
        (
            newer,
            rf"a newer attemper: its version is {schema.VERSION + 1}, and .* reads up to {schema.VERSION}\. Upgrade",
        ),
        (lambda path: path.mkdir(), "not a file of an attemper run"),
    ],
)
def test_a_file_of_another_kind_or_of_a_newer_version_is_refused_and_stays_as_it_is(tmp_path, make, message):
    path = tmp_path / "fragment-0.sqlite"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises((InputError, sqlite3.Error), match=message if path.is_file() else "unable to open"):
        schema.open_to_write(path, write_ahead=True)
    with pytest.raises(InputError, match=message):
        schema.open_to_read(path)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_missing_and_an_empty_file_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="not a file of an attemper run"):
        schema.open_to_read(tmp_path / "missing.sqlite")
    (tmp_path / "empty.sqlite").touch()
    with pytest.raises(InputError, match="is empty: the process that made it ended before its first sample"):
        schema.open_to_read(tmp_path / "empty.sqlite")
    schema.open_to_write(tmp_path / "empty.sqlite", write_ahead=True).close()


def test_a_truncated_file_is_told_when_it_is_read(tmp_path):
    path = stored(tmp_path / "fragment-0.sqlite", 300)
    data = path.read_bytes()
    ours = r"is a file of an attemper run, but damaged or cut off\. \(.*malformed"
    for kept in (3000 / len(data), 0.02, 0.3, 0.6, 0.95):
        path.write_bytes(data[: int(kept * len(data))])
        told = ours if kept == 3000 / len(data) else rf"cannot be read: .*malformed|{ours}"
        with pytest.raises(InputError, match=told) as error:
            [schema.open_to_read(path).rows(f"SELECT * FROM {name}") for name in ("cold", "hot", "summary", "pyramid")]
        assert "\n" not in str(error.value)


def test_a_closed_run_says_how_to_go_on(run):
    tables = schema.open_to_read(run)
    tables.close()
    with pytest.raises(InputError, match=r"the run was closed: open it again with attemper\.open"):
        tables.rows("SELECT 1")


def test_a_migration_runs_once_and_a_failed_one_leaves_the_file_as_it_was(run, monkeypatch):
    before = schema.MIGRATIONS
    monkeypatch.setattr(schema, "MIGRATIONS", (*before, "CREATE TABLE added (id); CREATE TABLE added (id)"))
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        schema.open_to_write(run, write_ahead=True)
    assert schema.open_to_read(run).rows("PRAGMA user_version") == [(len(before),)]
    monkeypatch.setattr(schema, "MIGRATIONS", (*before, "CREATE TABLE added (id)"))
    for _ in range(2):
        schema.open_to_write(run, write_ahead=True).close()
    tables = schema.open_to_read(run)
    assert tables.rows("PRAGMA user_version") == [(len(before) + 1,)]
    assert tables.rows("SELECT count(*) FROM sample, added") == [(0,)]


def as_reader(folder: Path, work: Callable[[], object]) -> object:
    """What ``work`` returns, or the message of its InputError, in a process that may not write to ``folder``."""
    folder.chmod(0o555)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        told = "null"
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            told = json.dumps(work())
        except InputError as error:
            told = json.dumps(str(error))
        finally:
            os.write(writing, told.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    folder.chmod(0o755)
    return json.loads(found)


@pytest.fixture
def open_folder():
    """A folder that every user may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@FORKS
def test_a_finished_run_in_a_write_protected_folder_is_read(open_folder):
    path = stored(open_folder / "fragment-0.sqlite")
    count = "SELECT count(*) FROM sample"
    assert as_reader(open_folder, lambda: schema.open_to_read(path).rows(count)) == [[3]]


@FORKS
def test_a_killed_run_in_a_write_protected_folder_says_what_to_do(open_folder):
    path = stored(open_folder / "fragment-0.sqlite")
    live = Fragment(path)
    for one in samples(2):
        live.append(one)
    killed = open_folder / "killed"
    killed.mkdir()
    for name in (path.name, f"{path.name}-wal"):
        shutil.copy(open_folder / name, killed / name)
    live.close()
    copied = killed / path.name
    count = "SELECT count(*) FROM sample"
    told = as_reader(killed, lambda: schema.open_to_read(copied).rows(count))
    assert "was not closed, and what is in the log beside it cannot be read in a write-protected folder" in str(told)
    tables = schema.open_to_read(copied)
    assert tables.rows(count) == [(5,)]
    tables.close()


def test_a_reader_can_write_nothing_and_leaves_no_file_behind(run):
    tables = schema.open_to_read(run)
    with pytest.raises(InputError, match="readonly"):
        tables.rows("DELETE FROM sample")
    assert tables.rows("SELECT count(*) FROM sample") == [(3,)]
    tables.close()
    assert os.listdir(run.parent) == [run.name]


def test_within_a_snapshot_the_file_stands_still(run):
    writer = Fragment(run)
    reader = writer.tables()
    with reader.snapshot():
        assert reader.rows("SELECT count(*) FROM sample") == [(3,)]
        for one in samples(2):
            writer.append(one)
        assert reader.rows("SELECT count(*) FROM sample") == [(3,)]
    assert reader.rows("SELECT count(*) FROM sample") == [(5,)]
    reader.close()
    writer.close()


@FORKS
def test_a_forked_child_does_not_read_with_the_connection_of_its_parent(run):
    tables = schema.open_to_read(run)
    child = os.fork()
    if not child:
        try:
            tables.rows("SELECT 1")
        except InputError as error:
            os._exit(0 if "forked: open the run again" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tables.rows("SELECT 1") == [(1,)]
