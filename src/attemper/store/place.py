"""Where the live file of a run lies: in its folder, or in the temporary folder where its file system takes none."""

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

from attemper.store.lock import is_held
from attemper.store.store import Store
from attemper.store.target import Target, open_target
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
OURS = re.compile(r"fragment-\d{1,9}(\.(sqlite(-wal|-shm|-journal)?|lock|token|lost-\d+)|-\d+-\d+\.parquet)")
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
    """Where the fragment of ``rank`` is written.

    Raises:
        OSError: no folder can be made.
    """
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
