"""Where a run lies: its live file in its folder, or in the temporary folder where its file system takes none; and the
folders and object stores that take whole files.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from attemper.errors import MissingExtraError
from attemper.files import replacement
from attemper.store.lock import is_held
from attemper.store.store import Store
from attemper.text import clean_name

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


logger = logging.getLogger("attemper")

PARQUET = "pyarrow"
"""The package that parts need."""
OURS = re.compile(r"fragment-\d{1,9}(\.(sqlite(-wal|-shm|-journal)?|lock|token|lost-\d+)|-\d+-\d+\.(parquet|scalars))")
"""Files of a run's folder that attemper wrote."""
UNNOTED = "the disk was full or failed to the end of the process"
"""Why samples are lost that a fragment itself could not note."""


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
    beside = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
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


def leave_lost(fragment: Path, samples: int) -> None:
    """Leaves a number of lost samples as the name of an empty file beside the fragment, which takes no room."""
    with suppress(OSError):
        fragment.with_name(f"{fragment.stem}.lost-{samples}").touch()


def lost_beside(fragment: Path) -> list[tuple[Path, int]]:
    """Files beside a fragment, or its lock, that say of lost samples, and how many each."""
    found = ((path, path.suffix.removeprefix(".lost-")) for path in fragment.parent.glob(f"{fragment.stem}.lost-*"))
    return [(path, int(number)) for path, number in found if number.isdecimal()]


OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"))
"""An object appears whole or not at all; to rename it is to copy it."""


class Target(Protocol):
    """Where files of a run are published."""

    def names(self) -> list[str]:
        """Of all files, sorted."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""


def open_target(path: str | os.PathLike[str]) -> Target:
    """The target that a path or a URL names; a relative path is of the folder in which the process stands now.

    Raises:
        MissingExtraError: a URL needs fsspec.
        OSError: the folder cannot be made.
    """
    return UrlTarget(str(path)) if "://" in os.fspath(path) else FolderTarget(Path(path).absolute())


class FolderTarget:
    """A folder on any file system: files come by a temporary name and a rename."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with replacement(self._folder / name) as part:
            part.write_bytes(data)


class UrlTarget:
    """What fsspec reaches by a URL."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingExtraError(f"a run at {url.split('://')[0]}://", "fsspec", "parquet") from error
        self._system, self._root = _open(url_to_fs, url)
        self._whole = url.split("://")[0] in OBJECT_STORES

    def names(self) -> list[str]:
        try:
            listed = self._system.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)

    def read(self, name: str) -> bytes:
        return self._system.cat_file(f"{self._root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        final = f"{self._root}/{name}"
        if self._whole:
            self._system.pipe_file(final, data)
            return
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(f"{final}.tmp", data)
        self._system.mv(f"{final}.tmp", final)


def _open(url_to_fs: Any, url: str) -> tuple[Any, str]:
    try:
        system, root = url_to_fs(url)
    except (ImportError, ValueError) as error:  # the package of this protocol is missing, or there is no such protocol
        raise OSError(f"{url.split('://')[0]}:// cannot be reached: {error}") from error
    return system, root.rstrip("/")
