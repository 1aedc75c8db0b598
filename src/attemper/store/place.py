"""Where the file of a run lies, how it is opened there to be written, at once or later, and what it held before.

It lies in the run's folder, or in the temporary folder where the file system of that takes no live file.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import secrets
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from attemper.errors import InputError
from attemper.readings.labels import JOINED, apart
from attemper.readings.sample import SiteLabel
from attemper.store.fragment import Fragment
from attemper.store.parts import OURS, Parts, Target, open_target
from attemper.store.process import UNNOTED, Lock, is_held, lost_beside
from attemper.store.schema import Tables, open_to_read, read_about
from attemper.store.store import Store
from attemper.text import call_of, clean_name, count

logger = logging.getLogger("attemper")

KNOWN_GOOD = frozenset(("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs", "ntfs"))
_MOUNTS = Path("/proc/self/mountinfo")
_MOUNTED = re.compile(r"^.+ on (?P<point>/.*) \((?P<kind>\w+)[,)]", re.MULTILINE)
"""What ``mount`` prints for each file system where there is no /proc."""


def takes_write_ahead(folder: Path) -> bool:
    """Whether a folder lies on a file system of the list."""
    return kind(folder) in KNOWN_GOOD


def kind(folder: Path) -> str:
    """Type of the file system that a folder lies on, such as "ext4" or "nfs4"; empty where the system does not tell."""
    try:
        if sys.platform == "win32":
            return _windows_kind(folder)
        points = _linux_points() if _MOUNTS.exists() else _listed_points()
        return _of_longest_point(os.path.realpath(folder), points)
    except (OSError, subprocess.SubprocessError):
        return ""


def _of_longest_point(folder: str, points: list[tuple[str, str]]) -> str:
    """The type at the longest of the points (point, type) that the folder is under; of equals the last was mounted."""
    under = [(len(point), kind) for point, kind in points if os.path.commonpath((folder, point)) == point]
    longest = max((length for length, _ in under), default=0)
    return next((kind for length, kind in reversed(under) if length == longest), "")


def _linux_points() -> list[tuple[str, str]]:
    points = []
    for line in _MOUNTS.read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
        points.append((point, after.split()[0]))
    return points


def _listed_points() -> list[tuple[str, str]]:
    listed = subprocess.run(["mount"], capture_output=True, text=True, timeout=5, check=True).stdout
    return [(found["point"], found["kind"].lower()) for found in _MOUNTED.finditer(listed)]


def _windows_kind(folder: Path) -> str:
    import ctypes

    name = ctypes.create_unicode_buffer(64)
    root = os.path.splitdrive(os.path.realpath(folder))[0] + "\\"
    kernel = ctypes.windll.kernel32  # pyright: ignore[reportAttributeAccessIssue]
    local = kernel.GetDriveTypeW(root) != 4  # DRIVE_REMOTE: a share tells the type of the disk behind it
    told = kernel.GetVolumeInformationW(root, None, 0, None, None, None, name, len(name))
    return name.value.lower() if local and told else ""


PARQUET = "pyarrow"
"""The package that parts need."""


@dataclass(frozen=True)
class Place:
    """Where one process writes."""

    folder: Path
    """Of the live file."""
    write_ahead: bool
    """Whether that file system takes SQLite's write-ahead log."""
    target: Target | None = None
    """Where parts are published; None where the live file lies in the run's folder, or pyarrow is missing."""
    why: str | None = None
    """Why the live file lies elsewhere and nothing is published."""


def place_of(options: Store, rank: int) -> Place:
    """Where the fragment of ``rank`` is written. ``OSError``: no folder can be made."""
    if not options.is_url:
        folder = Path(options.path).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if options.new:
            set_aside(folder, rank)
        if takes_write_ahead(folder):
            return Place(folder, write_ahead=True)
    target, why = None, None
    try:
        target = open_target(options.path)
        folder = _scratch(_token(target, rank))
    except (OSError, ImportError) as error:
        target, why, folder = None, str(error), _scratch(secrets.token_hex(8))
    if target is not None and find_spec(PARQUET) is None:
        target, why = None, "parts need pyarrow, which is not installed: pip install 'attemper[parquet]'"
    return Place(folder, takes_write_ahead(folder), target, why)


def set_aside(folder: Path, rank: int) -> None:
    """Moves what ``rank`` wrote into a folder to one beside it, the first that has nothing of that rank."""
    own = [
        path for path in folder.glob(f"fragment-{rank}[.-]*") if OURS.fullmatch(path.name) and path.suffix != ".lock"
    ]
    if not own or is_held(folder / f"fragment-{rank}.lock"):
        return
    beside = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
    target = next(one for one in beside if not any(one.glob(f"fragment-{rank}[.-]*")))
    target.mkdir(exist_ok=True)
    for path in own:
        path.rename(target / path.name)
    logger.warning("attemper: the run that was in %s is kept in %s.", clean_name(folder.name), clean_name(target.name))


def _token(target: Target, rank: int) -> str:
    """What tells this run from another that was in the same place before: a run that is resumed finds its live file."""
    name = f"fragment-{rank}.token"
    if name in target.names():
        return "".join(filter(str.isalnum, target.read(name).decode("ascii", "ignore")))[:32]
    token = secrets.token_hex(8)
    target.write(name, token.encode())
    return token


def _scratch(token: str) -> Path:
    """A folder of this user alone in the machine's temporary folder."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    base = Path(tempfile.gettempdir()) / f"attemper-{user}"
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    if base.is_symlink() or (hasattr(os, "getuid") and base.stat().st_uid != os.getuid()):
        base = Path(tempfile.mkdtemp(prefix="attemper-"))  # somebody else made it
    folder = base / token
    folder.mkdir(exist_ok=True)
    return folder


# --- the file ---


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
