"""Tables of a fragment's file, made by numbered migrations, and how such a file is opened to be written or read."""

from __future__ import annotations

import ctypes
import os
import re
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

from attemper.errors import InputError
from attemper.file_schema import COUNT, check_document, parse_json
from attemper.store.checksum import DAMAGED, whole
from attemper.text import clean_name

APPLICATION = 0x61747472
"""SQLite's mark of whose file it is: "attr"."""
PAGE_BYTES = 1024
"""With 4,096, what stays empty in the last page of each small chunk would cost a tenth of a small run."""
PATIENCE_SECONDS = 1.0
"""How long a lock that another process holds is waited for."""
LOG_PAGES = 4096
"""After so many the write-ahead log is moved into the file."""

MIGRATIONS = (
    """
    CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE segment (
        id INTEGER PRIMARY KEY, first_sample INTEGER NOT NULL, first_step INTEGER, began REAL NOT NULL,
        rank INTEGER NOT NULL, process INTEGER NOT NULL, versions TEXT NOT NULL
    );
    CREATE TABLE statistic (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, unit TEXT NOT NULL, exact INTEGER NOT NULL
    );
    CREATE TABLE site (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, mode TEXT NOT NULL, layer INTEGER,
        attention TEXT NOT NULL, normalizer TEXT NOT NULL, heads INTEGER NOT NULL
    );
    CREATE TABLE layout (id INTEGER PRIMARY KEY, statistics TEXT NOT NULL, sites TEXT NOT NULL);
    CREATE TABLE sample (
        id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
        tokens INTEGER NOT NULL, layout INTEGER NOT NULL
    );
    CREATE INDEX sample_by_step ON sample (step);
    CREATE TABLE hot (sample INTEGER PRIMARY KEY, numbers BLOB NOT NULL);
    CREATE TABLE chunk (first INTEGER PRIMARY KEY, span INTEGER NOT NULL, moments BLOB NOT NULL);
    CREATE TABLE cold (
        statistic INTEGER NOT NULL, site INTEGER NOT NULL, first INTEGER NOT NULL, numbers BLOB NOT NULL
    );
    CREATE UNIQUE INDEX cold_by_place ON cold (statistic, site, first);
    CREATE TABLE pyramid (
        statistic INTEGER NOT NULL, site INTEGER NOT NULL, level INTEGER NOT NULL, first INTEGER NOT NULL,
        numbers BLOB NOT NULL
    );
    CREATE UNIQUE INDEX pyramid_by_place ON pyramid (statistic, site, level, first);
    CREATE TABLE summary (
        sample INTEGER NOT NULL, site INTEGER NOT NULL, normalized_entropy REAL, least_normalized_entropy REAL,
        max_logit REAL, nonfinite_rows INTEGER, PRIMARY KEY (sample, site)
    ) WITHOUT ROWID;
    CREATE TABLE coverage (
        name TEXT NOT NULL, kind TEXT NOT NULL, mode TEXT NOT NULL, reason TEXT, PRIMARY KEY (name, kind, mode)
    );
    CREATE TABLE lost (id INTEGER PRIMARY KEY, step INTEGER, time REAL NOT NULL, samples INTEGER NOT NULL, reason TEXT);
    CREATE TABLE part (name TEXT PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL);
    """,
    "ALTER TABLE site ADD COLUMN first_head INTEGER NOT NULL DEFAULT 0;",
    """
    ALTER TABLE sample ADD COLUMN crc INTEGER;
    ALTER TABLE hot ADD COLUMN crc INTEGER;
    ALTER TABLE chunk ADD COLUMN crc INTEGER;
    ALTER TABLE cold ADD COLUMN crc INTEGER;
    ALTER TABLE pyramid ADD COLUMN crc INTEGER;
    ALTER TABLE summary ADD COLUMN crc INTEGER;
    CREATE TABLE checksum (name TEXT PRIMARY KEY, crc INTEGER NOT NULL);
    """,
    """
    CREATE TABLE verdict (
        laws INTEGER NOT NULL, samples INTEGER NOT NULL, judged INTEGER NOT NULL, numbers BLOB NOT NULL,
        crc INTEGER NOT NULL
    );
    """,
    """
    CREATE TABLE scalar (
        id INTEGER PRIMARY KEY, stretch INTEGER NOT NULL, since INTEGER NOT NULL, span INTEGER NOT NULL,
        name TEXT NOT NULL, numbers BLOB NOT NULL, crc INTEGER NOT NULL
    );
    """,
)
"""What brings a file from version i to i + 1. A migration that was released is never changed: the next one is added."""
VERSION = len(MIGRATIONS)

_COLUMNS = {
    name: ({"TEXT": str, "INTEGER": int, "REAL": float, "BLOB": bytes}[kind], bool(never_null))
    for name, kind, never_null in re.findall(
        r"(\w+) (TEXT|INTEGER|REAL|BLOB)( NOT NULL| PRIMARY KEY)?", " ".join(MIGRATIONS)
    )
}
"""Of the tables, by name: the type of their cells, to which SQLite itself does not hold them, and whether all have one.
"""
_MAY_BE_NULL = {"crc", "step", "reason", "nonfinite_rows", "max_logit"}
_SIGNED = {"step", "first_step", "since", "nonfinite_rows", "exact"}
LATEST = 253_402_300_800.0
"""The end of the year 9999 in seconds since 1970: no date is told beyond."""

FORKED = "this history was opened before the process was forked: open the run again here."

Row = tuple[Any, ...]


class _Connection(sqlite3.Connection):
    """One that weak references may point to."""


_open: weakref.WeakSet[_Connection] = weakref.WeakSet()


def _check_cells(names: Sequence[str], rows: Sequence[Row]) -> None:
    """Raises InputError if a cell of an answer is not of the type that its column was declared with."""
    for name, cells in zip(names, zip(*rows, strict=True), strict=False):
        kind, never_null = _COLUMNS.get(name, (None, False))
        if kind is None:
            continue
        found = {*map(type, cells)} - ({kind} if never_null and name not in _MAY_BE_NULL else {kind, type(None)})
        if found or (
            kind is int and name not in _SIGNED and min((one for one in cells if one is not None), default=0) < 0
        ):
            raise InputError(f"{DAMAGED} {name} is not what it can be.")
        if name in ("time", "began") and not all(0 <= one < LATEST for one in cells):
            raise InputError(f"{DAMAGED} a time is none.")


class Tables:
    """The tables of one fragment, to be read: a connection of its own, or that of a history in memory."""

    def __init__(self, connection: sqlite3.Connection, lock: AbstractContextManager[Any] | None = None) -> None:
        self._connection, self._owned = connection, lock is None
        self._lock = lock or nullcontext()
        self._process = os.getpid()

    def rows(self, question: str, parameters: Sequence[object] = ()) -> list[Row]:
        """What SQL answers."""
        self._check_process()
        try:
            with self._lock:
                answer = self._connection.execute(question, parameters)
                found = answer.fetchall()
        except sqlite3.ProgrammingError as error:
            raise InputError(f"the run was closed: open it again with attemper.open. ({error})") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())  # SQLite shows a table's definition as it was written, in lines
            raise InputError(f"the run cannot be read: {reason}.") from error
        _check_cells([name for name, *_ in answer.description or ()], found)
        return found

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Every question within sees the file as it stood at the first one. A writer in memory waits meanwhile. One may
        hold others."""
        self._check_process()
        with self._lock:
            if not self._owned or self._connection.in_transaction:
                yield
                return
            self._connection.execute("BEGIN")
            try:
                yield
            finally:
                self._connection.execute("ROLLBACK")

    def copy(self, path: Path) -> None:
        """A whole copy of a fragment, also while it is written to, by SQLite's backup."""
        self._check_process()
        target = sqlite3.connect(path)
        try:
            with self._lock:
                self._connection.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")
        finally:
            target.close()

    def close(self) -> None:
        if self._owned and os.getpid() == self._process:
            self._connection.close()

    def _check_process(self) -> None:
        """A copy of the process has copies of locks that nobody will ever give back."""
        if os.getpid() != self._process:
            raise InputError(FORKED)


_ABOUT = {
    "fewest_keys?": (COUNT, None),
    "limits?": ({"sites?": ({str: {str: object}}, None)}, None),
    "thinned?": ({"until_step": int, "largest_spacing": COUNT}, None),
    "unnumbered?": ([int], None),
    "shadowed?": ([{"from_step": int, "shadow": bool}], None),
    "tags?": ([str], None),
    "name?": (str, None),
    "notes?": (str, None),
}


def read_about(tables: Tables) -> dict[str, Any]:
    """What was noted of the run."""
    rows = whole(tables.rows, "about")
    about = {name: parse_json(value, f"{DAMAGED} {clean_name(name)}") for name, value in rows}
    return check_document(about, _ABOUT, "what the run says of itself")


def open_to_write(path: Path, *, write_ahead: bool) -> sqlite3.Connection:
    """The file at ``path``, made if it is not there, with every migration done.

    Args:
        path: of one fragment of a run.
        write_ahead: whether readers may read beside the writer; only on file systems that are known to lock.

    Raises:
        InputError: the file is something else, or of a newer version.
        sqlite3.Error: the disk is full, failed, or refuses locks.
    """
    new = not path.exists() or path.stat().st_size == 0
    connection = _connect(str(path))
    try:
        if not new:
            check_version(connection, path)
        _prepare(connection, new=new, journal="WAL" if write_ahead else "DELETE")
    except BaseException as error:
        connection.close()
        if new:  # half of it, which would be a file of nobody
            for end in ("", "-journal", "-wal", "-shm"):
                path.with_name(f"{path.name}{end}").unlink(missing_ok=True)
        if isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error):
            raise InputError(not_a_run(path)) from error
        raise
    return connection


def open_in_memory() -> sqlite3.Connection:
    """The same tables, which end with their process."""
    connection = _connect(":memory:")
    _prepare(connection, new=True, journal="MEMORY")
    return connection


def open_to_read(path: Path) -> Tables:
    """The same file read-only: beside its writer, or of a run that has ended."""
    try:
        return Tables(_connect_to_read(path))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        damaged = f"{clean_name(path.name)} is a file of an attemper run, but damaged or cut off."
        raise InputError(f"{damaged if is_ours(path) else not_a_run(path)} ({error})") from error


def is_ours(path: Path) -> bool:
    """Whether the first bytes of a file are those of a fragment, whatever became of the others."""
    try:
        with path.open("rb") as file:
            head = file.read(72)
    except OSError:
        return False
    return head.startswith(b"SQLite format 3\0") and int.from_bytes(head[68:72], "big") == APPLICATION


def _connect(name: str, *, uri: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(
        name,
        uri=uri,
        isolation_level=None,
        timeout=PATIENCE_SECONDS,
        check_same_thread=False,
        cached_statements=64,
        factory=_Connection,
    )
    _open.add(connection)
    return connection


def _leave_to_parent() -> None:
    """In a forked child: connections are the parent's. They are not used, and not even closed when Python ends."""
    for connection in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _connect_to_read(path: Path) -> sqlite3.Connection:
    """In a folder that is write-protected SQLite cannot make the files that a write-ahead log needs: where there is no
    log, there is no writer, and the file is opened as one that nobody changes."""
    for options in ("mode=ro", "mode=ro&immutable=1"):
        connection = _connect(f"file:{quote(os.fsencode(path.absolute()))}?{options}", uri=True)
        try:
            connection.execute("PRAGMA query_only = 1")
            connection.execute("PRAGMA mmap_size = 0")
            check_version(connection, path)
        except BaseException as error:
            connection.close()
            unopened = isinstance(error, sqlite3.OperationalError) and path.is_file()
            if "immutable" in options or not unopened:
                raise
            if path.with_name(f"{path.name}-wal").exists():
                raise InputError(
                    f"{clean_name(path.name)} was not closed, and what is in the log beside it cannot be read in a "
                    "write-protected folder: copy the whole folder to where you may write, and open it there."
                ) from error
        else:
            return connection
    raise AssertionError


def _prepare(connection: sqlite3.Connection, *, new: bool, journal: str) -> None:
    connection.execute("PRAGMA mmap_size = 0")  # another process that cuts the file would end this one with SIGBUS
    if new:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # so that a thinned run gives its room back
    migrate(connection)  # before the log: a process that is killed here leaves an empty file, or one with all tables
    connection.execute(f"PRAGMA journal_mode = {journal}")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
    connection.execute(f"PRAGMA journal_size_limit = {4 * LOG_PAGES * PAGE_BYTES}")


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    if path.is_file() and not path.stat().st_size:
        raise InputError(f"{clean_name(path.name)} is empty: the process that made it ended before its first sample.")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise InputError(not_a_run(path))
    if version > VERSION:
        raise InputError(
            f"{clean_name(path.name)} was written by a newer attemper: its version is {version}, and this one reads "
            f"up to {VERSION}. Upgrade attemper: pip install --upgrade attemper."
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Brings the file to ``VERSION``, wholly or not at all: one commit, for which a disk is waited for."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version >= VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in filter(str.strip, ";".join(MIGRATIONS[version:]).split(";")):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def not_a_run(path: Path) -> str:
    """The message about a file that is no fragment."""
    return (
        f"{clean_name(path.name)} is not a file of an attemper run. Name a folder that attemper.watch(store=...) wrote."
    )
