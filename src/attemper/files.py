"""Files that are written whole or not at all: a reader, or a machine that lost its power, finds the old or the new.

``check_target`` is asked before the work starts, ``write_whole`` puts text there, and ``replacement`` lends a path to
libraries that write a file themselves.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attemper.errors import InputError
from attemper.text import clean_name

SUFFIXES = {"page": ".html", "picture": ".png", "table": ".csv", "reading": ".safetensors", "check": ".json"}
"""What a user may ask to be written, and how the names of such files end. Ours are told by their content, so that any
other ending will do, but for those of other kinds of files.
"""
_TAKEN = frozenset({*SUFFIXES.values(), ".gguf"})
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
"""Errors of file systems that cannot sync a folder; there is nothing to do about them."""


def check_target(path: str | os.PathLike[str], what: str = "page", *, ending: bool = False) -> Path:
    """Where a page or picture for ``path`` goes, links followed, once a file can certainly be written there.

    ``ending``: whether the name must end as such files do.
    """
    try:
        target = Path(os.path.realpath(path))
        if ending and Path(path).suffix.lower() != (own := SUFFIXES[what]):
            raise InputError(_message(what, path, f"a {own[1:].upper()} {what} needs a name that ends in {own}"))
        if (suffix := Path(path).suffix.lower()) in _TAKEN - {SUFFIXES[what]}:
            json = "; for a scan as JSON: to_json(), or --json" if (what, suffix) == ("reading", ".json") else ""
            raise InputError(_message(what, path, f"it would be taken for a {suffix} file{json}"))
        if target.exists() and not target.is_file():
            raise InputError(_message(what, path, "it is a folder or a device, not a file"))
        if target.is_file() and not os.access(target, os.W_OK):
            raise InputError(_message(what, path, "it is there and write-protected"))
        probe = _temporary(target)
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(_message(what, path, getattr(error, "strerror", None) or str(error))) from error
    return target


def write_whole(path: str | os.PathLike[str], text: str | bytes, what: str = "page") -> Path:
    """Writes ``text`` to ``path``, whole or not at all.

    Returns:
        Where the file is, links followed.

    Raises:
        InputError: as ``check_target``, or the disk is full; an earlier file is as it was.
    """
    target = check_target(path, what)
    try:
        with replacement(target) as part:
            part.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    except OSError as error:
        raise InputError(_message(what, path, error.strerror or str(error))) from error
    return target


@contextmanager
def replacement(target: Path) -> Iterator[Path]:
    """A new path beside ``target`` to write a file to. The file takes the place of ``target`` when the block ends.

    An earlier file's mode is kept. If the block raises, ``target`` is as it was and nothing else is left.

    Raises:
        OSError: the disk is full or failed.
    """
    part = _temporary(target)
    try:
        yield part
        if target.is_file():
            os.chmod(part, target.stat().st_mode & 0o777)
        replace_synced(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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


def _temporary(target: Path) -> Path:
    """A name in the same folder, hence on the same disk, that no other process uses."""
    return target.parent / f".attemper-{os.getpid()}-{secrets.token_hex(6)}.tmp"


def _message(what: str, path: str | os.PathLike[str], reason: str) -> str:
    name, example = clean_name(os.fspath(path)), f"{what}{SUFFIXES[what]}"
    advice = f"Name a file in a folder that exists, such as {example}."
    return f"the {what} cannot be written to {name!r}: {reason}. {advice}"
