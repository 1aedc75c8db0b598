"""``attemper lab``: the small experiments, as tables, JSON or a picture."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.checks import did_you_mean
from attemper.cli.output import INTERRUPTED, cell_text, check_files, failure, open_console, print_json, say
from attemper.cli.process import loading
from attemper.text import clean_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid

    from attemper.lab.experiment import Experiment, Table


def complete_experiment(incomplete: str) -> list[str]:
    """Names for the shell's completion."""
    from attemper.lab import EXPERIMENTS, TRAINED

    return [name for name in EXPERIMENTS | TRAINED if name.startswith(incomplete)]


def lab(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Name of the experiment. Without it, lists all of them.", autocompletion=complete_experiment
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Random seed. The same seed gives the same numbers.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with sliders that computes its curves offline."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw its charts into a .png file (needs matplotlib).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep training runs here, to continue later. By default, lab-runs/NAME."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Training processes, one thread each. By default, 2.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each training run.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds to train.")] = None,
    at_most: Annotated[
        int | None, typer.Option(min=0, help="Train at most this many missing runs, then show all finished ones.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Train only a few steps, to try the command. The numbers mean nothing.")
    ] = False,
    results: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show the results.json of a finished training without training.")
    ] = None,
) -> None:
    """Run small experiments: why attention is scaled, and what temperature does. Without a name, lists them.

    `collapse` trains models for half an hour. If you stop it, the same command continues where it was.
    """
    from attemper.lab import EXPERIMENTS, RESEARCH, TRAINED, new_place, run

    if experiment in RESEARCH:
        raise SystemExit(failure(new_place(experiment), 2))
    if experiment is None:
        if png is not None:
            raise typer.BadParameter("a picture needs the name of an experiment.", param_hint="--png")
        if html is not None:
            raise typer.BadParameter("a page needs the name of an experiment.", param_hint="--html")
        _list(EXPERIMENTS | TRAINED, as_json)
        return
    numbers = {"workers": workers, "steps": steps, "seeds": seeds, "at_most": at_most}
    training = {"out": out, **numbers, "quick": quick or None}
    _check_training(experiment, training, results, seed)
    if experiment not in EXPERIMENTS | TRAINED:
        names = ", ".join(EXPERIMENTS | TRAINED)
        nearest = did_you_mean(experiment, EXPERIMENTS | TRAINED)
        raise typer.BadParameter(f"{experiment!r} is none of: {names}.{nearest}", param_hint="experiment")
    check_files(html)
    _write_page(experiment, html, seed)
    if png is not None:
        from attemper.lab.draw import check_picture

        check_picture(png)  # reports a path that cannot be written before the experiment runs
    _announce(experiment, training, results)
    with loading():
        import attemper.functional  # noqa: F401 - with torch
    try:
        result = _train(experiment, training, results) if experiment in TRAINED else run(experiment, seed=seed)
    except KeyboardInterrupt:
        raise SystemExit(failure(_how_to_go_on(experiment, training), INTERRUPTED)) from None
    if png is not None:
        from attemper.lab.draw import draw

        say(f"drawn: {draw(result, png)}")
    if as_json:
        print_json(result.to_json(indent=2))
    else:
        print_experiment(result)


def _write_page(experiment: str, html: Path | None, seed: int) -> None:
    """The page of an experiment, where one is asked for; bad usage if it has none."""
    if html is None:
        return
    from attemper.lab import pages

    if experiment not in pages.PAGES:
        raise typer.BadParameter(
            f"{experiment} has no page: its curves are measured, not computed by a formula. "
            f"These have one: {', '.join(pages.PAGES)}.",
            param_hint="--html",
        )
    say(f"page: {clean_name(pages.write(experiment, html, seed=seed))}")


def _announce(experiment: str, training: dict[str, Any], results: Path | None) -> None:
    """What is about to happen and how long it takes, before torch is imported, which takes seconds itself."""
    from attemper.lab import EXPERIMENTS, TAKES, TRAINED

    told = f"lab {experiment}: {(EXPERIMENTS | TRAINED)[experiment]}"
    if results is not None:
        takes = f"shown from {clean_name(results)}"
    elif training["quick"]:
        takes = "takes up to a minute with --quick; its numbers mean nothing"
    else:
        less = "; less with fewer --steps or --seeds" if experiment in TRAINED else ""
        takes = f"takes {TAKES[experiment]}{less}"
    say(f"{told}; {takes}")
    if experiment in TRAINED and results is None:
        place = clean_name(_folder(experiment, training))
        say(f"runs are kept in {place}: after Ctrl-C, the same command continues")


def _folder(experiment: str, training: dict[str, Any]) -> Path:
    return training["out"] or Path("lab-runs") / experiment


def _how_to_go_on(experiment: str, training: dict[str, Any]) -> str:
    from attemper.lab import TRAINED

    if experiment not in TRAINED:
        return f"interrupted; `attemper lab {experiment}` starts anew."
    return f"interrupted; finished runs are in {_folder(experiment, training)}: run the same command again to continue."


def _check_training(experiment: str, training: dict[str, Any], results: Path | None, seed: int) -> None:
    """Options that an experiment does not have are bad usage: they would do nothing."""
    from attemper.lab import EXPERIMENTS, TRAINED

    options = {name.replace("_", "-"): value for name, value in (training | {"results": results}).items()}
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if experiment in EXPERIMENTS and given:
        raise typer.BadParameter(
            f"{experiment} has no {', '.join(given)}: only experiments that train have these options. Leave them out.",
            param_hint=given[0],
        )
    if experiment in TRAINED and seed:
        raise typer.BadParameter(f"{experiment} runs over several seeds: use --seeds.", param_hint="--seed")
    if results is not None and len(given) > 1:
        raise typer.BadParameter("shows finished results: leave out the other options.", param_hint="--results")


def _train(experiment: str, training: dict[str, Any], results: Path | None) -> Experiment:
    from attemper.lab import read_results, train

    if results is not None:
        return read_results(experiment, results)
    given = {name: value for name, value in training.items() if value is not None and name != "out"}
    out = _folder(experiment, training)
    return train(experiment, out=out, report=say, **given)


def _list(experiments: dict[str, str], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps({"schema": 1, "experiments": experiments}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    from attemper.lab import TAKES

    table = Table("experiment", "what it shows", "takes", title="attemper lab NAME", title_justify="left")
    for name, shows in experiments.items():
        table.add_row(name, shows, TAKES[name])
    Console().print(table)


def print_experiment(result: Experiment) -> None:
    """The tables of an experiment, each as wide as the terminal lets it be."""
    console = open_console()
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
        parts = (*column.name.split(), *unit.split(), *(cell_text(row[number]) for row in table.rows))
        width = max(1, *map(len, parts)) if narrow else 9999
        lines = [line for part in (column.name, unit) for line in textwrap.wrap(part, width, break_on_hyphens=False)]
        whole = max(map(len, (*lines, *(cell_text(row[number]) for row in table.rows))), default=0)
        grid.add_column(Text("\n".join(lines)), justify="left" if words else "right", no_wrap=True, min_width=whole)
    for row in table.rows:
        grid.add_row(*(Text(cell_text(cell)) for cell in row))
    return grid
