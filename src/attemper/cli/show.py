"""``attemper show`` and ``attemper watch``: one run in the terminal, as it stands and while it is written."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from attemper.cli.output import print_json
from attemper.text import count, number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from attemper.store.overview import Overview
    from attemper.store.run import Run

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or a URL such as s3://bucket/run.")]
Statistic = Annotated[
    str, typer.Option("--statistic", metavar="NAME", help="By what the heads are found that changed most.")
]
Top = Annotated[int, typer.Option(min=1, help="List only so many of them.")]
SHARPNESS = "normalized_entropy"
REFRESH_SECONDS = 1.0
"""Between two looks at a live run, at least; nine times as long as one takes, if that is more."""


def show(
    run: RunPath,
    statistic: Statistic = SHARPNESS,
    top: Top = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the view.")] = False,
    fail_on_alarm: Annotated[
        bool,
        typer.Option("--fail-on-alarm", help="Exit with 3 if an alarm is a warning or worse (notices do not count)."),
    ] = False,
) -> None:
    """A run at a glance: every layer over its steps, the heads that changed most, its alarms, and what is missing."""
    import attemper

    with attemper.open_run(run) as opened:
        found = _overview(opened, statistic, top)
    if as_json:
        print_json(_document(found))
    else:
        console = _console()
        console.print(_view(found, console))
    if fail_on_alarm and any(alarm.severity != "notice" for alarm in found.alarms):
        raise typer.Exit(3)


def watch(
    run: RunPath,
    statistic: Statistic = SHARPNESS,
    top: Top = 10,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document a line, whenever there are new samples.")
    ] = False,
) -> None:
    """The same while the run is written: until its process ends, or Ctrl-C."""
    with closing(_looks(run)) as looks, suppress(KeyboardInterrupt):  # how one leaves it
        if as_json or not _console().is_terminal:
            _follow(looks, statistic, top, as_json)
        else:
            _follow_on_screen(looks, statistic, top)


def _looks(path: str) -> Generator[Run, None, None]:
    """The run now and again, a last time after its end. With new Parquet parts it is opened anew."""
    import attemper
    from attemper.store.folder import part_names

    parts, run, live = part_names(path), attemper.open_run(path), True
    try:
        while live:
            live, began = run.live, time.monotonic()
            yield run
            if live:
                time.sleep(max(REFRESH_SECONDS, 9 * (time.monotonic() - began)))
                before, parts = parts, part_names(path)
                if parts != before:
                    run.close()
                    run = attemper.open_run(path)
    finally:
        run.close()


def _follow(looks: Iterable[Run], statistic: str, top: int, as_json: bool) -> None:
    """A line for each look that finds new samples."""
    seen = -1
    for run in looks:
        if len(run) != seen:
            seen, found = len(run), _overview(run, statistic, top)
            if as_json:
                print_json(_document(found))
            else:
                print(_line(found), flush=True)


def _follow_on_screen(looks: Iterable[Run], statistic: str, top: int) -> None:
    from rich.live import Live

    console = _console()
    with Live(console=console, auto_refresh=False) as screen:
        for run in looks:
            screen.update(_view(_overview(run, statistic, top), console), refresh=True)


def _overview(run: Run, statistic: str, top: int) -> Overview:
    from attemper.store.overview import overview
    from attemper.store.run_table import bars_of

    return overview(run, statistic, bars=bars_of(_console().width), top=top)


def _view(found: Overview, console: Console) -> RenderableType:
    from attemper.store.run_table import table

    return table(found, console.width, plain=not console.encoding.startswith("utf"))


def _document(found: Overview) -> str:
    return json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False)


def _line(found: Overview) -> str:
    """What is new, for a pipe."""
    if not found.samples:
        return "no sample yet"
    entropies, logits = zip(*((one.last_normalized_entropy, one.last_max_logit) for one in found.courses), strict=True)
    entropy = min((value for value in entropies if value is not None), default=None)
    logit = max((value for value in logits if value is not None), default=None)
    standing = sum(alarm.ended is None for alarm in found.alarms)
    return (
        f"step {found.last_step}: {count(found.samples, 'sample')}, least entropy of a layer {number(entropy, 3)}, "
        f"largest logit {number(logit, 3)}, {count(standing, 'alarm')}"
    )


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)
