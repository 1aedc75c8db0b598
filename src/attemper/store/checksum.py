"""Checksums of what a fragment holds: a damaged row is an error, never another number.

A row of samples and their numbers ends with its own CRC-32. Small tables, which say what the numbers mean, have one for
all of their rows together, in the table ``checksum``: so a row that is gone is seen as well. Files of an earlier
version have none, and are read without.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from attemper.errors import InputError

DAMAGED = "the run cannot be read: its file is damaged,"
"""How messages begin about what a file says."""
Ask = Callable[..., Iterable[tuple[Any, ...]]]
"""``Tables.rows``, or ``execute`` of a connection."""
NUMBERS = {
    "sample": "<qqqdqq",
    "hot": "<q",
    "chunk": "<qq",
    "cold": "<qqq",
    "pyramid": "<qqqq",
    "summary": "<qq4d",
    "verdict": "<qqq",
    "scalar": "<qqqq",
}
"""Table whose rows end with a checksum -> its numbers, as ``struct`` has them. Bytes follow where there are any."""
_ROWS = {
    table: (struct.Struct(form), len(struct.unpack(form, bytes(struct.calcsize(form)))))
    for table, form in NUMBERS.items()
}
WHOLE = ("about", "segment", "statistic", "site", "layout", "coverage", "lost")
"""Tables that have one checksum, in the order of their rows."""
CHECKED_VERSION = 3
"""The first version of a file that has checksums."""
JUDGED_VERSION = 4
"""The first version that may keep what was judged."""
SCALARS_VERSION = 5
"""The first version that may have numbers of every step."""
UNCHECKED = "written by an earlier attemper, without checksums: damage to that may go unseen"

_BEHIND = {"sample": 0, "summary": 0, "scalar": 2}
"""Columns behind the numbers and before the checksum: one with bytes, but in these."""
_WIDTHS = {table: many + _BEHIND.get(table, 1) for table, (_, many) in _ROWS.items()}


def damage(what: str) -> InputError:
    """The error about a file that was changed by nobody's will."""
    return InputError(f"{DAMAGED} {what}.")


def checksum(table: str, row: tuple[Any, ...]) -> int:
    """CRC-32 of a row: its numbers as little-endian int64 and float64, NaN for NULL, and the bytes behind them; of text
    its UTF-8.
    """
    form, many = _ROWS[table]
    rest = (part.encode() if isinstance(part, str) else part for part in row[many:])
    return zlib.crc32(b"".join(rest), zlib.crc32(form.pack(*row[:many])))


def whole_checksum(rows: list[tuple[Any, ...]]) -> int:
    """CRC-32 of all rows of a table, as JSON: ``repr`` of a text is not the same on every version of Python."""
    return zlib.crc32(json.dumps(rows, default=repr).encode())


def put(connection: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]], otherwise: str = "") -> None:
    """Adds rows with their checksums. ``otherwise``: what to do where a row is there."""
    places = ", ".join("?" * (_WIDTHS[table] + 1))
    summed = [(*row, checksum(table, row)) for row in rows]
    connection.executemany(f"INSERT INTO {table} VALUES ({places}) {otherwise}", summed)


def get(ask: Ask, table: str, where: str, parameters: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
    """Rows of a table, each without its checksum, which it fits."""
    return [check(table, row) for row in ask(f"SELECT * FROM {table} {where}", parameters)]


def check(table: str, row: tuple[Any, ...], place: tuple[object, ...] = ()) -> tuple[Any, ...]:
    """A row without its checksum. ``place``: what it must begin with: a damaged index leads to another row.

    Raises:
        InputError: it does not fit its checksum, or is another one.
    """
    values = row[: _WIDTHS[table]]
    known = row[len(values) :]
    try:
        told = tuple(math.nan if value is None else value for value in values)
        fits = values[: len(place)] == place and known in ((), (None,), (checksum(table, told),))
    except (struct.error, TypeError):  # no number, or no bytes
        fits = False
    if not fits:
        raise damage(f"a row of its table {table} does not fit its checksum")
    return values


def has_unchecked(ask: Ask) -> bool:
    """Whether samples, hot or cold, are there without checksums."""
    ((version,),) = ask("PRAGMA user_version")
    if version < CHECKED_VERSION:
        return True
    ((found,),) = ask("SELECT EXISTS (SELECT 1 FROM chunk WHERE crc IS NULL UNION SELECT 1 FROM hot WHERE crc IS NULL)")
    return bool(found)


def whole(ask: Ask, table: str) -> list[tuple[Any, ...]]:
    """All rows of one of ``WHOLE``, which fit the checksum of the table."""
    ((version,),) = ask("PRAGMA user_version")
    if version < CHECKED_VERSION:
        return list(ask(f"SELECT * FROM {table} ORDER BY rowid"))
    # One question for rows and checksum, since a writer may be between two.
    sums = "SELECT crc FROM checksum WHERE name = ?"
    summed = list(ask(f"SELECT *, ({sums}) FROM {table} ORDER BY rowid", (table,)))
    known = summed or list(ask(f"{sums} AND NOT EXISTS (SELECT 1 FROM {table})", (table,)))
    rows = [row[:-1] for row in summed]
    if known and known[0][-1] not in (None, whole_checksum(rows)):
        raise damage(f"its table {table} does not fit its checksum")
    return rows


def seal(connection: sqlite3.Connection, tables: Iterable[str]) -> None:
    """Keeps the checksums of tables as they are now. Within a transaction."""
    for table in tables:
        rows = connection.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall()
        connection.execute("INSERT OR REPLACE INTO checksum VALUES (?, ?)", (table, whole_checksum(rows)))
