"""Options that several verbs share, and the text that they name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from attemper.cli.output import say
from attemper.errors import InputError
from attemper.text import clean_name, count


class Dtype(StrEnum):
    """Types that weights can be loaded in."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float64 = "float64"


TEXT = Path(__file__).parent.parent / "lab" / "text.txt"
"""The text that ships."""

TextModel = Annotated[
    str | None,
    typer.Argument(
        help="Folder or hub id of a transformers model that reads text. By default, the small byte-level language "
        "model that ships."
    ),
]
Text = Annotated[
    str | None, typer.Option(help="File to read, or - for standard input. By default, the text that ships.")
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens per window. By default, the model's context. A longer text becomes several windows."
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Windows per batch.")]
Device = Annotated[
    str,
    typer.Option(
        help="Where to run: cpu, cuda, cuda:1 or mps. auto fills GPUs, then memory, then disk. disk keeps all weights "
        "on disk."
    ),
]
Weights = Annotated[Dtype, typer.Option(help="Type of the weights.")]
Html = Annotated[Path | None, typer.Option(metavar="PATH", help="Write one HTML page that opens offline.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")]
FailOnAlarm = Annotated[
    bool, typer.Option("--fail-on-alarm", help="Exit with 3 if an alarm is a warning or worse (notices do not count).")
]
BackendName = Annotated[str, typer.Option(help="Attention backend: auto, or a name that `attemper doctor` lists.")]


@dataclass(frozen=True)
class Input:
    """How a verb loads a model and what it reads with it: the values of these options."""

    text: str | None
    max_length: int | None
    batch_size: int
    device: str
    dtype: Dtype


def read_text(text: str | None) -> str:
    path = TEXT if text is None else Path("standard input" if text == "-" else text)
    if text == "-" and sys.stdin is None:
        raise InputError("standard input is closed: there is no text to read.")
    if text == "-" and sys.stdin.isatty():
        say("reading the text from the terminal, to its end: Ctrl-D")
    try:
        return sys.stdin.buffer.read().decode("utf-8") if text == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{clean_name(path)} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise InputError(f"the text {clean_name(path)} cannot be read: {error.strerror or error}.") from error


def text_name(text: str | None) -> str:
    """What a ``--text`` option reads, by a name: a file without its folder."""
    if text is None:
        return "the text that ships"
    return "standard input" if text == "-" else Path(text).name


def title_of(model: str | None) -> str:
    """A folder by its name, not by where this machine keeps it."""
    if model is None:
        return "attemper's byte-level model"
    path = Path(model)
    if not path.is_dir():
        return model
    resolved = path.resolve()
    return f"{resolved.parent.name}/{resolved.name}"


def shipped_model(max_length: int | None, device: str, dtype: Dtype) -> Any:
    import torch

    from attemper.integrations.device import to_device
    from attemper.lab import model as lab

    model = lab.load()
    if max_length is not None and max_length > model.config.context:
        raise InputError(
            f"max_length is {max_length} but the model that ships reads at most {count(model.config.context, 'byte')}."
        )
    return to_device(model, device).to(getattr(torch, dtype.value))


def part_of(batch: Any, *place: slice) -> Any:
    """The same part of every tensor of a batch."""
    return {name: tensor[place] for name, tensor in batch.items()} if isinstance(batch, dict) else batch[place]


def byte_names(ids: list[int]) -> list[str]:
    """The letters of the byte-level model's tokens."""
    return [chr(number) if number < 128 else f"\\x{number:02x}" for number in ids]
