"""A reading as files that the page can save: JSON as ``attemper scan --json`` prints it, CSV with a line for each head.

They lie in the page packed, so that it stays one file that loads nothing.
"""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import re
from typing import Any

from attemper.readings.reading import Reading

_LISTS = ("normalized_entropy_histogram", "by_visible_keys")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


def archive(reading: Reading, kind: str) -> str:
    """The file of a ``kind`` ("json" or "csv"), compressed, in base64. The same reading gives the same text."""
    text = as_csv(reading) if kind == "csv" else json.dumps(reading.to_dict(), allow_nan=False)
    # A lone surrogate, which no encoding holds, is written out.
    data = gzip.compress(text.encode("utf-8", "backslashreplace"), mtime=0)
    return base64.b64encode(data).decode("ascii")


def as_csv(reading: Reading) -> str:
    """A line for each head: its site, layer, kind and mode, and every number of it; a missing one is empty."""
    rows = [
        {"site": site.name, "layer": site.layer, "kind": site.kind, "mode": site.mode}
        | {name: value for name, value in head.to_dict().items() if name not in _LISTS}
        for site in reading.sites
        for head in site.heads
    ]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    if rows:
        writer.writerow(rows[0])
        writer.writerows([_cell(value) for value in row.values()] for row in rows)
    return file.getvalue()


def file_name(reading: Reading) -> str:
    """What the files are called, without their endings: letters, digits, dots and dashes of the model's name."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", reading.model)[:60].strip("-.")
    return f"attemper-{plain}" if plain else "attemper"


def _cell(value: Any) -> Any:
    """Text as text: with a quote before what a spreadsheet would calculate."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
