"""``attemper export`` and ``attemper report``: a run for other programs, and as a page."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attemper.cli.output import check_files, print_json, say
from attemper.cli.show import RUN_HELP, RunPath
from attemper.errors import InputError
from attemper.text import clean, clean_name, count


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
            help="Format. parquet and csv have one row per step and head; sqlite copies the run, also while it trains."
        ),
    ] = To.parquet,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File to write. By default, the run's name in this folder.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the path and number of rows as a JSON document.")
    ] = False,
) -> None:
    """Export a run as one file for other programs. For a run of several ranks, sqlite writes a folder: again a run."""
    from attemper.results.run import open_run
    from attemper.store import export as formats

    with open_run(run) as opened:
        target = out or Path(f"{_file_name(opened.name)}.{to.value}")
        written = getattr(formats, f"to_{to.value}")(opened.ranks, target)
    what = "files" if to is To.sqlite else "rows"
    if as_json:
        print_json({"schema": 1, "path": str(target), "format": to.value, what: written})
    else:
        say(f"wrote {clean_name(target)}: {count(written, what.removesuffix('s'))}")


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help=f"{RUN_HELP} Several runs, up to 8, share one page."),
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File to write. By default, the run's name in this folder.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Serve a page that refreshes itself, to this machine only, until Ctrl-C. Writes no file."
        ),
    ] = False,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for --live. By default, a free one.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the path, or the URL of --live, as a JSON document.")
    ] = False,
) -> None:
    """Write a run as one HTML page that opens offline, with the history of every head. Several runs become one page
    of their losses and statistics.
    """
    from attemper.results.run import open_run
    from attemper.store.verdict import why_unmeasured

    if live and html is not None:
        raise typer.BadParameter(
            "--live serves the page and writes no file: leave out --html or --live.", param_hint="--html"
        )
    if port is not None and not live:
        raise typer.BadParameter("needs --live.", param_hint="--port")
    if live and len(runs) > 1:
        raise typer.BadParameter("serves one run: leave the others out.", param_hint="--live")
    if live:
        _serve(runs[0], port or 0, as_json)
        return
    check_files(html)
    with ExitStack() as stack:
        opened, *others = (stack.enter_context(open_run(run)) for run in runs)
        target = opened.to_html(html or f"{_file_name(opened.name)}.html", beside=others)
        step, samples, unmeasured = int(opened.steps[-1]), len(opened), why_unmeasured(opened.ranks)
        names = list({one.path: one.name for one in (opened, *others)}.values())
    if others:
        if as_json:
            print_json({"schema": 1, "path": str(target), "runs": names})
        else:
            say(f"wrote {clean_name(target)}: {count(len(names), 'run')}")
        return
    if as_json:
        print_json({"schema": 1, "path": str(target), "step": step, "samples": samples})
    else:
        say(f"wrote {clean_name(target)}: {count(samples, 'sample')}, the last of step {step:,}")
    if unmeasured is not None:
        raise InputError(f"nothing was measured: {clean(unmeasured)}.")


def _serve(run: str, port: int, as_json: bool) -> None:
    """The page of a run on 127.0.0.1, until Ctrl-C. Opens no browser: the address is printed."""
    from attemper.report.live import LiveServer, RunSource, serve
    from attemper.results.run import open_run

    open_run(run).close()  # reports a path that is not a run before anything listens
    server = LiveServer(RunSource(run), port=port)
    if as_json:
        print_json({"schema": 1, "url": server.url})
    else:
        say(f"serving {clean_name(run)} on this machine alone, until Ctrl-C: {server.url}")
    serve(server)
    say("stopped")


def _file_name(name: str) -> str:
    """A run's name as that of a file: what could be a path, or hides it, is a line."""
    return "".join(letter if letter.isalnum() or letter in " ._-" else "-" for letter in name).strip(" .") or "run"
