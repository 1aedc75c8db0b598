"""What one process writes of a run: samples as they come (hot), folded into compressed chunks of 128 (cold).

A sample is one row with every number in it, so that taking it costs the writer one insert. Samples are numbered from 0;
when 128 numbers are complete they are folded: for each statistic and site one chunk [samples, heads], byte-shuffled and
compressed, and blocks of the pyramid. A chunk holds the samples of its span whose layout has the site: which ones says
the table ``sample``.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from attemper.readings.sample import QUANTITIES, Quantity, Sample, SiteKey, SiteLabel
from attemper.store.checksum import WHOLE, get, put, seal, whole
from attemper.store.compaction import CHUNK, COUNTS, REST, as_kept, fold, round_bits, split_counts, thin
from attemper.store.scalars import OpenBlocks, Steps
from attemper.store.scalars import thin as thin_scalars
from attemper.store.schema import Tables, open_in_memory, open_to_read, open_to_write
from attemper.store.store import DEFAULT_BITS, MANTISSA, WORDS, sentence, to_json

logger = logging.getLogger("attemper")

_LABEL = ", ".join(part.name for part in fields(SiteLabel))
VACUUM_PAGES = 4096
"""Free pages that are given back at once when a file is closed."""


class Fragment:
    """The tables of one process, to be written. Its methods are called from one thread at a time."""

    def __init__(
        self,
        path: Path | None,
        *,
        rank: int = 0,
        bits: int | None = DEFAULT_BITS,
        max_bytes: int | None = None,
        versions: Mapping[str, str] | None = None,
        write_ahead: bool = True,
    ) -> None:
        """Opens or makes the file and begins a segment in it; None for a history in memory.

        Raises:
            InputError: the file is something else, or of a newer version.
            OSError, sqlite3.Error: the disk is full, failed, or refuses locks.
        """
        self.path = path
        self._bits = None if bits is None or bits >= MANTISSA else bits
        self._max_bytes, self._rank = max_bytes, rank
        self._versions = json.dumps(dict(versions or {}))
        self.lock = threading.RLock()
        """Held while a history in memory is read or written."""
        self.connection = open_to_write(path, write_ahead=write_ahead) if path else open_in_memory()
        self._file = _identity(path)
        self.unchecked = False
        """Whether it was made of parts without checksums."""
        self.thinned = False
        """Whether older samples were thinned to stay below ``max_bytes``."""
        self._scalars = OpenBlocks()
        self.unpublished: list[tuple[int, Mapping[str, float]]] | None = None
        """Numbers of steps that no part has yet; None where there are no parts."""
        try:
            for table in WHOLE:
                whole(self.connection.execute, table)
            with self.transaction(*WHOLE) as connection:
                found = get(connection.execute, "sample", "ORDER BY id DESC LIMIT 1")
                self._next, self.last_step = (found[0][0] + 1, found[0][2]) if found else (0, None)
                self._segment = self._new_segment(None)
                self._segment_step: int | None = None  # the last one of this segment
            self._fold()  # what a process that was killed left
        except BaseException:
            self.connection.close()
            raise

    # --- what is kept ---

    def append(self, sample: Sample) -> None:
        """Takes one sample; when this returns, a killed process no longer loses it.

        Raises:
            OSError: the file is gone.
            sqlite3.Error: the disk is full or failed. Nothing of the sample is kept then.
        """
        if self.path is not None and _identity(self.path) != self._file:
            raise FileNotFoundError(f"{self.path.name} is gone: it was moved or deleted while it was written to")
        taken, sample = sample, split_counts(sample)
        numbers = round_bits(as_kept(sample, self._bits).values, None)
        with self.transaction() as connection:
            segment = self._segment_of(sample)
            layout, sites = self._layout(sample)
            row = (self._next, segment, sample.step, float(sample.time), sample.tokens, layout)
            put(connection, "sample", [row])
            put(connection, "hot", [(self._next, numbers.tobytes())])
            numbers_of = [[self._next] * len(sites), sites, *summary(taken, numbers)]
            put(connection, "summary", zip(*numbers_of, strict=True))
        self._segment, self._segment_step, self.last_step = segment, sample.step, sample.step
        self._next += 1

    def fold(self) -> bool:
        """Folds what is complete, and thins a run that has grown too large; whether there was anything to fold."""
        if self._next % CHUNK or not self._fold():
            return False
        if self._max_bytes is not None and self.bytes_used > self._max_bytes:
            self._thin(self._max_bytes)
        return True

    def keep_scalars(self, steps: Steps) -> None:
        """Keeps numbers of steps by their names. A step that is not above the last one replaces all from there on; one
        without a number replaces all above it.
        """
        with self.transaction() as connection:
            scalars = self._scalars.after(connection, steps)
        self._scalars = scalars
        if self.unpublished is not None:
            self.unpublished += steps
        if self._max_bytes is not None and self.bytes_used > self._max_bytes:
            self._thin(self._max_bytes)

    def describe(self, about: Mapping[str, object]) -> None:
        """Keeps what is known of the run: name, tags, notes, the model's configuration. Paths lose their folders."""
        rows = [(name, to_json(value, folders=name in WORDS)) for name, value in about.items()]
        with self.transaction("about") as connection:
            connection.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    def cover(self, sites: Mapping[SiteKey, str | None]) -> None:
        """Keeps which sites were expected: None for one that is read, else the reason why it is not."""
        rows = [(*site, reason and sentence(reason)) for site, reason in sites.items()]
        with self.transaction("coverage") as connection:
            connection.executemany("INSERT OR REPLACE INTO coverage VALUES (?, ?, ?, ?)", rows)

    def lose(self, samples: int, step: int | None, reason: str) -> None:
        """Keeps that samples are missing, and why."""
        row = (step, time.time(), samples, sentence(reason))
        with self.transaction("lost") as connection:
            connection.execute("INSERT INTO lost (step, time, samples, reason) VALUES (?, ?, ?, ?)", row)

    def note_part(self, name: str, first: int, last: int) -> None:
        """Keeps that samples were published."""
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO part VALUES (?, ?, ?)", (name, first, last))

    def enter_segment(self, told: Mapping[str, object]) -> None:
        """The next sample belongs to a segment of another process. ``told``: the columns of its row."""
        names = ("began", "rank", "process", "versions")
        row = tuple(told[name] for name in names)
        condition = " AND ".join(f"{name} = ?" for name in names)
        with self.transaction() as connection:
            found = connection.execute(f"SELECT id FROM segment WHERE {condition}", row).fetchone()
            if found is None:
                self._segment_step = None
                self._segment = self._insert(f"segment (first_sample, {', '.join(names)})", (self._next, *row))

    def close(self, deadline: float = float("inf")) -> None:
        """Ends the file: no log is left beside it, and no free room if there is time until ``deadline`` (monotonic).

        Samples that make no whole chunk stay hot.
        """
        if self.path is None:
            return
        with suppress(sqlite3.Error):
            while self._pragma("freelist_count") and time.monotonic() < deadline:
                self.connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        with suppress(sqlite3.Error):  # a reader that is open keeps the log where it is
            self.connection.execute("PRAGMA busy_timeout = 0")
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # the file itself is whole then
            self.connection.execute("PRAGMA journal_mode = DELETE")
        self.connection.close()

    def tables(self) -> Tables:
        """To be read, also while this is written to."""
        return Tables(self.connection, self.lock) if self.path is None else open_to_read(self.path)

    @property
    def bytes_used(self) -> int:
        """Of the file, but for pages that are free to be written again."""
        return (self._pragma("page_count") - self._pragma("freelist_count")) * self._pragma("page_size")

    # --- within a transaction ---

    @contextmanager
    def transaction(self, *changed: str) -> Iterator[sqlite3.Connection]:
        """All or nothing of what is written within. ``changed``: tables of ``WHOLE`` beside those of ``_insert``."""
        with self.lock:
            self._changed = {*changed}
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
                seal(self.connection, self._changed)
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                for name in ("_statistics", "_sites", "_layouts"):  # numbers of rows that may not have been kept
                    self.__dict__.pop(name, None)
                raise

    def _segment_of(self, sample: Sample) -> int:
        """The segment that a sample belongs to: a new one where steps go backwards."""
        if self._segment_step is None:
            self._changed.add("segment")
            self.connection.execute(
                "UPDATE segment SET first_sample = ?, first_step = ? WHERE id = ?",
                (self._next, sample.step, self._segment),
            )
        elif sample.step < self._segment_step:
            return self._new_segment(sample.step)
        return self._segment

    def _new_segment(self, first_step: int | None) -> int:
        row = (self._next, first_step, time.time(), self._rank, os.getpid(), self._versions)
        return self._insert("segment (first_sample, first_step, began, rank, process, versions)", row)

    @cached_property
    def _statistics(self) -> dict[str, int]:
        return dict(self.connection.execute("SELECT name, id FROM statistic"))

    @cached_property
    def _sites(self) -> dict[SiteLabel, int]:
        rows = self.connection.execute(f"SELECT {_LABEL}, id FROM site ORDER BY id")
        return {SiteLabel(*row[:-1]): row[-1] for row in rows}

    @cached_property
    def _layouts(self) -> dict[tuple[tuple[str, ...], tuple[SiteLabel, ...]], tuple[int, list[int]]]:
        """Of samples that this process took: layout and its sites."""
        return {}

    def _layout(self, sample: Sample) -> tuple[int, list[int]]:
        key = sample.quantities, sample.sites
        if key not in self._layouts:
            statistics = [self._statistic(name) for name in sample.quantities]
            sites = [self._site(label) for label in sample.sites]
            content = json.dumps(statistics), json.dumps(sites)
            found = self.connection.execute("SELECT id FROM layout WHERE statistics = ? AND sites = ?", content)
            (number,) = found.fetchone() or (None,)
            if number is None:
                number = self._insert("layout (statistics, sites)", content)
            self._layouts[key] = number, sites
        return self._layouts[key]

    def _statistic(self, name: str) -> int:
        if name not in self._statistics:
            quantity = QUANTITIES.get(name) or Quantity(name, "", exact=name.endswith(REST))
            self._statistics[name] = self._insert("statistic (name, unit, exact)", astuple(quantity))
        return self._statistics[name]

    def _site(self, label: SiteLabel) -> int:
        if label not in self._sites:
            self._sites[label] = self._insert(f"site ({_LABEL})", astuple(label))
        return self._sites[label]

    def _insert(self, into: str, row: tuple[object, ...]) -> int:
        self._changed.add(into.split()[0])
        places = ", ".join("?" * len(row))
        number = self.connection.execute(f"INSERT INTO {into} VALUES ({places})", row).lastrowid
        assert number is not None
        return number

    # --- room ---

    def _fold(self) -> bool:
        """Folds every complete 128 that are hot."""
        (oldest,) = self.connection.execute("SELECT min(sample) FROM hot").fetchone()
        if oldest is None:
            return False
        firsts = range(oldest - oldest % CHUNK, self._next - CHUNK + 1, CHUNK)
        for first in firsts:
            with self.transaction() as connection:
                fold(connection, first)
        return bool(firsts)

    def _thin(self, most: int) -> None:
        """Thins the oldest samples until the file is small enough, or until nothing is left that could be thinned."""
        while self.bytes_used > most:
            with self.transaction("about") as connection:
                samples = thin(connection, self._next)
                if not (thin_scalars(connection, most, self._scalars.rows) or samples):
                    break
                if samples:
                    self._note_thinned(connection)
            self._say_thinned(most)
        spare = self._pragma("page_count") - most // self._pragma("page_size")
        if spare > 0:
            with self.lock:
                self.connection.execute(f"PRAGMA incremental_vacuum({spare})").fetchall()

    def _note_thinned(self, connection: sqlite3.Connection) -> None:
        """Keeps in the file up to which step samples are missing, and of how many one is left where fewest are."""
        step, spacing = connection.execute(
            "SELECT max(step), max(span) / :chunk FROM chunk JOIN sample ON id >= first AND id < first + span "
            "WHERE span > :chunk",
            {"chunk": CHUNK},
        ).fetchone()
        row = ("thinned", to_json({"until_step": step, "largest_spacing": spacing}))
        connection.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", row)

    def _say_thinned(self, most: int) -> None:
        if not self.thinned:
            where = "in memory has reached" if self.path is None else f"of {self.path.name} has reached max_bytes,"
            logger.info(
                "attemper: the history %s %.1f MB: its oldest samples are thinned. The least, mean and largest value "
                "of removed samples are kept.",
                where,
                most / 1e6,
            )
        self.thinned = True

    def _pragma(self, name: str) -> int:
        with self.lock:
            return self.connection.execute(f"PRAGMA {name}").fetchone()[0]


def _identity(path: Path | None) -> tuple[int, int] | None:
    """What tells a file from another of the same name; None where there is none."""
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return found and (found.st_dev, found.st_ino)


def summary(sample: Sample, numbers: np.ndarray) -> list[list[float]]:
    """Of each site: mean and least normalized entropy, largest logit, rows that are not finite. NaN where unknown."""
    starts = np.cumsum([0, *(site.heads for site in sample.sites[:-1])])
    missing = np.full(len(sample.sites), np.nan)

    def of(name: str, reduction: np.ufunc) -> np.ndarray:
        if name not in sample.quantities:
            return missing
        row = sample.quantities.index(name)
        return reduction.reduceat((sample.values if name in COUNTS else numbers)[row].astype(np.float64), starts)

    entropy = of("normalized_entropy", np.fmin)
    return [
        column.tolist()
        for column in (_means(sample, numbers, starts), entropy, of("max_logit", np.fmax), of("nonfinite_rows", np.add))
    ]


def _means(sample: Sample, numbers: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """[sites] mean normalized entropy of the heads that have one."""
    if "normalized_entropy" not in sample.quantities:
        return np.full(len(starts), np.nan)
    entropy = numbers[sample.quantities.index("normalized_entropy")].astype(np.float64)
    known = ~np.isnan(entropy)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.add.reduceat(np.where(known, entropy, 0.0), starts) / np.add.reduceat(
            known.astype(np.float64), starts
        )
