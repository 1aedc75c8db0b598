"""What a command puts out: lines on stderr, a JSON document on stdout, whole files. What it says of bad usage, and the
exit code with which it ends.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from attemper.checks import did_you_mean
from attemper.errors import BackendError, InputError, MissingExtraError
from attemper.text import clean, clean_json

if TYPE_CHECKING:
    from rich.console import Console

UsageError: Any = typer.BadParameter.__mro__[1]
"""Of the click that typer stands on: the package, or typer's own copy of it."""
INTERRUPTED = 130
"""Exit code that shells give a command that ended by Ctrl-C: 128 and the number of the signal."""
_OF_OUTPUT = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO}
"""Errors of writing to stdout, which name no file."""


def say(line: str) -> None:
    """A line on stderr, at once: progress, and the path of each file. Names in it are shown, not obeyed."""
    print(clean(line), file=sys.stderr, flush=True)


def print_json(document: str | Mapping[str, Any]) -> None:
    """Prints a JSON document, or what it is of, at once, names in it as they can be seen; where stdout takes no UTF-8,
    with JSON's own escapes for letters outside of ASCII.
    """
    if not isinstance(document, str):
        document = json.dumps(document, ensure_ascii=False, allow_nan=False)
    encoding = (sys.stdout.encoding or "").lower().replace("-", "").replace("_", "")
    shown = clean_json(document)
    print(shown if encoding == "utf8" else json.dumps(json.loads(shown)), flush=True)


def print_result(result: Any, as_json: bool, table: Any = None) -> None:
    """A result as JSON, or as rich shows it, or its ``table``."""
    if as_json:
        print_json(result.to_json())
        return
    from rich.console import Console

    Console().print(result if table is None else table)


def open_console(*, stderr: bool = False) -> Console:
    """A console that shows names as they are: no markup, no highlights, no emoji."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


@contextmanager
def bar(what: str, total: float = 100.0) -> Iterator[Callable[..., None] | None]:
    """A bar of progress on stderr, moved by ``completed=`` or ``advance=``; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield partial(progress.update, progress.add_task(what, total=total))


def check_files(html: Path | None, csv: str | None = None) -> None:
    """Checks, before work that takes long, that its files can be written."""
    from attemper.files import check_target

    if html is not None:
        if str(html) == "-":
            raise InputError("--html writes a file, not to stdout: name one, such as page.html.")
        check_target(html)
    if csv is not None and csv != "-":
        check_target(csv, "table")


def write_csv(csv: str, rows: str) -> None:
    from attemper.files import write_whole

    if csv == "-":
        print(rows, end="")
    else:
        write_whole(csv, rows, "table")


class Verbs(TyperGroup):
    """The verbs of the command line; one that does not exist is answered with the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb = args[0] if args else ""
        if verb in self.commands or verb.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        return ctx.fail(f"there is no command {verb!r}.{did_you_mean(verb, self.commands)}")


@contextmanager
def usage_of(option: str) -> Iterator[None]:
    """Turns an error of the library about an option's value into bad usage, before anything is loaded."""
    try:
        yield
    except (InputError, BackendError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def print_usage_error(error: Any) -> int:
    """Prints what was wrong, how the verb is used, and the nearest name; the exit code."""
    option = getattr(error, "option_name", None)
    choice = re.fullmatch(r"(?:Value error, )?('(.*?)' is not one of (.*))", error.message)
    if option is not None and getattr(error, "possibilities", None) is not None:
        error.message = f"there is no option {option!r}.{did_you_mean(option, error.possibilities)}"
        error.possibilities = None
    elif choice:
        error.message = choice[1] + did_you_mean(choice[2], re.findall(r"'(.*?)'", choice[3]))
    error.message = clean(error.message)
    error.show()
    return int(error.exit_code)


def exit_code(command: Callable[[], Any]) -> int:
    """Runs ``command`` and writes out everything it printed. Where it failed, one line on stderr says why."""
    if sys.stderr is None:  # closed by the caller, `2>&-`: print() would take stdout instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return failure("standard output is closed: there is nowhere to print to.")
    # Letters that the terminal's encoding lacks are written as their numbers, not as a traceback.
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")
    try:
        code = command()
        sys.stdout.flush()
    except UsageError as error:
        return print_usage_error(error)
    except (InputError, BackendError, MissingExtraError) as error:
        return failure(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:
        return _report_unwritten(error)
    if code == INTERRUPTED:
        return failure("interrupted.", INTERRUPTED)
    return code if isinstance(code, int) else 0


def failure(message: str, code: int = 1) -> int:
    """Prints the one line; the exit code."""
    say(f"attemper: {message}")
    return code


def _report_unwritten(error: OSError) -> int:
    """Silent where the reader went away (``| head``), which is its right; a full disk is reported."""
    _drop_output()
    if isinstance(error, BrokenPipeError):
        return 1
    reason = error.strerror or str(error)
    if error.filename is not None:
        return failure(f"{os.fsdecode(error.filename)}: {reason}.")
    return failure(f"the output cannot be written: {reason}." if error.errno in _OF_OUTPUT else f"{reason}.")


def _drop_output() -> None:
    """Drops what is still buffered: Python would try to write it again at its end, and print a traceback."""
    try:
        place = sys.stdout.fileno()
    except (OSError, ValueError):
        return  # no file, in a test or a notebook
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, place)
    os.close(nowhere)


def cell_text(cell: str | float | None) -> str:
    """Of a table: five digits of a number that is not whole."""
    if cell is None:
        return "-"
    return f"{cell:.5g}" if isinstance(cell, float) else str(cell)
