"""A comparison as a table in the terminal: the heads that changed most, before and after."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from attemper.readings.comparison import Comparison, HeadChange
from attemper.statistics import SHOWN
from attemper.text import clean, columns_that_fit, count

MOST_HEADS = 20
"""Heads in a table that is not told how many."""


def table(comparison: Comparison, width: int, *, statistic: str | None = None, top: int = MOST_HEADS) -> RenderableType:
    """A line on everything, the ``top`` heads that changed most, and the sites that only one of the two has.

    Args:
        width: of the terminal. Columns that have no room are left out; ``--json`` has them.
        statistic: by whose change the heads are in order; None for that of ``comparison.heads``.
    """
    heads = comparison.heads if statistic is None else comparison.largest(statistic, len(comparison.heads))
    first = statistic or comparison.statistics[0]
    names = Text.assemble((clean(comparison.before), "bold"), " -> ", (clean(comparison.after), "bold"))
    parts: list[RenderableType] = [names, Text(clean(comparison.summary(first))), Text("")]
    parts.append(_grid(comparison, heads[:top], first, width))
    if len(heads) > top:
        parts.append(Text(f"and {count(len(heads) - top, 'head')} that changed less", style="dim"))
    for side, sites in (("before", comparison.only_before), ("after", comparison.only_after)):
        parts += [Text.assemble((f"only {side} ", "yellow"), clean(site)) for site in sites]
    return Group(*parts)


def _grid(comparison: Comparison, heads: tuple[HeadChange, ...], first: str, width: int) -> Table:
    modes = {head.mode for head in heads}
    sites = [f"{clean(head.site)} ({clean(head.mode)})" if len(modes) > 1 else clean(head.site) for head in heads]
    columns: dict[str, list[str]] = {"change": ["change", *(_change(head, first) for head in heads)]}
    for name in dict.fromkeys((first, *comparison.statistics)):
        columns[name] = [SHOWN[name].compared or SHOWN[name].column, *(_pair(head, name) for head in heads)]
    # The change is told beside its statistic; both have room in 60 columns.
    order = {first: columns[first], **columns}
    room = width - min(max(map(len, sites), default=4), width // 3) - len("  layer  head  ")
    fitting = columns_that_fit(order, room)
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column("site", overflow="fold")
    for title in ("layer", "head", *(columns[name][0] for name in fitting)):
        grid.add_column(title, justify="right", no_wrap=True)
    for row, (site, head) in enumerate(zip(sites, heads, strict=True), 1):
        layer = "-" if head.layer is None else str(head.layer)
        grid.add_row(Text(site), layer, str(head.head), *(_dim(columns[name][row]) for name in fitting))
    return grid


def _pair(head: HeadChange, statistic: str) -> str:
    """``before -> after``, one digit behind the point."""
    factor = 100.0 if SHOWN[statistic].percent else 1.0
    before, after = ("-" if value is None else f"{value * factor:.1f}" for value in head.pairs[statistic])
    return f"{before} -> {after}"


def _change(head: HeadChange, statistic: str) -> str:
    """With four digits, so that a small one is not taken for none."""
    change = head.change(statistic)
    if change is None:
        return "-"
    return f"{change * (100.0 if SHOWN[statistic].percent else 1.0):+.4g}" if change else "0"


def _dim(cell: str) -> Text:
    """Darker where nothing changed."""
    before, arrow, after = cell.partition(" -> ")
    return Text(cell, style="dim" if cell == "0" or (arrow and before == after) else "")
