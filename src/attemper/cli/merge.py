"""``attemper merge``: parts of a scan as one reading. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attemper.cli.arguments import AsJson, Html
from attemper.cli.output import check_files, print_result, say
from attemper.errors import InputError
from attemper.text import clean_name


def merge(
    parts: Annotated[
        list[Path],
        typer.Argument(metavar="PARTS...", help="Folders of `attemper scan --out`, or files of Scan.save."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the merged reading to a file, which you can merge again.")
    ] = None,
    allow_missing: Annotated[bool, typer.Option("--allow-missing", help="Merge even if shards are missing.")] = False,
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Merge the parts of a scan into one reading. The numbers equal those of one process, in any order of parts."""
    from attemper.files import check_target
    from attemper.readings.part_file import merge_files, missing_line, part_files, save
    from attemper.results.scan import Scan

    check_files(html)
    if out is not None:
        check_target(out, "reading")
    files = [file for path in parts for file in (part_files(path) if path.is_dir() else [path])]
    part = merge_files(file for file in files if out is None or file.resolve() != out.resolve())
    if part.missing and not allow_missing:
        raise InputError(f"{missing_line(part)}. Scan them with --shard, or merge the others with --allow-missing.")
    result = Scan(part.reading(), None, part=part)
    if out is not None:
        say(f"wrote {clean_name(save(part, out))}")
    if html is not None:
        result.to_html(html)
    print_result(result, as_json)
    if result.reading.nothing_note is not None:
        raise typer.Exit(1)
