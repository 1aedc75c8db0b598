"""A run in the terminal: the course of every layer, the heads that changed most, alarms, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from attemper.readings.alarms import by_kind, level_of, with_course
from attemper.readings.reading import SiteReading
from attemper.readings.scan_table import STYLES
from attemper.readings.stacks import Stack, stacks
from attemper.store.overview import Change, Course, Overview
from attemper.text import BARS, clean, count, cut, number, sparkline

MOST_ALARMS = 3
"""Alarms of a kind that are listed one by one."""
_PLAIN = str.maketrans(dict(zip(BARS, "_.-:=+*#", strict=True)))
"""Bars for terminals that have only ASCII."""
FEWEST_LETTERS = 12
"""That a site's name is cut to."""
_OTHER_COLUMNS = 30
"""Width of what stands beside the bars."""


def table(overview: Overview, width: int, *, plain: bool = False) -> RenderableType:
    """The whole overview in ``width`` columns; ``plain``: in ASCII, as far as it is ours."""
    parts: list[RenderableType] = [*_headlines(overview)]
    sites = tuple(_as_reading(course) for course in overview.courses)
    bars = max(4, (width - _OTHER_COLUMNS) // 2)
    for stack in stacks(sites):
        parts += _title(stack, width)
        parts += _stack(stack, [overview.courses[place] for place in stack.places], bars, plain)
    parts += [*_changes(overview, width), *_alarms(overview)]
    return Group(*parts)


def bars_of(width: int) -> int:
    """How many columns of a course have room."""
    return min(60, max(4, (width - _OTHER_COLUMNS) // 2))


def _headlines(overview: Overview) -> Iterator[Text]:
    heads = sum(course.site.heads for course in overview.courses)
    steps = f", steps {overview.first_step:,} to {overview.last_step:,}" if overview.samples else ""
    named = " ".join(clean(f"#{tag}") for tag in overview.tags)
    yield Text.assemble((clean(overview.name), "bold"), f"  {clean(overview.model)}  ", (named, "cyan"))
    sites = f"{count(len(overview.courses), 'site')}, {count(heads, 'head')}"
    yield Text(f"{count(overview.samples, 'sample')}{steps}; {sites}; {_state(overview)}")
    if overview.notes:
        yield Text(clean(overview.notes), style="dim")
    first = [one for one in overview.segments if one.rank == overview.segments[0].rank and one.first_step is not None]
    if resumed := [f"{one.first_step:,}" for one in first[1:]]:
        yield Text(f"resumed at step {', '.join(resumed)}")
    for remark in overview.remarks:
        yield Text(clean(remark), style="yellow")
    for one in overview.coverage.skipped:
        yield Text.assemble(("not read ", "yellow"), clean(f"{one.name} ({one.mode}): {one.reason}"))


def _state(overview: Overview) -> str:
    if overview.live:
        return "live"
    if overview.last_time is None:
        return "ended"
    return f"ended {datetime.fromtimestamp(overview.last_time, UTC):%Y-%m-%d %H:%M} UTC"


def _as_reading(course: Course) -> SiteReading:
    site = course.site
    return SiteReading(site.name, site.kind, site.mode, 0, 0, (), site.normalizer, site.layer)


def _title(stack: Stack, width: int) -> Iterator[Text]:
    what = f"  {clean(stack.kind)} attention, {clean(stack.mode)}"
    yield Text.assemble("\n", (_fit(clean(stack.pattern), width - len(what)), "bold"), what)


def _stack(stack: Stack, courses: Sequence[Course], bars: int, plain: bool) -> Iterator[RenderableType]:
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column(stack.column, justify="right")
    for title in ("normalised entropy", " largest logit"):
        grid.add_column(title, no_wrap=True)
        grid.add_column("now", justify="right", no_wrap=True)
    largest = max((value for course in courses for value in course.max_logit if value is not None), default=0.0)
    for course, label in zip(courses, stack.labels, strict=True):
        entropy, logit = course.normalized_entropy, course.max_logit
        lines = sparkline(entropy, bars, low=0.0, high=1.0), sparkline(logit, bars, low=0.0, high=largest)
        drawn = [line.translate(_PLAIN) if plain else line for line in lines]
        now = _now(course.last_normalized_entropy, ".2f"), _now(course.last_max_logit, ".1f")
        grid.add_row(clean(label), drawn[0], now[0], f" {drawn[1]}", now[1])
    yield grid


def _now(value: float | None, digits: str) -> str:
    return "-" if value is None else f"{value:{digits}}"


def _changes(overview: Overview, width: int) -> Iterator[RenderableType]:
    if not overview.changes:
        return
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column("site", no_wrap=True)
    told = any(not math.isnan(one.per_1000_steps) for one in overview.changes)
    titles = ("head", "first", "last", *(("per 1,000", "95% interval") if told else ()))
    for title in titles:
        grid.add_column(title, justify="right", style="dim" if "%" in title else "")
    rows = [_cells(one)[: len(titles)] for one in overview.changes]
    room = width - sum(2 + max(map(len, column)) for column in zip(titles, *rows, strict=True))
    for one, cells in zip(overview.changes, rows, strict=True):
        grid.add_row(Text(_fit(clean(one.site.name), room)), *cells)
    what = f"first and last tenth; {'per 1,000 steps' if told else 'too short or too restless for a trend'}"
    yield Text.assemble(f"\nlargest changes of {clean(overview.statistic)}", (f"  {what}", "dim"))
    yield grid


def _cells(one: Change) -> tuple[str, ...]:
    """What stands beside the name of its site."""
    first, last, slope, low, high = (
        number(value, 3) for value in (one.first, one.last, one.per_1000_steps, one.low, one.high)
    )
    trend = ("–", "not known") if math.isnan(one.per_1000_steps) else (slope, f"{low} to {high}")
    return str(one.head), first, last, *trend


def _fit(name: str, room: int) -> str:
    """A site's name in one line: its end, from the word before its last number on at least."""
    parts, room = name.split("."), max(room, FEWEST_LETTERS)
    numbered = [place for place, part in enumerate(parts) if part == "*" or part.isdecimal()]
    if len(name) <= room:
        return name
    starts = range(1, numbered[-1] if numbered else len(parts))
    ends = [f"…{'.'.join(parts[start:])}" for start in starts] or [name]
    return next((end for end in ends if len(end) <= room), cut(ends[-1], room))


def _alarms(overview: Overview) -> Iterator[RenderableType]:
    """By severity and kind, the first few one by one, with the advice once; then what was not judged."""
    yield Text("")
    if overview.unmeasured is not None:
        yield Text(clean(f"nothing was measured: {overview.unmeasured}"), style="yellow")
    elif not overview.alarms:
        yield Text("no alarms", style="green")
    for (severity, kind), group in by_kind(overview.alarms).items():
        ended = sum(alarm.ended is not None for alarm in group)
        many = f" {clean(kind)}: {count(len(group), 'alarm')}{f', {ended} ended' if ended else ''}"
        yield Text.assemble((clean(severity), STYLES[level_of(severity)]), many)
        standing_first = sorted(group, key=lambda alarm: alarm.ended is not None)
        yield from (_indent(with_course(alarm), "dim") for alarm in standing_first[:MOST_ALARMS])
        if len(group) > MOST_ALARMS:
            yield _indent(f"and {len(group) - MOST_ALARMS} more", "dim")
        yield _indent(group[0].advice)
    for note in overview.not_judged:
        yield Text(clean(note), style="dim")


def _indent(text: str, style: str = "") -> RenderableType:
    return Padding(Text(clean(text), style=style), (0, 0, 0, 2))
