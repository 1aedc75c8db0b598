"""How the file of a run is opened to be written, at once or later, and what the folder held before."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attemper.errors import InputError
from attemper.readings.calls import apart
from attemper.readings.labels import JOINED
from attemper.readings.sample import SiteLabel
from attemper.store.fragment import Fragment
from attemper.store.lock import Lock
from attemper.store.parts import Parts
from attemper.store.place import UNNOTED, Place, lost_beside, place_of
from attemper.store.schema import Tables, open_to_read, read_about
from attemper.store.store import Store
from attemper.text import call_of, clean_name, count


@dataclass(frozen=True)
class Earlier:
    """The run that a fragment held when it was opened to be written."""

    model: str
    heads: Mapping[tuple[str, str], int]
    """(name, kind) of its sites -> how many heads they have."""
    known: frozenset[str] | None
    """Names of modules that attend, read or not; None where only some were watched."""
    last_step: int
    joined: Mapping[tuple[str, str], str]
    """(Name, mode) of modules whose calls were one site, and why."""

    @classmethod
    def of(cls, tables: Tables, last_step: int) -> Earlier:
        about = read_about(tables)
        heads = {(name, kind): heads for name, kind, heads in tables.rows("SELECT name, kind, heads FROM site")}
        covered = tables.rows("SELECT name, mode, reason FROM coverage")
        expected = {_module(name) for name, _, _ in covered}
        known = None if about.get("sites") else frozenset(expected | {_module(name) for name, _ in heads})
        joined = {(_module(name), mode): why for name, mode, why in covered if name.endswith(JOINED) and why}
        return cls(str(about.get("model") or ""), heads, known, last_step, joined)

    def is_of(self, model: str, sites: Sequence[SiteLabel], modules: Container[str]) -> bool:
        """Whether it was a run of the same model, as far as can be told.

        Args:
            model: class of the model that is watched now.
            sites: what was seen of it in a sample.
            modules: names of all of its modules.
        """
        if self.model not in ("", model):
            return False
        if any(self.heads.get((site.name, site.kind), site.heads) != site.heads for site in sites):
            return False
        seen = {_module(site.name) for site in sites}
        gone = (name for name, _ in self.heads if _module(name) not in seen and name not in modules)
        return all(_module(name) in modules for name in gone) and (self.known is None or seen <= self.known)

    def _means(self, sites: Sequence[SiteLabel]) -> list[str]:
        """Sites that were the mean over the calls of a module, each of which is a site now."""
        calls = {(name, kind) for name, kind, _ in apart(sites)}
        return [name for name, kind in self.heads if (name, kind) in calls and (f"{name}#2", kind) not in self.heads]

    def difference(self, model: str, sites: Sequence[SiteLabel], modules: Container[str], step: int) -> str | None:
        """What to say of it behind the name of its folder, where it was a run of another model, or where sites of it
        were means; else None. Arguments are those of ``is_of``, and the step of the sample.
        """
        if not self.is_of(model, sites, modules):
            now, before = _description(model, [one.heads for one in sites]), self.heads.values()
            return (
                f" holds a run of another model: {_description(self.model, before)}, up to step {self.last_step}. This "
                f"one is of {now}. Both are kept in its file, but of the earlier one only steps below {step} are "
                "shown. Give each run a separate folder, as in attemper.watch(model, store='runs/b')."
            )
        if not (names := self._means(sites)):
            return None
        more = f" (and {count(len(names) - 1, 'more site')})" if len(names) > 1 else ""
        return (
            f": up to step {self.last_step} {clean_name(names[0])}{more} is the mean over all calls of its module. "
            f"From step {step} on it is the first call, the other calls are separate sites (#2, ...), and alarms take "
            "it for a new site."
        )


def _module(site: str) -> str:
    """Name of a site without the number of the call."""
    return call_of(site.removesuffix(JOINED))[0]


def _description(model: str, heads: Collection[int]) -> str:
    return f"{clean_name(model) or 'a model'} with {count(len(heads), 'site')} and {count(sum(heads), 'head')}"


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
                "attemper: the run is kept in %s: its folder is on a file system where SQLite cannot keep a "
                "live file, and %s.",
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
