"""A run in the terminal: the course of every layer, the heads that changed most, alarms, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attemper.readings.alarms import by_kind, level_of
from attemper.readings.reading import SiteReading
from attemper.readings.sample import MODES
from attemper.readings.stacks import Stack, stacks
from attemper.report.document import kind_of
from attemper.report.overview import Change, Course, Overview, ScalarCourse
from attemper.report.scan_table import STYLES, indent
from attemper.report.texts import (
    Message,
    advice,
    alarm_line,
    alarm_name,
    few_rows,
    message,
    note,
    reason,
    say,
    severity_title,
    why,
)
from attemper.statistics import SHOWN
from attemper.text import BARS, clean, cut, number, plain_table, sparkline

MOST_ALARMS = 3
"""Alarms of a kind that are listed one by one."""
_PLAIN = str.maketrans(dict(zip(BARS, "_.-:=+*#", strict=True)))
"""Bars for terminals that have only ASCII."""
FEWEST_LETTERS = 12
"""That a site's name is cut to."""
_WIDE = 76
"""Columns from which on the ends of each scale have room."""


Say = Callable[..., str]
"""A key of ``texts`` and its values -> what it is in the language of the view."""


def table(overview: Overview, width: int, *, plain: bool = False, language: str = "en") -> RenderableType:
    """The whole overview in ``width`` columns; ``plain``: in ASCII, as far as it is ours."""

    def t(key: str, **values: Any) -> str:
        return clean(say(message(key, **values), language))

    parts: list[RenderableType] = [*_headlines(overview, t, language)]
    labels = (course.site for course in overview.courses)
    sites = tuple(SiteReading(one.name, one.kind, one.mode, 0, 0, (), one.normalizer, one.layer) for one in labels)
    bars, ends = bars_of(width, most=width), width >= _WIDE
    if overview.scalars:
        parts.append(_scalars(overview.scalars, bars, ends, plain, t))
    for stack in stacks(sites):
        what = f"  {t('site.kind', kind=kind_of(stack.kind), mode=_mode(stack.mode))}"
        parts.append(Text.assemble("\n", (_fit(clean(stack.pattern), width - cell_len(what)), "bold"), what))
        parts.append(_stack(stack, [overview.courses[place] for place in stack.places], bars, ends, plain, t))
    parts += [*_changes(overview, width, t), *_alarms(overview, t, language)]
    return Group(*parts)


def bars_of(width: int, most: int = 60) -> int:
    """How many columns of a course have room."""
    return min(most, max(4, (width - (50 if width >= _WIDE else 30)) // 2))


def _headlines(overview: Overview, t: Say, language: str) -> Iterator[Text]:
    heads = sum(course.site.heads for course in overview.courses)
    ends = {"first": overview.first_step, "last": overview.last_step}
    steps = message("show.steps", **ends) if overview.samples else ""
    named = " ".join(clean(f"#{tag}") for tag in overview.tags)
    yield Text.assemble((clean(overview.name), "bold"), f"  {clean(overview.model)}  ", (named, "cyan"))
    size = {"samples": overview.samples, "sites": len(overview.courses), "heads": heads}
    counted = {name: message(f"count.{name}", n=many) for name, many in size.items()}
    yield Text(t("show.size", steps=steps, state=_state(overview), **counted))
    if overview.notes:
        yield Text(clean(overview.notes), style="dim")
    first = [one for one in overview.segments if one.rank == overview.segments[0].rank and one.first_step is not None]
    if resumed := [f"{one.first_step:,}" for one in first[1:]]:
        yield Text(t("show.resumed", steps=", ".join(resumed)))
    for remark in overview.remarks:
        yield Text(t("as_is", said=_as_text(remark, note)) if language != "en" else clean(remark), style="yellow")
    for one in overview.coverage.skipped:
        yield Text.assemble(
            (t("show.not_read"), "yellow"),
            t("show.reason", name=one.name, mode=_mode(one.mode), reason=_as_text(one.reason, reason)),
        )


def _state(overview: Overview) -> Message:
    if overview.live or overview.last_time is None:
        return message("show.live" if overview.live else "show.ended")
    return message("show.ended_at", date=f"{datetime.fromtimestamp(overview.last_time, UTC):%Y-%m-%d %H:%M} UTC")


def _mode(mode: str) -> Message | str:
    return message(f"show.{mode}") if mode in MODES else mode


def _as_text(text: str, known: Callable[[str], Message | str]) -> Message | str:
    """The message that a text is, if it is one; else as it stands."""
    found = known(text)
    return found if isinstance(found, Message) else text


def _scalars(scalars: Sequence[ScalarCourse], bars: int, ends: bool, plain: bool, t: Say) -> Table:
    """What the loop gave with each step, above the layers."""
    grid = plain_table(gap=1)
    grid.add_column(f"\n{t('show.scalar')}", justify="right")
    grid.add_column(f"\n{t('show.every_step')}", no_wrap=True)
    for title in _scale_titles(ends, t):
        grid.add_column(f"\n{title}", justify="right", no_wrap=True)
    for one in scalars:
        grid.add_row(clean(one.name), *_course_cells(one.values, one.last, bars, ends, plain, number))
    return grid


def _stack(stack: Stack, courses: Sequence[Course], bars: int, ends: bool, plain: bool, t: Say) -> Table:
    grid = plain_table(gap=1)
    grid.add_column(t(f"table.{stack.column}"), justify="right")
    for title in (t("show.entropy"), f" {t('show.logit')}"):
        grid.add_column(title, no_wrap=True)
        for number_title in _scale_titles(ends, t):
            grid.add_column(number_title, justify="right", no_wrap=True)
    for course, label in zip(courses, stack.labels, strict=True):
        entropy = _course_cells(
            course.normalized_entropy, course.last_normalized_entropy, bars, ends, plain, _digits(3)
        )
        line, *numbers = _course_cells(course.max_logit, course.last_max_logit, bars, ends, plain, _digits(1))
        grid.add_row(clean(label), *entropy, f" {line}", *numbers)
    return grid


def _scale_titles(ends: bool, t: Say) -> Iterator[str]:
    """What stands beside a course: what its lowest and its highest bar are, and the last number."""
    return map(t, ("show.low", "show.high", "show.now") if ends else ("show.now",))


def _course_cells(
    values: Sequence[float | None],
    last: float | None,
    bars: int,
    ends: bool,
    plain: bool,
    said: Callable[[float | None], str],
) -> tuple[str, ...]:
    """A course as bars on a scale of its own, so that small values do not look flat beside large ones; the ends of that
    scale, and the last number.
    """
    known = [value for value in values if value is not None]
    low, high = min(known, default=None), max(known, default=None)
    line = sparkline(values, bars, low=low, high=high)
    return line.translate(_PLAIN) if plain else line, *map(said, (low, high, last) if ends else (last,))


def _digits(places: int) -> Callable[[float | None], str]:
    return lambda value: number(value) if value is None or abs(value) >= 1000 else f"{value:.{places}f}"


def _changes(overview: Overview, width: int, t: Say) -> Iterator[RenderableType]:
    if not overview.changes:
        return
    grid = plain_table()
    grid.add_column(t("table.site"), no_wrap=True)
    told = any(not math.isnan(one.per_1000_steps) for one in overview.changes)
    columns = ("table.head", "show.first", "show.last", *(("show.slope", "show.interval") if told else ()))
    titles = tuple(map(t, columns))
    for title in titles:
        grid.add_column(title, justify="right", style="dim" if "%" in title else "")
    rows = [_cells(one, t)[: len(titles)] for one in overview.changes]
    room = width - sum(2 + max(map(cell_len, column)) for column in zip(titles, *rows, strict=True))
    for one, cells in zip(overview.changes, rows, strict=True):
        grid.add_row(Text(_fit(clean(one.site.name), room)), *cells)
    known = overview.statistic in SHOWN
    statistic = message(f"statistic.{overview.statistic}.name") if known else overview.statistic
    what = t("show.tenths" if told else "show.no_trend")
    yield Text.assemble(f"\n{t('show.changes', statistic=statistic)}", (f"  {what}", "dim"))
    yield grid


def _cells(one: Change, t: Say) -> tuple[str, ...]:
    """What stands beside the name of its site."""
    first, last, slope, low, high = (
        number(value, 3) for value in (one.first, one.last, one.per_1000_steps, one.low, one.high)
    )
    trend = ("–", t("show.unknown")) if math.isnan(one.per_1000_steps) else (slope, t("show.range", low=low, high=high))
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


def _alarms(overview: Overview, t: Say, language: str) -> Iterator[RenderableType]:
    """By severity and kind, the first few one by one, with the advice once; then what was not judged."""
    yield Text("")
    if overview.unmeasured is not None:
        yield Text(t("show.unmeasured", reason=_as_text(overview.unmeasured, why)), style="yellow")
    elif not overview.alarms:
        yield Text(t("show.no_alarms"), style="green")
    for (severity, kind, _), group in by_kind(overview.alarms).items():
        ended = sum(alarm.ended is not None for alarm in group)
        gone = message("show.gone", n=ended) if ended else ""
        many = t("show.alarms", kind=alarm_name(kind), alarms=message("count.alarms", n=len(group)), ended=gone)
        yield Text.assemble((t("as_is", said=severity_title(severity)), STYLES[level_of(severity)]), " ", many)
        standing_first = sorted(group, key=lambda alarm: alarm.ended is not None)
        yield from (indent(alarm_line(alarm, language), "dim") for alarm in standing_first[:MOST_ALARMS])
        if len(group) > MOST_ALARMS:
            yield indent(t("show.more", n=len(group) - MOST_ALARMS), "dim")
        yield indent(t("as_is", said=advice(group[0])))
    if few := few_rows(overview.alarms, overview.fewest_keys):
        yield Text(t("as_is", said=few), style="dim")
    for one in overview.not_judged:
        yield Text(t("as_is", said=_as_text(one, note)) if language != "en" else clean(one), style="dim")
