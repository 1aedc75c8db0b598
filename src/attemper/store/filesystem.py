"""Which file systems take SQLite's write-ahead log: those that are known to be local and to lock.

On a network file system a log that several processes map into memory ends in corrupted files or in SIGBUS. A type that
is missing from the list costs speed, not data: the live file then lies in the machine's temporary folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
