"""``attemper export`` and ``attemper report``: a run for other programs, and as a page."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attemper.cli.output import check_files, print_json, say
from attemper.cli.show import RunPath
from attemper.text import clean_name, count


class To(StrEnum):
    """Formats of a run."""

    parquet = "parquet"
    csv = "csv"
    sqlite = "sqlite"


def export(
    run: RunPath,
    to: Annotated[
        To,
        typer.Option(
            help="parquet and csv: a row for each step and head; sqlite: a copy of the run, also while it is written."
        ),
    ] = To.parquet,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Where to; without it, the run's name in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as a JSON document.")] = False,
) -> None:
    """A run as one file for other programs. Of several ranks, sqlite makes a folder, which is a run again."""
    import attemper
    from attemper.store import export as formats

    with attemper.open_run(run) as opened:
        target = out or Path(f"{_file_name(opened.name)}.{to.value}")
        written = getattr(formats, f"to_{to.value}")(opened.ranks, target)
    what = "files" if to is To.sqlite else "rows"
    if as_json:
        print_json(
            json.dumps({"schema": 1, "path": str(target), "format": to.value, what: written}, ensure_ascii=False)
        )
    else:
        say(f"wrote {clean_name(target)}: {count(written, what.removesuffix('s'))}")


def report(
    run: RunPath,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Where to; without it, the run's name in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as a JSON document.")] = False,
) -> None:
    """A run as a page to look at: one HTML file that opens offline, with the history of every head."""
    import attemper

    check_files(html, None)
    with attemper.open_run(run) as opened:
        target = opened.to_html(html or f"{_file_name(opened.name)}.html")
        step, samples = int(opened.steps[-1]), len(opened)
    if as_json:
        print_json(json.dumps({"schema": 1, "path": str(target), "step": step, "samples": samples}, ensure_ascii=False))
    else:
        say(f"wrote {clean_name(target)}: {count(samples, 'sample')}, the last of step {step:,}")


def _file_name(name: str) -> str:
    """A run's name as that of a file: what could be a path, or hides it, is a line."""
    return "".join(letter if letter.isalnum() or letter in " ._-" else "-" for letter in name).strip(" .") or "run"
