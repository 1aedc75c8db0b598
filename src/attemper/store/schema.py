"""Tables of a run's file, made by numbered migrations, and how such a file is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

from attemper.errors import InputError

APPLICATION = 0x61747472
"""SQLite's mark of whose file it is: "attr"."""
PAGE_BYTES = 1024
"""A chunk ends somewhere in its last page: with pages of 4,096 bytes that would cost a tenth of a small run."""

MIGRATIONS = (
    """
    CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    CREATE TABLE segment (id INTEGER PRIMARY KEY, began REAL NOT NULL, process INTEGER NOT NULL, versions TEXT);
    CREATE TABLE statistic (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, unit TEXT NOT NULL, exact INTEGER);
    CREATE TABLE site (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, mode TEXT NOT NULL, layer INTEGER, kind TEXT NOT NULL,
        attention TEXT NOT NULL, normalizer TEXT NOT NULL, heads INTEGER NOT NULL, UNIQUE (name, mode)
    );
    CREATE TABLE layout (id INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE);
    CREATE TABLE sample (
        id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL,
        layout INTEGER NOT NULL
    );
    CREATE INDEX sample_by_step ON sample (step);
    CREATE TABLE hot (sample INTEGER PRIMARY KEY, numbers BLOB NOT NULL);
    CREATE TABLE cold (
        statistic INTEGER NOT NULL, site INTEGER NOT NULL, first INTEGER NOT NULL, every INTEGER NOT NULL,
        numbers BLOB NOT NULL
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
    CREATE TABLE coverage (site TEXT NOT NULL, mode TEXT NOT NULL, reason TEXT, PRIMARY KEY (site, mode));
    CREATE TABLE lost (id INTEGER PRIMARY KEY, step INTEGER, time REAL NOT NULL, samples INTEGER NOT NULL, reason TEXT);
    """,
)
"""What brings a file from version i to i + 1. A migration that was released is never changed: the next one is added."""
VERSION = len(MIGRATIONS)


IN_MEMORY = Path(":memory:")
"""In the place of a path: a history that ends with its process."""


def opened_to_write(path: Path, *, write_ahead: bool) -> sqlite3.Connection:
    """The file at ``path``, made if it is not there, with every migration done.

    Args:
        path: of one fragment of a run.
        write_ahead: whether readers may read beside the writer; only on file systems that are known to lock.

    Raises:
        InputError: the file is something else, or of a newer version.
        sqlite3.Error: the disk is full, failed, or refuses locks.
    """
    new = not path.exists() or path.stat().st_size == 0
    connection = sqlite3.connect(path, isolation_level=None, timeout=5.0, check_same_thread=False)
    try:
        connection.execute("PRAGMA mmap_size = 0")
        if new:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # so that a thinned run gives its room back
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
        else:
            check_version(connection, path)
        connection.execute(f"PRAGMA journal_mode = {'WAL' if write_ahead else 'DELETE'}")
        connection.execute("PRAGMA synchronous = NORMAL")
        migrate(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.DatabaseError) and "not a database" in str(error):
            raise InputError(not_a_run(path)) from error
        raise
    return connection


def opened_to_read(path: Path) -> sqlite3.Connection:
    """The same file read-only: beside its writer, or of a run that has ended.

    Raises:
        InputError: the file is missing, something else, damaged, or of a newer version.
    """
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=5.0, isolation_level=None)
        connection.execute("PRAGMA query_only = 1")
        check_version(connection, path)
    except sqlite3.Error as error:
        raise InputError(f"{not_a_run(path)} ({error})") from error
    return connection


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Refuses a file that is not ours, or of a version that is newer than this attemper."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise InputError(not_a_run(path))
    if version > VERSION:
        raise InputError(
            f"{path.name} was written by a newer attemper: its version is {version}, and this one reads up to "
            f"{VERSION}. Upgrade attemper: pip install --upgrade attemper."
        )


def migrate(connection: sqlite3.Connection) -> None:
    """Brings the file to ``VERSION``, each step whole or not at all."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    for number, statements in enumerate(MIGRATIONS[version:], version + 1):
        connection.executescript(f"BEGIN IMMEDIATE; {statements}; PRAGMA user_version = {number}; COMMIT;")


def not_a_run(path: Path) -> str:
    return f"{path.name} is not a file of an attemper run. Name a folder that attemper.watch(store=...) wrote."
