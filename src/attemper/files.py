"""Files that are replaced whole: a reader, and a machine that lost its power, finds the old file or the new one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
"""What file systems say that cannot sync a folder; there is nothing to do about it."""


def replace_synced(finished: Path, target: Path) -> None:
    """Moves a finished file to ``target``, in the same folder, in one step that lasts.

    Its content reaches the disk before its name does: a file system that writes the name first would leave an empty
    file after a power failure, in place of the earlier one.

    Raises:
        OSError: the disk is full or failed; ``target`` is as it was.
    """
    descriptor = os.open(finished, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(finished, target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return  # Windows opens no folder, and its rename is written through
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)
