"""``attemper calibrate``: temperatures that lower a language model's loss on a text, and how sure that is."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.cli.arguments import AsJson, Device, Dtype, Weights, read_text, shipped_model
from attemper.cli.output import bar, say
from attemper.cli.process import import_for
from attemper.errors import InputError
from attemper.integrations.checkpoint import PLACES
from attemper.text import count

if TYPE_CHECKING:
    from attemper.control.calibration import Calibration
    from attemper.integrations.pretrained import PretrainedModel

_WINDOW = 512
"""Tokens in a window, at most, without ``--max-length``."""
_SHIPPED_WINDOW = 128
"""Bytes in a window of the text that ships, which is short: enough windows to hold some out."""
_WANTED = 40
"""Batches, if the text gives them: enough to hold a dozen out."""
_MOST = 8
"""Windows in a batch, at most, without ``--batch-size``."""


class Per(StrEnum):
    """What gets a temperature of its own."""

    model = "model"
    layer = "layer"
    head = "head"


class Method(StrEnum):
    """How the least loss is searched."""

    gradient = "gradient"
    grid = "grid"


_SLOWER = {Method.gradient: 3.0, Method.grid: 1.0}
"""How much longer a batch of the search takes than one that is judged: a backward pass is two forward passes."""


def calibrate(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or hub id of a causal language model of transformers (safetensors only). By default, the "
            "small byte-level language model that ships."
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="File to calibrate on, or - for standard input. Use text of the kind that the model will read but "
            "was not trained on. By default, the short text that ships."
        ),
    ] = None,
    per: Annotated[Per, typer.Option(help="Find one temperature per model, per layer or per head.")] = (Per.model),
    method: Annotated[
        Method,
        typer.Option(help="Search by gradient, or on a grid. A grid needs forward passes only, but more of them."),
    ] = Method.gradient,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the temperatures to a safetensors file. Calibration.load reads it."),
    ] = None,
    fold: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write MODEL with the temperatures folded into its weights, and its tokenizer, for plain "
            "transformers. Refused if the text does not show that they help, or a temperature is at a bound.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Fold even if the temperatures are in doubt.")] = False,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per window. By default, 512, or the model's context if that is shorter."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows per batch. By default, up to 8, aiming at 40 batches.")
    ] = None,
    validation: Annotated[float, typer.Option(help="Share of the batches to hold out for validation.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Seed that chooses the held-out batches and draws the interval.")] = 0,
    device: Device = "cpu",
    dtype: Weights = Dtype.float32,
    as_json: AsJson = False,
) -> None:
    """Find temperatures that minimise the loss of MODEL on a text. Prints the held-out loss before and after."""
    if fold is not None and model is None:
        raise typer.BadParameter("needs MODEL: the model that ships is not a transformers model.", param_hint="--fold")
    if not 0 < validation < 1:
        raise typer.BadParameter(f"must be above 0 and below 1, got {validation}.", param_hint="--validation")
    _check_places(out, fold)
    words = read_text(text)
    if device in PLACES:
        raise InputError(
            f"--device {device}: calibration computes gradients, which need all weights on one device. Use cpu or cuda."
        )
    import_for(model)
    from rich.console import Console

    import attemper

    loaded: Any
    if model is None:
        known = None
        loaded, windows = _shipped_windows(words, max_length, text is None, device, dtype)
    else:
        known, windows = _pretrained_windows(model, words, max_length, device, dtype.value)
        loaded = known.model
        if fold is not None:
            for handle in known.tempered:  # plain transformers would not read them; refused before the search
                handle.fold()
            if known.tempered:
                say("the model already has attemper temperatures: they are folded in too")
    size = batch_size or max(1, min(_MOST, len(windows) // _WANTED))
    batches = windows.split(size)
    # A last batch of fewer windows would count as much as a whole one.
    batches = batches[:-1] if len(batches) > 1 and len(batches[-1]) < size else batches
    say(f"{count(len(batches), 'batch')} of {count(size, 'window')} of {windows.shape[1]} {_unit(model)}s")
    with _progress(round(validation * len(batches)), method) as on_batch:
        options: dict[str, Any] = {"per": per.value, "method": method.value, "validation": validation, "seed": seed}
        found = attemper.calibrate(loaded, batches, _loss, on_batch=on_batch, **options)
    if out is not None:
        say(f"wrote the temperatures to {found.save(out)}")
    refused = fold is not None and not force and found.doubt is not None
    if fold is not None and known is not None and not refused:
        _write_folded(found, known, fold, force)
    if as_json:
        print(json.dumps(found.to_dict() | {"bits": _bits(found) | {"unit": f"bits/{_unit(model)}"}}, indent=2))
    else:
        Console().print(found)
        print(_sentence(found, _unit(model)))
    if refused:
        raise InputError(f"--fold wrote nothing to {fold}: {found.doubt}, or pass --force.")


def _write_folded(found: Calibration, known: PretrainedModel, folder: Path, force: bool) -> None:
    model: Any = known.model
    found.fold(model, force=force)
    model.save_pretrained(folder)
    known.tokenizer.save_pretrained(folder)
    say(f"wrote {Path(folder)}: the model with its temperatures folded in, for plain transformers")
    if found.doubt is not None:
        say(f"by --force, although {found.doubt}")


@contextmanager
def _progress(held_out: int, method: Method) -> Iterator[Callable[[int, int], None]]:
    """To call after each batch: a bar in a terminal; elsewhere one line, once it is known how long a batch takes."""
    began = time.monotonic()

    def report(done: int, most: int) -> None:
        if move is not None:
            move(completed=done, total=most)
        elif done == held_out:
            seconds = (time.monotonic() - began) / done * (most - done) * _SLOWER[method]
            say(f"up to {count(most, 'batch')} in all, about {_duration(seconds)} at most")

    with bar("calibrate") as move:
        yield report


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _loss(model: Any, ids: Any) -> Any:
    """Mean cross-entropy in nats of the tokens of ``ids`` [B, N] but the first, each given those before it."""
    import torch.nn.functional as F

    given = model(ids[:, :-1])
    logits = getattr(given, "logits", given)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def _shipped_windows(words: str, max_length: int | None, short: bool, device: str, dtype: Dtype) -> tuple[Any, Any]:
    """The byte-level model that ships, and whole windows [w, n] of the text's bytes."""
    model = shipped_model(max_length, device, dtype)
    from attemper.lab import model as lab

    ids = lab.encode(words).to(device)
    return model, lab.windows(ids, max_length or (_SHIPPED_WINDOW if short else model.config.context))


def _pretrained_windows(
    source: str, words: str, max_length: int | None, device: str, dtype: str
) -> tuple[PretrainedModel, Any]:
    """A language model, whole windows [w, n] of the text's tokens."""
    import torch

    from attemper.integrations import pretrained

    known = pretrained.load(
        source, device=device, dtype=dtype, predicts=True, call="attemper.calibrate(model, batches)"
    )
    batches = pretrained.windows(known, words, max_length=max_length or min(_WINDOW, known.longest), batch_size=1)
    width = max(batch["input_ids"].shape[1] for batch in batches)
    whole = [batch["input_ids"] for batch in batches if batch["input_ids"].shape[1] == width]
    return known, torch.cat(whole)


def _check_places(out: Path | None, fold: Path | None) -> None:
    """Checks, before a search that can take long, that its files can be written."""
    for place in (out, fold):
        if place is not None and not place.absolute().parent.is_dir():
            raise InputError(f"{place.parent} is not a folder: create it first.")
    if fold is not None and fold.is_file():
        raise InputError(f"{fold} is a file: --fold takes a folder.")
    if fold is not None and fold.is_dir() and any(fold.iterdir()):
        raise InputError(f"{fold} is not empty: --fold needs an empty or new folder.")


def _unit(model: str | None) -> str:
    return "byte" if model is None else "token"


def _bits(found: Calibration) -> dict[str, Any]:
    """The losses, in nats a token, in bits."""
    return {
        "before": found.before / math.log(2),
        "after": found.after / math.log(2),
        "interval": [bound / math.log(2) for bound in found.interval],
    }


def _sentence(found: Calibration, unit: str) -> str:
    bits = _bits(found)
    low, high = bits["interval"]
    change = bits["after"] - bits["before"]
    return (
        f"in bits/{unit}: {bits['before']:.4f} -> {bits['after']:.4f} ({change:+.4f}, 95% interval {low:+.4f} to "
        f"{high:+.4f}); above in nats/{unit}"
    )
