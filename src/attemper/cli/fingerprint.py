"""``attemper fingerprint``: what a model's attention does with a text, as a file for `attemper compare --explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attemper.cli.arguments import (
    BatchSize,
    Device,
    Dtype,
    Input,
    MaxLength,
    Text,
    TextModel,
    Weights,
    part_of,
    read_text,
    title_of,
)
from attemper.cli.output import say
from attemper.cli.scan import model_and_text
from attemper.errors import InputError
from attemper.text import clean_name

SEQUENCES = 8
"""Windows of the text that are read, by default."""


def fingerprint(
    model: TextModel = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write this .safetensors file. Required.")] = None,
    text: Text = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Read q, k, v saved by an engine, one .safetensors per layer, not a model (docs/fingerprints.md).",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to keep per attention site.")] = 32,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Heads to keep per site, such as 0,4, plus the heads that share their keys. By default, all.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Windows of the text to read.")] = SEQUENCES,
    max_length: MaxLength = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    dtype: Weights = Dtype.float32,
) -> None:
    """Record what the attention of MODEL does with a text, in a file of a few MB without text or ids.

    `attemper compare A B --explain` compares it with another engine, precision or commit.
    """
    if out is None:
        raise typer.BadParameter("is missing: name the .safetensors file to write.", param_hint="--out")
    if folder is not None and (model is not None or text is not None):
        raise typer.BadParameter("replaces MODEL and --text: leave them out.", param_hint="--from")
    from attemper.files import check_target

    chosen = _numbers(heads)
    check_target(out, "reading")
    if folder is not None:
        from attemper.fingerprints.taking.engine import fingerprint_of_folder

        if not folder.is_dir():
            raise InputError(
                f"{clean_name(folder)} is not a folder: --from reads a folder with one .safetensors per layer."
            )
        found = fingerprint_of_folder(folder, rows=rows, heads=chosen)
    else:
        given = Input(text, max_length, batch_size, device, dtype)
        found = fingerprint_of(model, read_text(text), given, rows, sequences, chosen)
    path = found.save(out)
    say(f"{found!r} in {path.name}, {path.stat().st_size / 1e6:.1f} MB: no text and no ids are in it")
    for name, reason in found.skipped.items():
        say(f"not read: {clean_name(name)}: {reason}")


def _numbers(heads: str | None) -> list[int] | None:
    parts = None if heads is None else [part.strip() for part in heads.split(",")]
    if parts is not None and not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"is {clean_name(heads or '')!r}, expected numbers: 0,4.", param_hint="--heads")
    return None if parts is None else list(map(int, parts))


def fingerprint_of(
    model: str | None,
    words: str,
    given: Input,
    rows: int = 32,
    sequences: int = SEQUENCES,
    heads: list[int] | None = None,
) -> Any:
    """The fingerprint of a model, or of the one that ships (None), over the first windows of a text."""
    import attemper

    loaded, batches, _ = model_and_text(model, words, given, "fingerprint(model, batches)")
    return attemper.fingerprint(loaded, _first(batches, sequences), rows=rows, heads=heads, name=title_of(model))


def _first(batches: list[Any], sequences: int) -> list[Any]:
    found: list[Any] = []
    for batch in batches:
        if sequences <= 0:
            break
        size = len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)
        found.append(part_of(batch, slice(sequences)))
        sequences -= size
    return found
