"""A reading as a table in the terminal: layers x heads, coloured by normalised entropy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from attemper.readings.alarms import SEVERITIES, by_kind, level_of, with_course, with_shared_advice
from attemper.readings.labels import by_reason
from attemper.readings.reading import Alarm, HeadReading, Reading
from attemper.readings.stacks import Stack, heads_of_roles, over_heads, size_of, stacks
from attemper.report.notebook import VIRIDIS
from attemper.report.texts import few_rows, say
from attemper.statistics import SHOWN, SHOWN_BY_NAME
from attemper.text import clean, count, decimals, plain_table

_COLOURS = ["#{:02x}{:02x}{:02x}".format(*colour) for colour in VIRIDIS[::2]]
STYLES = dict(zip(SEVERITIES, ("cyan", "yellow", "bold red"), strict=True))
MOST_HEADS = 8
"""Heads of a role that are named."""
_OTHER_COLUMNS = 31
"""Width of what stands beside the heads."""


def table(reading: Reading, width: int, not_judged: Iterable[str] = ()) -> RenderableType:
    """The whole reading in ``width`` columns: a table for each stack, then alarms, and what was not read or judged."""
    parts: list[RenderableType] = [Text.assemble((clean(reading.model), "bold"), f"  {size_of(reading)}")]
    for stack in stacks(reading.sites):
        parts += _group(stack, width)
    parts += _roles(reading)
    parts += _alarms(reading)
    parts += [Text(clean(note), style="dim") for note in not_judged]
    for name, reason in by_reason((one.name, one.reason) for one in reading.skipped):
        parts.append(Text.assemble(("skipped ", "yellow"), clean(f"{name}: {reason}")))
    return Group(*parts)


def _group(stack: Stack, width: int) -> Iterator[RenderableType]:
    heads = [head for site in stack.sites for head in site.heads]
    columns = {name: one for name, one in SHOWN.items() if one.column and name not in SHOWN_BY_NAME}
    extra = [
        name for name in SHOWN_BY_NAME if SHOWN[name].column and any(getattr(head, name) is not None for head in heads)
    ]
    columns |= {name: SHOWN[name] for name in extra}
    heads_a_line = max(4, (width - _OTHER_COLUMNS - sum(len(SHOWN[name].column) + 1 for name in extra)) // 4)
    size = f"up to {count(stack.queries, 'query')} x {count(stack.keys, 'key')}"
    what = f"  {clean(stack.kind)} attention, {clean(stack.mode)}, {size}"
    yield Text.assemble("\n", (clean(stack.pattern), "bold"), what)
    grid = plain_table(gap=1)
    grid.add_column(stack.column, justify="right")
    grid.add_column("normalised entropy, % of log n", no_wrap=True)
    for one in columns.values():
        grid.add_column(one.column, justify="right")
    for site, label in zip(stack.sites, stack.labels, strict=True):
        numbers = (decimals(over_heads(site.heads, one.name), one.digits) for one in columns.values())
        grid.add_row(label, _cells(site.heads, heads_a_line), *numbers)
    yield grid


def _cells(heads: Iterable[HeadReading], heads_a_line: int) -> Text:
    text = Text()
    for place, head in enumerate(heads):
        if place and place % heads_a_line == 0:
            text.append("\n")
        text.append(*_cell(head))
        text.append(" ")
    return text


def _cell(head: HeadReading) -> tuple[str, str]:
    value = head.normalized_entropy
    if head.nonfinite_rows:
        return "NaN", "bold white on red"
    if value is None:
        return "  -", "dim"
    colour = _COLOURS[min(int(value * len(_COLOURS)), len(_COLOURS) - 1)]
    return f"{value * 100:3.0f}", f"{'black' if value > 0.5 else 'white'} on {colour}"


def _roles(reading: Reading) -> Iterator[RenderableType]:
    """The heads of each role, the clearest first; then how many have none, and what is not known of any head."""
    heads = [(site, head, head.roles) for site, head in reading.placed_heads if head.roles is not None]
    if not heads:
        return
    yield Text.assemble("\n", ("roles", "bold"), "  on the first text: layer.head score")
    grid = plain_table(show_header=False)
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right")
    grid.add_column(overflow="fold")
    for role, many, places in heads_of_roles(reading, MOST_HEADS):
        grid.add_row(role, str(many), places)
    if none := sum(head.role is None for _, head, _ in heads):
        grid.add_row("no role", str(none), "", style="dim")
    yield grid
    for role, needs in reading.unknown_roles.items():
        yield Text(f"not known: {role} (needs {needs})", style="dim")


def _alarms(reading: Reading) -> Iterator[RenderableType]:
    """Counts by kind, with the advice once and the first few places; then what was not judged."""
    yield Text("")
    if reading.alarms:
        yield from _of_kinds(reading.alarms)
    elif not reading.notes:
        yield Text("no alarms", style="green")
    elif reading.untrained_heads:
        yield Text("no other alarms")
    elif judged := sum(head.judged for head in reading.heads):
        yield Text(f"no alarms in the {judged} of {count(len(reading.heads), 'head')} that were judged", style="green")
    if few := few_rows(reading.alarms, reading.fewest_keys):
        yield Text(say(few), style="dim")
    yield from (Text(clean(note), style="yellow") for note in reading.notes)


def _of_kinds(alarms: tuple[Alarm, ...]) -> Iterator[RenderableType]:
    for (severity, kind, by_job), group in by_kind(with_shared_advice(alarms, alarms)).items():
        many = count(len(group), "layer" if group[0].head is None else "head")
        what = f" {clean(kind)}{', by their role' if by_job else ''}: {many}{_steps(group)}"
        yield Text.assemble((clean(severity), STYLES[level_of(severity)]), what)
        yield from (indent(with_course(alarm), "dim") for alarm in group[:3])
        if len(group) > 3:
            yield indent(f"and {len(group) - 3} more", "dim")
        yield indent(group[0].advice)


def _steps(group: list[Alarm]) -> str:
    """Since when the first of them rings."""
    since = min((alarm.since for alarm in group if alarm.since is not None), default=None)
    return "" if since is None else f", since step {since:,}"


def indent(text: str, style: str = "") -> RenderableType:
    """A line below a heading."""
    return Padding(Text(clean(text), style=style), (0, 0, 0, 2))
