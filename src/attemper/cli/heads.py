"""Heads one by one, in the order of a statistic: as a table in the terminal and as CSV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attemper.checks import one_of
from attemper.cli.output import cell_text
from attemper.readings.reading import HEAD_COLUMNS, HeadReading, Reading, SiteReading, column_of, heads_as_csv
from attemper.statistics import SHOWN
from attemper.text import clean, columns_that_fit, count, plain_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_NOT_SORTED_BY = ("site", "layer", "kind", "mode", "head", "judged", "role")
STATISTICS = tuple(name for name in HEAD_COLUMNS if name not in _NOT_SORTED_BY)
"""What heads can be sorted by: the numbers of a reading, rows included."""
_LISTED = tuple(name for name, one in SHOWN.items() if one.brief)
"""Columns of the table, after the one it is sorted by; those that do not fit are left out."""


@dataclass(frozen=True)
class Order:
    """By which statistic heads are sorted, from which end, and how many of them are shown (None: all)."""

    statistic: str
    smallest_first: bool = False
    top: int | None = None

    def heads(self, reading: Reading) -> list[tuple[SiteReading, HeadReading]]:
        """Sites and heads in this order, those without a number last; of equal ones the first of the model first."""
        return sorted(reading.placed_heads, key=lambda pair: self._key(pair[1]))[: self.top]

    def _key(self, head: HeadReading) -> tuple[bool, float]:
        value = column_of(head, self.statistic)
        return value is None, 0.0 if value is None else value if self.smallest_first else -value


def check_order(sort: str | None, top: int | None) -> Order | None:
    """The order that ``--sort`` and ``--top`` ask for; None without both. ``--top`` alone: the sharpest heads."""
    if sort is None:
        return None if top is None else Order("normalized_entropy", smallest_first=True, top=top)
    name = sort.removeprefix("-")
    return Order(one_of("the statistic", name, STATISTICS), sort.startswith("-"), top)


def complete_statistic(incomplete: str) -> list[str]:
    """Names for the shell's completion, of either end."""
    minus = "-" if incomplete.startswith("-") else ""
    return [minus + name for name in STATISTICS if (minus + name).startswith(incomplete)]


def heads_csv(reading: Reading, order: Order | None) -> str:
    """Its heads in an order, or in that of the model."""
    return heads_as_csv(reading.placed_heads if order is None else order.heads(reading))


class HeadTable:
    """The heads of a reading in an order, as many columns as the terminal has room for."""

    def __init__(self, reading: Reading, order: Order) -> None:
        self.reading, self.order = reading, order

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        chosen, total = self.order.heads(self.reading), len(self.reading.heads)
        which = "smallest" if self.order.smallest_first else "largest"
        how_many = count(total, "head") if len(chosen) == total else f"{len(chosen)} of {count(total, 'head')}"
        model = (clean(self.reading.model), "bold")
        yield Text.assemble(model, f"  {how_many}, {which} {self.order.statistic} first")
        yield self._grid(chosen, options.max_width)
        if many := len(self.reading.alarms):
            yield Text(f"{count(many, 'alarm')}; leave out --sort and --top to list them", style="dim")

    def _grid(self, chosen: list[tuple[SiteReading, HeadReading]], width: int) -> Any:
        from rich.text import Text

        role = ("role",) if any(head.roles is not None for _, head in chosen) else ()
        columns = {
            name: [name, *(cell_text(column_of(head, name)) for _, head in chosen)]
            for name in dict.fromkeys((self.order.statistic, *role, *_LISTED))
        }
        several = len({site.mode for site in self.reading.sites}) > 1
        sites = [f"{clean(site.name)} ({clean(site.mode)})" if several else clean(site.name) for site, _ in chosen]
        names = columns_that_fit(columns, width - min(max(map(len, sites), default=4), width // 2) - len("  head"))
        grid = plain_table(("site",), ("head", *names))
        for row, (site, (_, head)) in enumerate(zip(sites, chosen, strict=True), 1):
            grid.add_row(Text(site), str(head.head), *(columns[name][row] for name in names))
        return grid
