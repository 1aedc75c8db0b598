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
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The .safetensors file to write.")] = None,
    text: Text = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Instead of a model: q, k, v that an engine saved, one .safetensors a layer (docs/fingerprints.md).",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows that are kept of each site.")] = 32,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help="Numbers of the heads that are kept of each site, as 0,4, and with them those that read the same "
            "keys. Without it, all.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Windows of the text that are read.")] = SEQUENCES,
    max_length: MaxLength = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    dtype: Weights = Dtype.float32,
) -> None:
    """Keep what the attention of MODEL does with a text: a few MB without text or ids, to compare with another engine,
    precision or commit by `attemper compare A B --explain`.
    """
    if out is None:
        raise typer.BadParameter("is missing: name the .safetensors file to write.", param_hint="--out")
    if folder is not None and (model is not None or text is not None):
        raise typer.BadParameter("takes the place of MODEL and --text: give it alone.", param_hint="--from")
    from attemper.files import check_target

    chosen = _numbers(heads)
    check_target(out, "reading")
    if folder is not None:
        from attemper.fingerprints.taking.engine import fingerprint_of_folder

        if not folder.is_dir():
            raise InputError(f"{clean_name(folder)} is no folder: --from reads one .safetensors a layer from it.")
        found = fingerprint_of_folder(folder, rows=rows, heads=chosen)
    else:
        given = Input(text, max_length, batch_size, device, dtype)
        found = fingerprint_of(model, read_text(text), given, rows, sequences, chosen)
    path = found.save(out)
    say(f"{found!r} in {path.name}, {path.stat().st_size / 1e6:.1f} MB: no text and no ids are in it")
    for name, reason in found.skipped.items():
        say(f"not read: {clean_name(name)}: {reason}")


def _numbers(heads: str | None) -> list[int] | None:
    """Numbers of heads, written with commas."""
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

    loaded, batches, _ = model_and_text(model, words, given)
    return attemper.fingerprint(loaded, _first(batches, sequences), rows=rows, heads=heads, name=title_of(model))


def _first(batches: list[Any], sequences: int) -> list[Any]:
    """The first sequences of batches."""
    found: list[Any] = []
    for batch in batches:
        if sequences <= 0:
            break
        size = len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)
        cut = {name: part[:sequences] for name, part in batch.items()} if isinstance(batch, dict) else batch[:sequences]
        found.append(cut)
        sequences -= size
    return found
