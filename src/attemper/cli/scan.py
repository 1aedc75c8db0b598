"""``attemper scan``: every head of a pretrained model over a text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from attemper._backends import checked
from attemper.errors import BackendError, InputError
from attemper.monitor.alarms import checked_limits
from attemper.records import FEWEST_KEYS


class Dtype(StrEnum):
    """Types that weights can be loaded in."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    float64 = "float64"


TEXT = Path(__file__).parent.parent / "lab" / "text.txt"
"""The text that ships."""


def scan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or hub id of a transformers model that reads text (safetensors only). Without it, the small "
            "byte-level language model that ships."
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="File to read, or - for standard input. Without it, the text that ships.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a window; a longer text is read in consecutive windows.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows at a time.")] = 8,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = Dtype.float32,
    backend: Annotated[str, typer.Option(help="auto, or one that `attemper doctor` lists.")] = "auto",
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V", help="Limit of an alarm: collapsed, diffuse, logits or first_token. Repeatable."
        ),
    ] = None,
    fewest_keys: Annotated[
        int, typer.Option(min=2, help="Keys that a row must see before its sharpness is judged.")
    ] = FEWEST_KEYS,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Write a page to look at: one HTML file that opens offline.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
    fail_on_alarm: Annotated[
        bool,
        typer.Option("--fail-on-alarm", help="Exit with 3 if an alarm is a warning or worse (notices do not count)."),
    ] = False,
) -> None:
    """Exact entropy and logit size of every head of MODEL, as a table or as JSON."""
    limits = _limits(limit or [])
    with _usage("--backend"):
        checked(backend, device)
    words = read_text(text)
    if html is not None:
        from attemper.report import checked_target

        checked_target(html)  # a scan can take long: told before it, not after
    from rich.console import Console
    from rich.progress import Progress

    import attemper

    if model is None:
        loaded, batches = _shipped(words, max_length, batch_size, device, dtype.value)
    else:
        from attemper.integrations import pretrained

        known = pretrained.load(model, device=device, dtype=dtype.value)
        loaded = known.model
        batches = pretrained.windows(known, words, max_length=max_length, batch_size=batch_size)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("scan", total=len(batches))
        result = attemper.scan(
            loaded, batches, limits=limits, fewest_keys=fewest_keys, backend=backend, name=_title(model),
            on_batch=lambda done: progress.update(task, completed=done),
        )  # fmt: skip
    if html is not None:
        result.to_html(html)
    if as_json:
        print(result.to_json())
    else:
        Console().print(result)
    if fail_on_alarm and any(alarm.severity != "notice" for alarm in result.alarms):
        raise typer.Exit(3)


def _shipped(words: str, max_length: int | None, batch_size: int, device: str, dtype: str) -> tuple[Any, list[Any]]:
    """The byte-level model that ships, and the text as batches of windows of bytes, the rest as one of its own."""
    import torch

    from attemper.integrations.pretrained import moved
    from attemper.lab import model as lab

    if not words.strip():
        raise InputError("the text is empty: there is nothing to scan. Pass a file with text, or leave --text out.")
    model = lab.load()
    context = model.config.context
    if max_length is not None and max_length > context:
        raise InputError(f"max_length is {max_length} but the model that ships reads at most {context} bytes.")
    moved(model, device).to(getattr(torch, dtype))
    ids = lab.encode(words).to(device)
    full = lab.windows(ids, max_length or context)
    rest = ids[full.numel() :]
    return model, [*(full.split(batch_size) if len(full) else ()), *([rest[None]] if len(rest) else ())]


def _limits(options: list[str]) -> dict[str, float]:
    """``NAME=V`` options as numbers, with names that exist."""
    limits = {}
    for option in options:
        name, equals, value = option.partition("=")
        try:
            limits[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise typer.BadParameter(f"{option!r} is not NAME=V, for example logits=50.", param_hint="--limit")
    with _usage("--limit"):
        checked_limits(limits)
    return limits


@contextmanager
def _usage(option: str) -> Iterator[None]:
    """What the library says of an option's value is bad usage: told before anything is loaded, exit code 2."""
    try:
        yield
    except (InputError, BackendError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def read_text(text: str | None) -> str:
    """The text of a ``--text`` option.

    Raises:
        InputError: the file is missing, is not text, or cannot be read.
    """
    path = TEXT if text is None else Path("standard input" if text == "-" else text)
    try:
        return sys.stdin.buffer.read().decode("utf-8") if text == "-" else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise InputError(f"the text {path} cannot be read: {error.strerror or error}.") from error


def _title(model: str | None) -> str:
    """A folder by its name, not by where this machine keeps it."""
    if model is None:
        return "attemper's byte-level model"
    path = Path(model)
    if not path.is_dir():
        return model
    resolved = path.resolve()
    return f"{resolved.parent.name}/{resolved.name}"
