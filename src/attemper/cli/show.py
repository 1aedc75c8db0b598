"""``attemper show`` and ``attemper watch``: one run in the terminal, as it stands and while it is written."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from attemper.cli.arguments import FailOnAlarm
from attemper.cli.output import open_console, print_json
from attemper.readings.alarms import is_heard
from attemper.text import clean, number

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from attemper.readings.reading import Alarm
    from attemper.report.overview import Overview
    from attemper.results.run import Run


class Language(StrEnum):
    """Languages of pages, and of what is shown here."""

    en = "en"
    zh = "zh"


RUN_HELP = "Folder of a run, or a URL such as s3://bucket/run."
RunPath = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
Statistic = Annotated[
    str, typer.Option("--statistic", metavar="NAME", help="Statistic that ranks the heads by how much they changed.")
]
Top = Annotated[int, typer.Option(min=1, help="List only this many heads.")]
Said = Annotated[Language, typer.Option("--language", help="Language of the view.")]
SHARPNESS = "normalized_entropy"
REFRESH_SECONDS = 1.0
"""Between two looks at a live run, at least; nine times as long as one takes, if that is more."""


def show(
    run: RunPath,
    statistic: Statistic = SHARPNESS,
    top: Top = 10,
    language: Said = Language.en,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the view.")] = False,
    fail_on_alarm: FailOnAlarm = False,
) -> None:
    """Show a run at a glance: layers over steps, the heads that changed most, alarms, and missing data.

    Exits with 1 if nothing was measured.
    """
    from attemper.results.run import open_run

    with open_run(run) as opened:
        found = _overview(opened, statistic, top)
    if as_json:
        print_json(found.to_dict())
    else:
        console = open_console()
        console.print(_view(found, console, language))
    if found.unmeasured is not None:
        raise typer.Exit(1)
    if fail_on_alarm and any(alarm.severity != "notice" for alarm in found.alarms):
        raise typer.Exit(3)


def watch(
    run: RunPath,
    statistic: Statistic = SHARPNESS,
    top: Top = 10,
    language: Said = Language.en,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document per line whenever there are new samples.")
    ] = False,
) -> None:
    """Follow a run while it trains, until its process ends or you press Ctrl-C. Shows the same view as `attemper show`.

    Without a terminal, prints a line for new samples and a line for each new alarm (warning or worse).
    """
    with closing(_looks(run)) as looks, suppress(KeyboardInterrupt):  # the way to leave it
        if as_json or not open_console().is_terminal:
            found = _follow(looks, statistic, top, language, as_json)
        else:
            found = _follow_on_screen(looks, statistic, top, language)
        if found is not None and found.unmeasured is not None:
            raise typer.Exit(1)


def _looks(path: str) -> Generator[Run, None, None]:
    """The run now and again, a last time after its end. With new Parquet parts it is opened anew."""
    from attemper.results.run import open_run
    from attemper.store.folder import part_names

    parts, run, live = part_names(path), open_run(path), True
    try:
        while live:
            live, began = run.live, time.monotonic()
            yield run
            if live:
                time.sleep(max(REFRESH_SECONDS, 9 * (time.monotonic() - began)))
                before, parts = parts, part_names(path)
                if parts != before:
                    run.close()
                    run = open_run(path)
    finally:
        run.close()


def _follow(looks: Iterable[Run], statistic: str, top: int, language: Language, as_json: bool) -> Overview | None:
    """A line for each look that finds new samples, and one for each new alarm; what was found last."""
    seen, heard, found = -1, set[tuple[object, ...]](), None
    for run in looks:
        if len(run) != seen:
            seen, found = len(run), _overview(run, statistic, top)
            if as_json:
                print_json(found.to_dict())
                continue
            print(_line(found, language.value), flush=True)
            for alarm in filter(is_heard, found.alarms):
                key = (alarm.site, alarm.head, alarm.kind, alarm.since)
                if key not in heard:
                    print(f"  {_alarm(alarm, language.value)}", flush=True)
                heard.add(key)
    return found


def _follow_on_screen(looks: Iterable[Run], statistic: str, top: int, language: Language) -> Overview | None:
    from rich.live import Live

    console, found = open_console(), None
    with Live(console=console, auto_refresh=False) as screen:
        for run in looks:
            found = _overview(run, statistic, top)
            screen.update(_view(found, console, language), refresh=True)
    return found


def _overview(run: Run, statistic: str, top: int) -> Overview:
    from attemper.report.overview import overview
    from attemper.report.run_table import bars_of

    return overview(run, statistic, bars=bars_of(open_console().width), top=top)


def _view(found: Overview, console: Console, language: Language) -> RenderableType:
    from attemper.report.run_table import table

    return table(found, console.width, plain=not console.encoding.startswith("utf"), language=language.value)


def _line(found: Overview, language: str) -> str:
    """What is new, for a pipe."""
    from attemper.report.texts import message, say, why

    if found.unmeasured is not None:
        return clean(say(message("show.unmeasured", reason=why(found.unmeasured)), language))
    entropies, logits = zip(*((one.last_normalized_entropy, one.last_max_logit) for one in found.courses), strict=True)
    numbers = {
        "entropy": number(min((value for value in entropies if value is not None), default=None), 3),
        "logit": number(max((value for value in logits if value is not None), default=None), 3),
        "samples": message("count.samples", n=found.samples),
        "alarms": message("count.alarms", n=sum(alarm.ended is None for alarm in found.alarms)),
    }
    return say(message("show.look", step=str(found.last_step), **numbers), language)


def _alarm(alarm: Alarm, language: str) -> str:
    from attemper.report.texts import alarm_line, alarm_name, message, say, severity_title

    line, severity = alarm_line(alarm, language), severity_title(alarm.severity)
    return clean(say(message("show.alarm", severity=severity, kind=alarm_name(alarm.kind), line=line), language))
