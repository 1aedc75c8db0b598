"""``attemper check``: whether every token of a text sees exactly what it should."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.cli.arguments import (
    AsJson,
    BatchSize,
    Device,
    Dtype,
    Html,
    Input,
    Text,
    TextModel,
    Weights,
    read_text,
    title_of,
)
from attemper.cli.output import check_files, print_result
from attemper.cli.scan import model_and_text

if TYPE_CHECKING:
    from attemper.results.check import Check

TOKENS = 512
"""Of a window, without ``--max-length``."""


def check(
    model: TextModel = None,
    text: Text = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens per window, at most the model's context. By default, {TOKENS}.")
    ] = None,
    batch_size: BatchSize = 4,
    device: Device = "cpu",
    dtype: Weights = Dtype.float32,
    html: Html = None,
    as_json: AsJson = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 also if a rule is not declared or cannot be decided.")
    ] = False,
) -> None:
    """Check that every token sees exactly what it should. Prints each rule: declared, observed, kept or broken.

    Exits with 3 if a rule is broken.
    """
    words = read_text(text)
    check_files(html)
    found = check_of(model, words, Input(text, max_length, batch_size, device, dtype))
    if html is not None:
        found.to_html(html)
    print_result(found, as_json)
    if found.broken or (strict and found.unproved):
        raise typer.Exit(3)


def check_of(model: str | None, words: str, given: Input) -> Check:
    """Checks a pretrained model, or the one that ships (None), on the first windows of a text, some of them padded."""
    import attemper

    loaded, batches, tokenizer = model_and_text(model, words, given, "check(model, batch)")
    batch = batches[0]
    if isinstance(batch, dict):
        tokens = min(batch["input_ids"].shape[1], given.max_length or TOKENS)
        left = getattr(tokenizer, "padding_side", "right") == "left"
        batch = {name: _with_padding(part[:, :tokens], left, name) for name, part in batch.items()}
    return attemper.check(loaded, batch, name=title_of(model))


def _with_padding(part: Any, left: bool, name: str) -> Any:
    """Every second sequence with its last quarter, or its first, masked; ids stay, and nobody should read them."""
    if not name.endswith("attention_mask"):
        return part
    part, tokens = part.clone(), part.shape[1]
    part[1::2, slice(0, tokens // 4) if left else slice(tokens - tokens // 4, tokens)] = 0
    return part
