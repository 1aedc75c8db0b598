"""``attemper compare``: what differs between two scans, or two models, head by head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attemper.backends.table import check_backend
from attemper.checks import one_of
from attemper.cli.options import BackendName, BatchSize, Device, Dtype, Input, MaxLength, Text, Weights, read_text
from attemper.cli.output import check_files, print_json, usage_of
from attemper.cli.scan import scan_of
from attemper.errors import InputError
from attemper.text import clean_name

if TYPE_CHECKING:
    from attemper.readings.reading import Reading

SIDE = "What `attemper scan --json` printed into a file, or a model: a folder or a hub id."


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help=SIDE)],
    b: Annotated[str, typer.Argument(metavar="B", help=SIDE)],
    text: Text = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    dtype: Weights = Dtype.float32,
    backend: BackendName = "auto",
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="STATISTIC",
            help="By whose change the heads are in order, the largest first; without it, normalized_entropy.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="List only so many heads.")] = 20,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write a page to look at: one HTML file that opens offline.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """What differs between A and B, head by head: two files of `attemper scan --json`, two models, or one of each.

    Models are scanned first, on the text of --text; a file was scanned on its own.
    """
    _check_usage(sort, backend, device)
    files = [_is_file(side) for side in (a, b)]
    check_files(html, None)
    if all(files) and text is not None:
        raise typer.BadParameter("is of no use: both A and B are files of a scan that is done.", param_hint="--text")
    words = "" if all(files) else read_text(text)
    import attemper

    given = Input(text, max_length, batch_size, device, dtype)
    readings = [
        _read(side) if file else scan_of(side, words, given, backend=backend).reading
        for side, file in zip((a, b), files, strict=True)
    ]
    found = attemper.compare(*readings, names=_names(a, b, readings))
    if html is not None:
        found.to_html(html)
    if as_json:
        print_json(found.to_json())
    else:
        from rich.console import Console

        from attemper.readings.comparison_table import table

        console = Console()
        console.print(table(found, console.width, statistic=sort, top=top))


def _check_usage(sort: str | None, backend: str, device: str) -> None:
    with usage_of("--backend"):
        check_backend(backend, device)
    if sort is not None:
        from attemper.readings.comparison import STATISTICS

        with usage_of("--sort"):
            one_of("the statistic", sort, STATISTICS)


def _is_file(side: str) -> bool:
    """Whether a side is a stored scan. A name that ends in .json can only mean one."""
    path = Path(side)
    is_file = len(side) < 4096 and path.is_file() and path.suffix.lower() not in (".gguf", ".safetensors", ".bin")
    if not is_file and path.suffix.lower() == ".json":
        raise InputError(
            f"there is no file {clean_name(side)}. One is written by `attemper scan MODEL --json > FILE.json`."
        )
    return is_file


def _read(path: str) -> Reading:
    from attemper.readings.reading import Reading

    try:
        return Reading.from_json(Path(path))
    except InputError as error:
        raise InputError(f"{clean_name(path)}: {error}") from error


def _names(a: str, b: str, readings: list[Reading]) -> tuple[str, str]:
    """The models' names; where both are the same, with what tells them apart."""
    first, second = (reading.model for reading in readings)
    if first == second and a != b:
        return f"{first} ({Path(a).name})", f"{second} ({Path(b).name})"
    return first, second
