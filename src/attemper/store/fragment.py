"""What one process writes of a run: samples as they come (hot), folded into compressed chunks of 128 (cold).

A sample is one row with every number in it, so that taking it costs the writer one insert. Every 128 samples of the
same sites are folded: for each statistic and site one chunk [128, heads], byte-shuffled and compressed, and beside it
the pyramid: least, mean and largest of 32, 64 and 128 samples, and of 2^k more where there are as many. A reader of
a whole run with 300 columns reads the pyramid and nothing else.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from attemper.store.chunk import DEFAULT_BITS, Values, packed, rounded, unpacked
from attemper.store.pyramid import blocks, pairs, top
from attemper.store.schema import IN_MEMORY, opened_to_write

CHUNK = 128
"""Samples that are folded into one chunk."""
FIRST_LEVEL = 5
"""The pyramid begins at blocks of 2^5 samples: an earlier level would cost more than the data."""
PART = 128
"""How many rows of one part of the pyramid make a row of the part above it."""
PYRAMID_BITS = 10
"""Of the pyramid's numbers: 4.9e-4, less than a pixel."""
SUMMARY = ("normalized_entropy", "max_logit", "nonfinite_rows")
"""Statistics that ``summary`` has per site, for whoever asks in plain SQL."""
THINNED = 4
"""Of how many samples a thinned chunk keeps one."""


@dataclass(frozen=True)
class SiteLabel:
    """A site and what is known of it."""

    name: str
    mode: str
    layer: int | None
    kind: str
    """"self" or "cross"."""
    attention: str
    """"full", "window", "cross", "mla", "sparse" or "sink"."""
    normalizer: str
    heads: int


@dataclass(frozen=True)
class Quantity:
    """A number per head that samples hold."""

    name: str
    unit: str
    exact: bool = False
    """Whether all its bits are kept: counts."""


@dataclass(frozen=True)
class Sample:
    """Every number of one moment of training."""

    step: int
    time: float
    """Seconds since 1970, UTC."""
    sites: tuple[SiteLabel, ...]
    values: Values
    """[quantities, heads of all sites one after another] float32; NaN where a number is missing."""


class Fragment:
    """The file of one process. Not safe for threads: its writer has one."""

    def __init__(
        self,
        path: Path,
        quantities: Sequence[Quantity],
        *,
        bits: int | None = DEFAULT_BITS,
        write_ahead: bool = True,
        max_bytes: int | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """Opens or makes the file and begins a segment in it.

        Raises:
            InputError: the file is something else, or of a newer version.
            sqlite3.Error: the disk is full, failed, or refuses locks.
        """
        self.path = path
        self.quantities = tuple(quantities)
        self._bits, self._max_bytes = bits, max_bytes
        self._connection = opened_to_write(path, write_ahead=write_ahead)
        self._file = file_identity(path)
        self._sites: dict[SiteLabel, int] = {}
        self._layouts: dict[tuple[SiteLabel, ...], int] = {}
        self._last_layout: tuple[int, tuple[SiteLabel, ...]] | None = None
        self.thinned = False
        """Whether older samples were thinned to stay below ``max_bytes``."""
        with self._transaction() as connection:
            self._ids = [self._quantity(connection, quantity) for quantity in self.quantities]
            self._segment = connection.execute(
                "INSERT INTO segment (began, process, versions) VALUES (?, ?, ?)",
                (time.time(), os.getpid(), json.dumps(dict(versions or {}))),
            ).lastrowid
            (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM sample").fetchone()
            (self.last_step,) = connection.execute("SELECT step FROM sample WHERE id = ?", (last,)).fetchone() or (None,)
            self._fold(connection)  # what an earlier process left
        self._next, self._hot = last + 1, 0

    def describe(self, about: Mapping[str, object]) -> None:
        """Keeps what is known of the run: its name, tags, notes, the model's configuration."""
        rows = [(name, json.dumps(value, ensure_ascii=False)) for name, value in about.items()]
        with self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    def cover(self, sites: Mapping[tuple[str, str], str | None]) -> None:
        """Keeps which sites (name, mode) were expected: None for one that is read, else why it is not."""
        rows = [(*site, reason) for site, reason in sites.items()]
        with self._transaction() as connection:
            connection.executemany("INSERT OR REPLACE INTO coverage VALUES (?, ?, ?)", rows)

    def lose(self, samples: int, step: int | None, reason: str) -> None:
        """Keeps that samples are missing, and why."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO lost (step, time, samples, reason) VALUES (?, ?, ?, ?)",
                (step, time.time(), samples, reason),
            )

    def append(self, sample: Sample) -> None:
        """Takes one sample; when this returns, a killed process no longer loses it.

        Raises:
            OSError: the file is gone.
            sqlite3.Error: the disk is full or failed. Nothing of the sample is kept then.
        """
        if file_identity(self.path) != self._file:
            raise FileNotFoundError(f"{self.path.name} is gone: it was moved or deleted while it was written to")
        numbers = np.stack(
            [
                rounded(row, None if quantity.exact else self._bits)
                for row, quantity in zip(sample.values, self.quantities, strict=True)
            ]
        )
        with self._transaction() as connection:
            layout = self._layout(connection, sample.sites)
            if self._last_layout is not None and self._last_layout[0] != layout:
                self._fold(connection)
            self._last_layout = (layout, sample.sites)
            connection.execute(
                "INSERT INTO sample VALUES (?, ?, ?, ?, ?)",
                (self._next, self._segment, sample.step, sample.time, layout),
            )
            connection.execute("INSERT INTO hot VALUES (?, ?)", (self._next, numbers.tobytes()))
            connection.executemany("INSERT INTO summary VALUES (?, ?, ?, ?, ?, ?)", self._summary(sample, numbers))
        self._next += 1
        self._hot += 1

    def fold(self) -> bool:
        """Folds the hot samples where there are enough of them; whether it did."""
        if self._hot < CHUNK:
            return False
        with self._transaction() as connection:
            self._fold(connection)
        if self._max_bytes is not None and self._bytes() > self._max_bytes:
            self._thin()
        return True

    def close(self) -> None:
        """Ends the file. Samples that make no whole chunk stay as they are."""
        self._connection.close()

    # --- within a transaction ---

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._sites, self._layouts, self._last_layout = {}, {}, None  # they may name rows that are not there
            raise

    def _quantity(self, connection: sqlite3.Connection, quantity: Quantity) -> int:
        connection.execute(
            "INSERT OR IGNORE INTO statistic (name, unit, exact) VALUES (?, ?, ?)",
            (quantity.name, quantity.unit, int(quantity.exact)),
        )
        return connection.execute("SELECT id FROM statistic WHERE name = ?", (quantity.name,)).fetchone()[0]

    def _site(self, connection: sqlite3.Connection, label: SiteLabel) -> int:
        if label not in self._sites:
            names = ", ".join(part.name for part in fields(SiteLabel))
            connection.execute(
                f"INSERT INTO site ({names}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name, mode) DO UPDATE SET "
                "layer = excluded.layer, kind = excluded.kind, attention = excluded.attention, "
                "normalizer = excluded.normalizer, heads = max(heads, excluded.heads)",
                astuple(label),
            )
            found = connection.execute("SELECT id FROM site WHERE name = ? AND mode = ?", (label.name, label.mode))
            self._sites[label] = found.fetchone()[0]
        return self._sites[label]

    def _layout(self, connection: sqlite3.Connection, sites: tuple[SiteLabel, ...]) -> int:
        if sites not in self._layouts:
            heads = [[self._site(connection, label), label.heads] for label in sites]
            text = json.dumps({"statistics": self._ids, "sites": heads})
            connection.execute("INSERT OR IGNORE INTO layout (content) VALUES (?)", (text,))
            found = connection.execute("SELECT id FROM layout WHERE content = ?", (text,))
            self._layouts[sites] = found.fetchone()[0]
        return self._layouts[sites]

    def _summary(self, sample: Sample, numbers: Values) -> Iterator[tuple[object, ...]]:
        """(sample, site, mean and least normalised entropy, largest logit, rows that are not finite) of each site."""
        places = {quantity.name: place for place, quantity in enumerate(self.quantities)}
        entropy, logit, nonfinite = (numbers[places[name]] if name in places else None for name in SUMMARY)
        for label, heads in zip(sample.sites, places_of(sample.sites), strict=True):
            yield (
                self._next,
                self._sites[label],
                _known(entropy, heads, np.mean),
                _known(entropy, heads, np.min),
                _known(logit, heads, np.max),
                _known(nonfinite, heads, np.sum),
            )

    def _fold(self, connection: sqlite3.Connection) -> None:
        """All hot samples into chunks; every run of them that has one segment and one layout into its own."""
        rows = connection.execute(
            "SELECT hot.sample, segment, content, numbers FROM hot JOIN sample ON sample.id = hot.sample "
            "JOIN layout ON layout.id = layout ORDER BY hot.sample"
        ).fetchall()
        start = 0
        for end in range(1, len(rows) + 1):
            if end == len(rows) or end - start == CHUNK or rows[end][1:3] != rows[start][1:3]:
                self._fold_alike(connection, rows[start][0], json.loads(rows[start][2]), [r[3] for r in rows[start:end]])
                start = end
        connection.execute("DELETE FROM hot")
        self._hot = 0

    def _fold_alike(
        self, connection: sqlite3.Connection, first: int, layout: dict[str, Any], hot: list[bytes]
    ) -> None:
        """Samples of one layout, from ``first`` on, into one chunk for each statistic and site."""
        statistics, start = layout["statistics"], 0
        numbers = np.stack([np.frombuffer(row, "<f4") for row in hot]).reshape(len(hot), len(statistics), -1)
        for site, heads in layout["sites"]:
            for place, statistic in enumerate(statistics):
                values = numbers[:, place, start : start + heads]
                connection.execute(
                    "INSERT INTO cold VALUES (?, ?, ?, 1, ?)", (statistic, site, first, packed(values))
                )
                lowest, _ = blocks(values, 1 << FIRST_LEVEL)
                self._pyramid_row(connection, (statistic, site, FIRST_LEVEL), first, lowest)
                self._pyramid_part(connection, (statistic, site, FIRST_LEVEL))
            start += heads

    def _pyramid_row(
        self, connection: sqlite3.Connection, place: tuple[int, int, int], first: int, found: Values
    ) -> None:
        data = packed(rounded(found, PYRAMID_BITS))
        connection.execute("INSERT INTO pyramid VALUES (?, ?, ?, ?, ?)", (*place, first, data))

    def _pyramid_part(self, connection: sqlite3.Connection, place: tuple[int, int, int]) -> None:
        """Joins the last ``PART`` rows of a part to a row of the part above it, where there are as many new ones."""
        condition = "FROM pyramid WHERE statistic = ? AND site = ? AND level = ?"
        (rows,) = connection.execute(f"SELECT count(*) {condition}", place).fetchone()
        if rows % PART:
            return
        found = connection.execute(f"SELECT first, numbers {condition} ORDER BY first DESC LIMIT {PART}", place)
        below = [(first, unpacked(data)) for first, data in reversed(found.fetchall())]
        tops = [top(values.reshape(len(values), 3, -1)) for _, values in below]
        # A chunk that ended early counts by its blocks.
        counts = np.array([float(len(values)) for _, values in below])
        joined, _ = pairs(np.stack(tops), counts)
        statistic, site, level = place
        above = (statistic, site, level + (len(below[0][1]) - 1).bit_length() + 1)
        self._pyramid_row(connection, above, below[0][0], joined)
        self._pyramid_part(connection, above)

    # --- room ---

    def _bytes(self) -> int:
        """Of the file, but for pages that are free to be written again."""
        pages, free, size = (
            self._connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size

    def _thin(self) -> None:
        """Keeps one of four samples in the oldest chunks until the file is small enough; the pyramid stays whole."""
        self.thinned = True
        firsts = self._connection.execute("SELECT every, first FROM cold GROUP BY every, first ORDER BY every, first")
        for every, first in firsts.fetchall():
            with self._transaction() as connection:
                self._thin_chunk(connection, every, first)
            if self._max_bytes is None or self._bytes() <= self._max_bytes:
                break
        self._connection.execute("PRAGMA incremental_vacuum")

    def _thin_chunk(self, connection: sqlite3.Connection, every: int, first: int) -> None:
        rows = connection.execute("SELECT rowid, numbers FROM cold WHERE first = ? AND every = ?", (first, every))
        for row, data in rows.fetchall():
            values = unpacked(data)[::THINNED]
            connection.execute(
                "UPDATE cold SET every = ?, numbers = ? WHERE rowid = ?", (every * THINNED, packed(values), row)
            )


def _known(values: Values | None, heads: slice, reduce: Callable[[Values], np.floating]) -> float | None:
    """One number of a site's heads, those that are missing left out; None where all are."""
    if values is None:
        return None
    known = values[heads][~np.isnan(values[heads])]
    return float(reduce(known)) if known.size else None


def places_of(sites: Sequence[SiteLabel]) -> Iterator[slice]:
    """Where each site's heads stand among all."""
    start = 0
    for site in sites:
        yield slice(start, start + site.heads)
        start += site.heads


def file_identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another of the same name; None where there is none."""
    if path == IN_MEMORY:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
