"""The file a page, a picture or a table is written to: checked before the work starts, replaced whole or left alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from attemper.errors import InputError
from attemper.files import replace_synced
from attemper.text import named

SUFFIXES = {"page": ".html", "picture": ".png", "table": ".csv"}
"""What may be written, and what its files end in."""


def checked_target(path: str | os.PathLike[str], what: str = "page") -> Path:
    """Where a page or a picture for ``path`` goes, links followed, once it is certain that a file can be written there.

    Raises:
        InputError: the folder is missing or cannot be written to, or ``path`` is something other than a file.
    """
    try:
        target = Path(os.path.realpath(path))
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
    """Writes ``text`` beside ``path`` and moves it there in one step: a reader sees the old file or the new one, and so
    does a machine that lost its power.

    Raises:
        InputError: as ``checked_target``, or the disk is full; an earlier file is as it was.
    """
    target = checked_target(path, what)
    temporary = _temporary(target)
    try:
        # The mode that open() gives any new file; a private temporary file would leave a page nobody else can read.
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode("utf-8"))
        if target.is_file():
            os.chmod(temporary, target.stat().st_mode & 0o777)
        replace_synced(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(_message(what, path, error.strerror or str(error))) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target


def _temporary(target: Path) -> Path:
    """A name in the same folder, hence on the same disk, that no other process uses."""
    return target.parent / f".attemper-{os.getpid()}-{secrets.token_hex(6)}.tmp"


def _message(what: str, path: str | os.PathLike[str], reason: str) -> str:
    name, example = named(os.fspath(path)), f"{what}{SUFFIXES[what]}"
    advice = f"Name a file in a folder that exists, such as {example}."
    return f"the {what} cannot be written to {name!r}: {reason}. {advice}"
