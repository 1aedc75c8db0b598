"""What a verb puts out beside its table: lines on stderr, a JSON document on stdout, files whole or not at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from attemper.text import shown


def say(line: str) -> None:
    """A line on stderr, at once: progress, and what was written where. Names in it are shown, not obeyed."""
    print(shown(line), file=sys.stderr, flush=True)


def print_json(document: str) -> None:
    """Prints a JSON document; where stdout takes no UTF-8, with JSON's own escapes for letters outside of ASCII."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "").replace("_", "")
    print(document if encoding == "utf8" else json.dumps(json.loads(document)))


def check_files(html: Path | None, csv: str | None) -> None:
    """What takes long must not end in a file that cannot be written: told before it, not after.

    Raises:
        InputError: the folder is missing or write-protected, the path is something other than a file, or a page is to
            go to stdout.
    """
    from attemper.errors import InputError
    from attemper.files import checked_target

    if html is not None:
        if str(html) == "-":
            raise InputError("--html writes a file, not to stdout: name one, such as page.html.")
        checked_target(html)
    if csv is not None and csv != "-":
        checked_target(csv, "table")


def write_csv(csv: str, rows: str) -> None:
    """Rows to stdout for ``-``, else into a file."""
    from attemper.files import write_whole

    if csv == "-":
        print(rows, end="")
    else:
        write_whole(csv, rows, "table")
