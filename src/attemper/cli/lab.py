"""``attemper lab``: the small experiments, as tables, JSON or a picture."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

    from attemper.lab.experiment import Cell, Experiment, Table


def lab(
    experiment: Annotated[str | None, typer.Argument(help="Which one; without it, they are listed.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn at random: the same seed, the same numbers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw its charts into a .png file (needs matplotlib).")
    ] = None,
) -> None:
    """Small experiments on why attention is scaled and what temperature does. Without a name, lists them."""
    from attemper.lab import EXPERIMENTS, run

    if experiment is None:
        if png is not None:
            raise typer.BadParameter("a picture needs the name of an experiment.", param_hint="--png")
        _list(EXPERIMENTS, as_json)
        return
    if experiment not in EXPERIMENTS:
        names = ", ".join(EXPERIMENTS)
        raise typer.BadParameter(f"{experiment!r} is none of: {names}.", param_hint="experiment")
    if png is not None:
        from attemper.lab.draw import checked_picture

        checked_picture(png)  # told before the experiment runs, not after
    result = run(experiment, seed=seed)
    if png is not None:
        from attemper.lab.draw import draw

        print(f"drawn: {draw(result, png)}", file=sys.stderr)
    if as_json:
        print(result.to_json(indent=2))
    else:
        _print(result)


def _list(experiments: dict[str, str], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({"schema": 1, "experiments": experiments}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", "what it shows", title="attemper lab NAME", title_justify="left")
    for name, shows in experiments.items():
        table.add_row(name, shows)
    Console().print(table)


def _print(result: Experiment) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"{result.name}: {result.question} (seed {result.seed})")
    for table in result.tables:
        measured = " (measured on this machine)" if table.measured else ""
        console.print(f"\n{table.title}{measured}", style="bold")
        _print_rows(table, console)
        console.print(table.see, style="italic")


def _print_rows(table: Table, console: Console) -> None:
    """Headings break between words, and only where the terminal asks for it; cells never do."""
    from rich.measure import Measurement

    grid = _grid(table, narrow=False)
    if Measurement.get(console, console.options.update_width(9999), grid).maximum > console.width:
        grid = _grid(table, narrow=True)
    # What is still too wide goes on in the next line of the terminal: cut-off digits would be other numbers.
    console.print(grid, crop=False)


def _grid(table: Table, *, narrow: bool) -> Grid:
    """The unit stands under the name. Narrow: every heading as narrow as its longest word and the cells below it."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid()
    for number, column in enumerate(table.columns):
        words = all(isinstance(row[number], str | None) for row in table.rows)
        unit = f"[{column.unit}]" if column.unit else ""
        parts = (*column.name.split(), *unit.split(), *(_shown(row[number]) for row in table.rows))
        width = max(1, *map(len, parts)) if narrow else 9999
        lines = [line for part in (column.name, unit) for line in textwrap.wrap(part, width, break_on_hyphens=False)]
        whole = max(map(len, (*lines, *(_shown(row[number]) for row in table.rows))), default=0)
        grid.add_column(Text("\n".join(lines)), justify="left" if words else "right", no_wrap=True, min_width=whole)
    for row in table.rows:
        grid.add_row(*(Text(_shown(cell)) for cell in row))
    return grid


def _shown(cell: Cell) -> str:
    """Five digits of a number that is not whole."""
    if cell is None:
        return "-"
    return f"{cell:.5g}" if isinstance(cell, float) else str(cell)
