"""``attemper scan``: every head of a pretrained model over a text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attemper.backends.table import check_backend
from attemper.cli.arguments import (
    AsJson,
    BackendName,
    BatchSize,
    Device,
    Dtype,
    FailOnAlarm,
    Html,
    Input,
    MaxLength,
    Text,
    Weights,
    byte_names,
    part_of,
    read_text,
    shipped_model,
    text_name,
    title_of,
)
from attemper.cli.heads import HeadTable, check_order, complete_statistic, heads_csv
from attemper.cli.output import bar, check_files, print_result, say, usage_of, write_csv
from attemper.cli.process import import_for
from attemper.cli.shards import SHARDS, Cut, Engine, scan_all, scan_one
from attemper.errors import InputError
from attemper.integrations.checkpoint import PLACES
from attemper.readings.alarms import LIMITS
from attemper.readings.limits import AlarmLimits
from attemper.readings.reading import FEWEST_KEYS
from attemper.text import clean_name

if TYPE_CHECKING:
    from attemper.monitor.pattern import Pattern
    from attemper.results.scan import Scan

_ALARMS = " or ".join(", ".join(LIMITS).rsplit(", ", 1))


def scan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder or hub id of a transformers model that reads text (safetensors only). By default, the small "
            "byte-level language model that ships."
        ),
    ] = None,
    text: Text = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Scan many texts: one per line (.txt), one per record (.jsonl, .parquet), or a folder of such files.",
        ),
    ] = None,
    field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field of a record that holds its text. By default, text.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Scan shard I of N of --texts (I from 0 to N-1) into --out. SLURM arrays and torchrun set it for you.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write parts here, for `attemper merge`. A retry continues here."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Scan all shards with this many processes, one thread each.")
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(min=1, max=99_999, help=f"Number of shards that the workers share. By default, {SHARDS}."),
    ] = None,
    engine: Annotated[
        Engine | None, typer.Option(help="Run the workers as processes of this machine, or on a Ray cluster.")
    ] = None,
    max_length: MaxLength = None,
    batch_size: BatchSize = 8,
    device: Device = "cpu",
    dtype: Weights = Dtype.float32,
    backend: BackendName = "auto",
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V", help=f"Limit of an alarm: {_ALARMS}. Repeatable."),
    ] = None,
    fewest_keys: Annotated[
        int, typer.Option(min=2, help="Judge sharpness only where a row sees at least this many keys.")
    ] = FEWEST_KEYS,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="STATISTIC",
            help="List heads one by one, largest STATISTIC first. -STATISTIC lists the smallest first.",
            autocompletion=complete_statistic,
        ),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="List only this many heads. Without --sort, the sharpest ones.")
    ] = None,
    html: Html = None,
    picture: Annotated[
        bool | None,
        typer.Option(
            "--picture/--no-text",
            help="Put an attention picture on the page, or leave it out. The picture contains the first 128 tokens of "
            "the text. By default, only the text that ships gets one.",
        ),
    ] = None,
    roles: Annotated[
        bool,
        typer.Option(
            "--roles",
            help="Find induction and duplicate-token heads too, with a second pass over repeated random tokens. All "
            "other roles need no second pass.",
        ),
    ] = False,
    csv: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Write one CSV row per head. - prints them instead of the table."),
    ] = None,
    as_json: AsJson = False,
    fail_on_alarm: FailOnAlarm = False,
) -> None:
    """Measure exact entropy and the largest logit of every head of MODEL, as a table, a page, CSV or JSON."""
    limits = _limits(limit or [])
    with usage_of("--backend"):
        check_backend(backend, None if device in PLACES else device)
    with usage_of("--sort"):
        order = check_order(sort, top)
    _check_outputs(as_json, csv, order is not None)
    given = Input(text, max_length, batch_size, device, dtype)
    options: dict[str, Any] = {"backend": backend, "limits": limits, "fewest_keys": fewest_keys}
    if roles and texts is not None:
        raise typer.BadParameter("works on one text: leave out --texts.", param_hint="--roles")
    if picture and (html is None or texts is not None):
        raise typer.BadParameter(
            "needs --html and a single text: add --html and leave out --texts.", param_hint="--picture"
        )
    patterns: list[Pattern] = []
    if texts is None:
        many = {"field": field, "shard": shard, "out": out, "workers": workers, "shards": shards, "engine": engine}
        _refuse("needs --texts, which names many texts.", **many)
        words = read_text(text)
        check_files(html, csv)
        wanted = html is not None and (text is None if picture is None else picture)
        options["roles"] = "repeated" if roles else True
        result = scan_of(model, words, given, patterns=patterns if wanted else None, **options)
    else:
        if text is not None:
            raise typer.BadParameter(
                "reads many texts and --text reads one: give only one of the two.", param_hint="--texts"
            )
        check_files(html, csv)
        cut = Cut(texts, field, shard, out, workers, shards, engine)
        one = cut.one_shard(os.environ)
        if one is not None:
            whole = {"html": html, "csv": csv, "json": as_json or None, "sort": order}
            why = "needs all shards, and this process scans one: use it with `attemper merge FOLDER`."
            _refuse(why, **whole, fail_on_alarm=fail_on_alarm or None)
            scan_one(model, given, cut, one, **options)
            return
        result = scan_all(model, given, cut, **options)
    if html is not None:
        result.to_html(html, patterns=patterns)
    if csv is not None:
        write_csv(csv, heads_csv(result.reading, order))
    if as_json or csv != "-":
        print_result(result, as_json, None if order is None else HeadTable(result.reading, order))
    if result.reading.nothing_note is not None:
        raise typer.Exit(1)
    if fail_on_alarm and any(alarm.severity != "notice" for alarm in result.alarms):
        raise typer.Exit(3)


def _refuse(why: str, **given: Any) -> None:
    """Bad usage if one of these options is there."""
    for name, value in given.items():
        if value is not None:
            raise typer.BadParameter(why, param_hint=f"--{name.replace('_', '-')}")


def _check_outputs(as_json: bool, csv: str | None, listed: bool) -> None:
    """Two things for stdout at once, or an order of what has its own, are bad usage."""
    if as_json and csv == "-":
        raise typer.BadParameter("prints to stdout, and so does --json: write the CSV to a file.", param_hint="--csv")
    if as_json and listed and csv is None:
        raise typer.BadParameter(
            "orders the table and the CSV, not --json, which keeps the order of the model: leave out --sort and --top.",
            param_hint="--sort",
        )


def scan_of(
    model: str | None, words: str, given: Input, *, patterns: list[Pattern] | None = None, **options: Any
) -> Scan:
    """Scans a pretrained model, or the one that ships (None), over a text, with a bar of progress on stderr.

    Args:
        patterns: takes the weights of the most interesting heads on the first tokens.
        options: of ``attemper.scan``: backend, limits, fewest_keys.
    """
    import attemper

    loaded, batches, tokenizer = model_and_text(model, words, given)
    options |= {"name": title_of(model), "text": text_name(given.text)}
    with bar("scan", len(batches)) as move:
        on_batch = None if move is None else lambda done: move(completed=done)
        found = attemper.scan(loaded, batches, tokenizer=tokenizer, on_batch=on_batch, **options)
    if patterns is not None:
        from attemper.report.picture import interesting_heads

        patterns += _patterns(loaded, batches[0], interesting_heads(found.reading), tokenizer)
    return found


def patterns_of(model: str | None, words: str, given: Input, heads: Iterable[tuple[str, int]]) -> list[Pattern]:
    """The weights of some heads (site, number) of a model on the first tokens of a text."""
    loaded, batches, tokenizer = model_and_text(model, words, given)
    return list(_patterns(loaded, batches[0], heads, tokenizer))


def model_and_text(
    model: str | None, words: str, given: Input, call: str = "scan(model, batches)"
) -> tuple[Any, list[Any], Any]:
    """A model, the text as its batches, and what names its tokens. ``call``: as of ``load``, without the package."""
    import_for(model)
    if model is None:
        return (*_shipped_batches(words, given), byte_names)
    from attemper.integrations import pretrained

    known = pretrained.load(model, device=given.device, dtype=given.dtype.value, call=f"attemper.{call}")
    batches = pretrained.windows(known, words, max_length=given.max_length, batch_size=given.batch_size)
    return known.model, batches, known.tokenizer


def _patterns(model: Any, batch: Any, heads: Iterable[tuple[str, int]], tokenizer: Any) -> Iterator[Pattern]:
    """The weights of heads on the first tokens of a batch; of heads that have them."""
    import attemper
    from attemper.report.picture import MOST_TOKENS

    first = part_of(batch, slice(1), slice(MOST_TOKENS))
    for site, head in heads:
        try:
            yield attemper.pattern(model, first, site=site, head=head, tokenizer=tokenizer)
        except InputError as error:
            say(f"no attention picture of {clean_name(site)} head {head}: {error}")


def _shipped_batches(words: str, given: Input) -> tuple[Any, list[Any]]:
    """The byte-level model that ships, and the text as batches of windows of bytes, the rest as one of its own."""
    if not words.strip():
        raise InputError("the text is empty: there is nothing to scan. Pass a file with text, or leave --text out.")
    model = shipped_model(given.max_length, given.device, given.dtype)
    from attemper.lab import model as lab

    ids = lab.encode(words).to(given.device)
    full = lab.windows(ids, given.max_length or model.config.context)
    rest = ids[full.numel() :]
    return model, [*(full.split(given.batch_size) if len(full) else ()), *([rest[None]] if len(rest) else ())]


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
    with usage_of("--limit"):
        AlarmLimits.of(limits, LIMITS)
    return limits
