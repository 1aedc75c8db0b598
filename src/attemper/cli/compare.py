"""``attemper compare``: what differs between two scans, or two models, head by head."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.backends.table import check_backend
from attemper.checks import one_of
from attemper.cli.arguments import (
    AsJson,
    BackendName,
    BatchSize,
    Device,
    Dtype,
    Html,
    Input,
    MaxLength,
    Text,
    Weights,
    read_text,
)
from attemper.cli.fingerprint import fingerprint_of
from attemper.cli.output import check_files, print_json, usage_of
from attemper.cli.scan import patterns_of, scan_of
from attemper.errors import InputError
from attemper.integrations.checkpoint import PLACES
from attemper.text import clean, clean_name

if TYPE_CHECKING:
    from attemper.monitor.pattern import Pattern
    from attemper.readings.reading import Reading
    from attemper.results.comparison import Comparison

SIDE = (
    "A file of `attemper scan --json` or `attemper merge --out`; a run, at its last sample or at RUN@STEP; or a model: "
    "a folder or a hub id."
)


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
            help="List heads by the change of this statistic, largest first. By default, normalized_entropy.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="List only this many heads.")] = 20,
    html: Html = None,
    picture: Annotated[
        bool,
        typer.Option(
            "--picture",
            help="Add attention pictures of the heads that differ most to the page, before and after. Needs two "
            "models. The page then contains the first 128 tokens of the text.",
        ),
    ] = False,
    as_json: AsJson = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say where two fingerprints (`attemper fingerprint`) or models first differ, and why. Exits with 3 if "
            "that is a fault.",
        ),
    ] = False,
) -> None:
    """Compare A and B head by head. Each is a file of `attemper scan --json`, a run or a model.

    Models are scanned first, on the text of --text. Files and runs keep the text they were measured on. With
    --explain, both are fingerprints or models that read the same tokens, and the first difference is named.
    """
    _check_usage(sort, backend, device)
    if explain:
        if picture or sort is not None:
            raise typer.BadParameter(
                "compares head by head, and --explain does not: leave it out.", param_hint="--picture or --sort"
            )
        _explain(a, b, Input(text, max_length, batch_size, device, dtype), as_json, html)
        return
    import attemper
    from attemper.readings.reading import Reading

    with ExitStack() as opened:
        stored = _read_stored((a, b), opened, fingerprints=False)
        check_files(html)
        if None not in stored and text is not None:
            raise typer.BadParameter(
                "needs a model: both A and B are files or runs, so leave it out.", param_hint="--text"
            )
        if picture and (html is None or stored != [None, None]):
            raise typer.BadParameter(
                "is of the page of two models: give --html, and no file of a scan and no run, which hold no text.",
                param_hint="--picture",
            )
        words = "" if None not in stored else read_text(text)
        given = Input(text, max_length, batch_size, device, dtype)
        sides = [
            _of_model(side, words, given, backend) if known is None else known
            for side, known in zip((a, b), stored, strict=True)
        ]
        readings = [side if isinstance(side, Reading) else side.reading for side in sides]
        found = attemper.compare(sides[0], sides[1], names=_names(a, b, readings))
        if html is not None:
            found.to_html(html, patterns=_patterns((a, b), words, given, found) if picture else ((), ()))
    if as_json:
        print_json(found.to_json())
    else:
        from rich.console import Console

        from attemper.results.comparison import table

        console = Console()
        console.print(table(found, console.width, statistic=sort, top=top))


def _explain(a: str, b: str, given: Input, as_json: bool, html: Path | None) -> None:
    """Prints why two fingerprints, or models, differ, and writes the page; exits with 3 if that is a fault."""
    import attemper

    check_files(html)
    with ExitStack() as opened:
        stored = _read_stored((a, b), opened, fingerprints=True)
    if None not in stored and given.text is not None:
        raise typer.BadParameter("needs a model: both A and B are fingerprints, so leave it out.", param_hint="--text")
    words = "" if None not in stored else read_text(given.text)
    sides = [
        fingerprint_of(side, words, given) if known is None else known
        for side, known in zip((a, b), stored, strict=True)
    ]
    found = attemper.explain(*sides)
    if html is not None:
        found.to_html(html)
    if as_json:
        print_json(found.to_json())
    else:
        print(f"{clean(found.message)}\nWhat to do: {found.advice}")
    if found.is_fault:
        raise typer.Exit(3)


def _check_usage(sort: str | None, backend: str, device: str) -> None:
    with usage_of("--backend"):
        check_backend(backend, None if device in PLACES else device)
    if sort is not None:
        from attemper.results.comparison import STATISTICS

        with usage_of("--sort"):
            one_of("the statistic", sort, STATISTICS)


def _patterns(
    models: tuple[str, str], words: str, given: Input, found: Comparison
) -> tuple[list[Pattern], list[Pattern]]:
    """The weights of the heads that differ most, before and after. Loads each model once more: one at a time."""
    from attemper.report.picture import MOST_PAIRS

    heads = [(head.site, head.head) for head in found.heads[:MOST_PAIRS]]
    return patterns_of(models[0], words, given, heads), patterns_of(models[1], words, given, heads)


def _read_stored(sides: tuple[str, str], opened: ExitStack, *, fingerprints: bool) -> list[Any]:
    """What each side holds that attemper wrote; None for a model. A run is open until ``opened`` is closed."""
    from attemper.fingerprints.record import Fingerprint

    found = [_open(side, opened) for side in sides]
    for side, one in zip(sides, found, strict=True):
        if one is not None and isinstance(one, Fingerprint) != fingerprints:
            raise InputError(
                f"{clean_name(side)} is not a fingerprint: --explain reads models and files of `attemper fingerprint`."
                if fingerprints
                else f"{clean_name(side)} is a fingerprint: `attemper compare A B --explain` reads it."
            )
    return found


def _open(side: str, opened: ExitStack) -> Any:
    import attemper
    from attemper.results.run import Run, open_run

    run, _, step = side.rpartition("@")
    if _is_ours(side):
        found = attemper.open(side)
        return opened.enter_context(found) if isinstance(found, Run) else found
    if _is_ours(run):
        if not step.isdecimal():
            raise InputError(f"{clean_name(side)}: a step is a whole number, such as {clean_name(run)}@1000.")
        return opened.enter_context(open_run(run)).at(int(step), alarms=False).reading
    if side.lower().endswith(".json"):
        raise InputError(
            f"there is no file {clean_name(side)}. Write one with `attemper scan MODEL --json > FILE.json`."
        )
    return None


def _is_ours(side: str) -> bool:
    """Whether a side is a file or the folder of a run, and no model, which is a folder, too."""
    from attemper.store.folder import is_run

    if os.path.isdir(side):
        return is_run(Path(side))
    return os.path.isfile(side) and not side.lower().endswith(".gguf")


def _of_model(side: str, words: str, given: Input, backend: str) -> Reading:
    try:
        return scan_of(side, words, given, backend=backend).reading
    except InputError as error:
        from attemper.integrations.hub import on_hub

        if not on_hub(side):
            raise
        raise InputError(
            f"{clean_name(side)} is neither a file nor a run here, so it was read as a model: {error}"
        ) from error


def _names(a: str, b: str, readings: list[Reading]) -> tuple[str, str]:
    """The models' names; where both are the same, with what tells them apart."""
    first, second = (reading.model for reading in readings)
    if first and second and (first != second or a == b):
        return first, second
    one, two = (f"{name} ({Path(side).name})" if name else Path(side).name for name, side in ((first, a), (second, b)))
    return one, two
