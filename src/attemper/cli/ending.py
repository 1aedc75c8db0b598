"""How a command ends: its exit code, and one line on stderr where it failed."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import typer

from attemper.cli.output import say
from attemper.cli.usage import UsageError, print_usage_error
from attemper.errors import BackendError, InputError, MissingExtraError

INTERRUPTED = 130
"""What shells give a command that ended by Ctrl-C: 128 and the number of the signal."""


_OF_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO}
"""Errors without the name of a file that writing to stdout ends in."""


def ended(command: Callable[[], Any]) -> int:
    """Runs ``command`` and everything it printed is out; the exit code."""
    if sys.stderr is None:  # closed by the caller, `2>&-`: print() would take stdout instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return failed("standard output is closed: there is nowhere to print to.")
    _take_any_text(sys.stdout)
    try:
        code = command()
        sys.stdout.flush()
    except UsageError as error:
        return print_usage_error(error)
    except (InputError, BackendError, MissingExtraError) as error:
        return failed(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        return _not_written(error)
    if code == INTERRUPTED:
        return failed("interrupted.", INTERRUPTED)
    return code if isinstance(code, int) else 0


def failed(message: str, code: int = 1) -> int:
    """Prints the one line; the exit code."""
    say(f"attemper: {message}")
    return code


def _take_any_text(stream: TextIO) -> None:
    """A name that the terminal's encoding has no letters for is written as their numbers, not as a traceback."""
    if reconfigure := getattr(stream, "reconfigure", None):
        reconfigure(errors="backslashreplace")


def _not_written(error: OSError) -> int:
    """A reader that went away (``| head``) is its right and no word is said; a full disk is told."""
    _drop_output()
    if isinstance(error, BrokenPipeError):
        return 1
    reason = error.strerror or str(error)
    if error.filename is not None:
        return failed(f"{os.fsdecode(error.filename)}: {reason}.")
    return failed(f"the output cannot be written: {reason}." if error.errno in _OF_OUTPUT else f"{reason}.")


def _drop_output() -> None:
    """What could not be written is still buffered: Python would try again at its end, and print a traceback."""
    try:
        place = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # no file, in a test or a notebook
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, place)
    os.close(nowhere)
