"""``attemper pattern``: the weights of every head on one text, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from attemper.cli.arguments import Device, Dtype, Input, Text, TextModel, Weights, part_of, read_text, title_of
from attemper.cli.output import check_files, print_json, say
from attemper.cli.scan import model_and_text
from attemper.text import clean_name

TOKENS = 64
"""Of the text, without ``--max-length``."""


def pattern(
    model: TextModel = None,
    text: Text = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Show only the heads of this layer.")] = None,
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Show only the heads of this attention site. `attemper scan` lists the names."
        ),
    ] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Show only this head of the layer or site.")] = None,
    max_length: Annotated[int, typer.Option(min=1, help="Number of tokens to read, from the first on.")] = TOKENS,
    device: Device = "cpu",
    dtype: Weights = Dtype.float32,
    html: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File to write. By default, the model's name in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path and the heads as a JSON document.")] = False,
) -> None:
    """Write a page with all heads of MODEL on one text: a small map and the role of each. Click a map to enlarge it.

    The page opens offline and contains the tokens of the text.
    """
    if site is not None and layer is not None:
        raise typer.BadParameter("already names a layer: leave out --site or --layer.", param_hint="--site")
    words = read_text(text)
    check_files(html)
    import attemper
    from attemper.report.document import file_name
    from attemper.results.pattern import Patterns

    loaded, batches, tokenizer = model_and_text(
        model, words, Input(text, max_length, 1, device, dtype), "pattern(model, batch, layer=0)"
    )
    first, name = part_of(batches[0], slice(1)), title_of(model)
    options: dict[str, Any] = {"site": site, "layer": layer, "tokenizer": tokenizer}
    if head is None:
        found = attemper.pattern(loaded, first, **options)
        heads = Patterns(found, name=name, skipped=found.skipped)
    else:
        heads = Patterns([attemper.pattern(loaded, first, head=head, **options)], name=name)
    target = heads.to_html(html or f"{file_name(name)}.html")
    if as_json:
        roles = [{"site": one.site, "layer": one.layer, "head": one.head, "role": one.role} for one in heads]
        print_json({"schema": 1, "path": str(target), "heads": roles})
    else:
        say(f"wrote {clean_name(target)}: {heads.title}")
