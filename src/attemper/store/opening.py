"""How the file of a run is opened to be written: at once, or as soon as the disk takes it."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from attemper.errors import InputError
from attemper.store.earlier import Earlier
from attemper.store.fragment import Fragment
from attemper.store.lock import Lock
from attemper.store.parts import Parts
from attemper.store.place import UNNOTED, Place, lost_beside, place_of
from attemper.store.schema import Tables, open_to_read
from attemper.store.store import Store

logger = logging.getLogger("attemper")

MAY_END = (OSError, sqlite3.OperationalError)
"""What may end by itself: a disk that is full, a folder that is read-only, a lock that somebody holds."""


class Opening:
    """Opens the file of a rank. What is done when the disk fails is not done again."""

    def __init__(self, options: Store, rank: int, versions: Mapping[str, str] | None) -> None:
        self._options, self._rank, self._versions = options, rank, versions
        self._place: Place | None = None
        self._lock: Lock | None = None
        self._known = False
        where = str(options.path) if options.is_url else os.path.realpath(options.path)
        self.target = where, rank
        """What tells the file from those of other runs and ranks of this process."""
        self.last_step: int | None = None
        """Of the last sample that the file had before."""
        self.earlier: Earlier | None = None
        """What it held then."""

    @property
    def path(self) -> Path | None:
        """Of the file; None where no folder could be made for it."""
        return None if self._place is None else self._place.folder / f"fragment-{self._rank}.sqlite"

    def open(self) -> tuple[Fragment, Parts | None]:
        """The file, to be written, and what publishes it.

        Raises:
            OSError, sqlite3.OperationalError: the disk does not take it now. It may be asked for again.
            LockHeldError: another writer has it.
            InputError: it is something else, of a newer version, or has samples that were not known when it was asked
                for first.
        """
        if self._place is None:
            self._place = place_of(self._options, self._rank)
        path = self.path
        assert path is not None
        if self._lock is None:
            self._lock = Lock(path.with_suffix(".lock"))
        try:
            return self._open(path, self._place)
        except MAY_END:
            if not self._known:
                with suppress(InputError):  # there is none, or it cannot be read now
                    self._note_earlier(open_to_read(path))
            self._known = True
            raise

    def release(self) -> None:
        """Lets others write the file. Twice is once."""
        if self._lock is not None:
            self._lock.release()

    def _open(self, path: Path, place: Place) -> tuple[Fragment, Parts | None]:
        fragment = Fragment(
            path,
            rank=self._rank,
            bits=self._options.bits,
            max_bytes=self._options.max_bytes,
            versions=self._versions,
            write_ahead=place.write_ahead,
        )
        try:
            for beside, samples in lost_beside(path):
                fragment.lose(samples, fragment.last_step, UNNOTED)
                beside.unlink(missing_ok=True)
            if self._known and fragment.last_step != self.last_step:
                raise InputError(f"{path.name} has samples to step {fragment.last_step} that could not be read before")
            self._note_earlier(Tables(fragment.connection, fragment.lock))
            parts = None if place.target is None else Parts(fragment, place.target, self._rank)
            self.last_step = fragment.last_step
        except BaseException:
            fragment.connection.close()
            raise
        if place.why is not None:
            logger.warning(
                "attemper: the run is kept in %s: its own folder is on a file system that takes no live file of "
                "SQLite, and %s.",
                path,
                place.why,
            )
        return fragment, parts

    def _note_earlier(self, tables: Tables) -> None:
        try:
            last = tables.rows("SELECT step FROM sample ORDER BY id DESC LIMIT 1")
            if last:
                self.last_step = last[0][0]
                self.earlier = Earlier.of(tables, last[0][0])
        finally:
            tables.close()
