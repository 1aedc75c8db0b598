"""``attemper runs``: the runs below a folder, and how one is deleted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.cli.arguments import AsJson
from attemper.cli.output import print_json, say
from attemper.errors import InputError, MissingExtraError
from attemper.text import clean, clean_name, count, date_of, number, plain_table

if TYPE_CHECKING:
    from rich.table import Table


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder to search, at any depth.")] = Path(),
    alarms: Annotated[bool, typer.Option("--alarms", help="Judge every run and count its alarms.")] = False,
    delete: Annotated[Path | None, typer.Option(metavar="RUN", help="Delete the files of a run. Asks first.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the runs below FOLDER that attemper.watch(store=...) and the callbacks wrote."""
    if delete is not None:
        _delete(delete, asked=not yes, as_json=as_json)
        return
    from attemper.store.folder import runs_below

    if not folder.is_dir():
        raise InputError(f"there is no folder {clean_name(folder)}.")
    found = [_row(path, folder, alarms) for path in runs_below(folder)]
    if as_json:
        print_json({"schema": 1, "runs": found})
    elif not found:
        say(f"there is no run below {folder.absolute()}. Write one with attemper.watch(model, store='runs/a').")
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console()
        console.print(_table(found, alarms))
        for row in found:
            if row["error"] is not None:
                console.print(Text(clean(f"{row['path']}: {row['error']}"), style="yellow"))


def _row(path: Path, folder: Path, alarms: bool) -> dict[str, Any]:
    """The row of one run; of one that cannot be read, why."""
    from attemper.results.run import open_run
    from attemper.store.folder import files_of

    files = files_of(path)
    row: dict[str, Any] = {"path": str(path.relative_to(folder)) if path != folder else str(path), "bytes": files.bytes}
    try:
        with open_run(path) as run:
            steps = run.steps
            row |= {
                "name": run.name,
                "model": str(run.about.get("model") or ""),
                "samples": len(steps),
                "first_step": int(steps[0]) if len(steps) else None,
                "last_step": int(steps[-1]) if len(steps) else None,
                "live": run.live,
                "alarms": len(run.alarms()) if alarms and len(steps) else None,
                "error": None,
            }
    except Exception as error:  # a list shows the other runs, whatever is wrong with one
        row |= dict.fromkeys(("name", "model", "samples", "first_step", "last_step", "alarms")) | {"live": False}
        ours = isinstance(error, InputError | MissingExtraError)
        row["error"] = str(error) if ours else f"{type(error).__name__}: {error}"
    return row | {"written": date_of(files.written)}


def _table(rows: list[dict[str, Any]], alarms: bool) -> Table:
    from rich.text import Text

    grid = plain_table(("run", "model"), ("steps", "samples", *(["alarms"] if alarms else []), "size"))
    grid.add_column("last written (UTC)", no_wrap=True)
    for row in rows:
        title = clean(
            row["path"] if row["name"] in (None, Path(row["path"]).name) else f"{row['path']} ({row['name']})"
        )
        if row["error"] is not None:
            cells = [Text("cannot be read", style="yellow"), *[""] * (3 if alarms else 2)]
        else:
            steps = f"{row['first_step']:,} to {row['last_step']:,}" if row["samples"] else "-"
            cells = [
                Text(clean(row["model"])),
                steps,
                f"{row['samples']:,}",
                *([number(row["alarms"])] if alarms else []),
            ]
        written = Text("live", style="green") if row["live"] else row["written"].replace("T", " ").removesuffix("Z")
        grid.add_row(Text(clean(title)), *cells, size(row["bytes"]), written)
    return grid


def size(many: int) -> str:
    """Bytes for people.

    Example:
        >>> size(900), size(1_234_567)
        ('900 B', '1.2 MB')
    """
    value, unit = float(many), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def _delete(path: Path, *, asked: bool, as_json: bool) -> None:
    from attemper.store.folder import check_deletable, delete_run, files_of, is_run

    if not path.is_dir() or not is_run(path):
        raise InputError(f"there is no run in {clean_name(path)}: nothing was deleted.")
    check_deletable(path)
    files = files_of(path)
    what = f"{count(len(files.paths), 'file')} of the run {clean_name(path)}, {size(files.bytes)}"
    if asked:
        typer.confirm(f"delete {what}?", abort=True, err=True)
    delete_run(path)
    if as_json:
        deleted = {"path": str(path), "files": len(files.paths), "bytes": files.bytes}
        print_json({"schema": 1, "deleted": deleted})
    else:
        say(f"deleted {what}")
