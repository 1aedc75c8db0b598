"""The page of a comparison: two scans side by side, in one file as the page of a scan, without its charts' library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from attemper import __version__
from attemper.files import write_whole
from attemper.report.page import asset, policy, templates
from attemper.statistics import SHOWN
from attemper.text import clean, cut, number

MOST_ROWS = 1000
"""Heads that the page lists: those that changed most."""
_PICTURED = ("normalized_entropy", "max_logit")
SIDE = 320
"""Width and height of a picture, in its own units."""
_MARGIN = 34


@dataclass(frozen=True)
class Column:
    """A statistic of the page: its name in the document, what it is called, and its means over the heads."""

    key: str
    title: str
    unit: str
    before: str
    after: str


@dataclass(frozen=True)
class Cell:
    """A number before and after: exact, as Python and JSON write it, and as shown."""

    exact_before: str
    exact_after: str
    exact_change: str
    before: str
    after: str
    change: str
    size: str
    """By what rows are sorted: the size of the change; a number that came or went counts as the largest."""


@dataclass(frozen=True)
class Row:
    """A head."""

    site: str
    mode: str
    layer: str
    head: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Dot:
    """A head in a picture: where it stands, and what is said of it."""

    x: str
    y: str
    moved: bool
    title: str


@dataclass(frozen=True)
class Picture:
    """A statistic before (to the right) against after (upwards): what did not change lies on the diagonal."""

    title: str
    low: str
    high: str
    dots: tuple[Dot, ...]


def comparison_page(document: Mapping[str, Any], summary: str) -> str:
    """The page of a comparison's ``to_dict``. The same document gives the same page, to the byte."""
    keys = [name for name, value in (document["heads"] or [{}])[0].items() if isinstance(value, Mapping)]
    keys = [key for key in keys if any(_pair(head, key) != (None, None) for head in document["heads"])]
    style = asset("page.css") + asset("comparison.css")
    script = f'(() => {{\n"use strict";\n{asset("comparison.js")}\n{asset("theme.js")}\nstart();\n}})();\n'
    template = templates().get_template("comparison.html.j2")
    return template.render(
        before=clean(document["before"]),
        after=clean(document["after"]),
        tokens=document["tokens"],
        summary=clean(summary),
        heads=len(document["heads"]),
        sites=len({(head["site"], head["kind"], head["mode"]) for head in document["heads"]}),
        columns=[_column(key, document["heads"]) for key in keys],
        rows=[_row(head, keys) for head in document["heads"][:MOST_ROWS]],
        pictures=[_picture(key, document["heads"][:MOST_ROWS]) for key in _PICTURED if key in keys],
        side=SIDE,
        margin=_MARGIN,
        alone=[(side, [clean(name) for name in document[f"only_{side}"]]) for side in ("before", "after")],
        policy=policy(style, (script,)),
        style=Markup(style),
        script=Markup(script),
        version=__version__,
    )


def write_comparison(document: Mapping[str, Any], summary: str, path: str | os.PathLike[str]) -> Path:
    """Writes the page to ``path``, whole or not at all, and gives the file's place.

    Raises:
        InputError: no file can be written there.
    """
    return write_whole(path, comparison_page(document, summary))


def _pair(head: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    return head[key]["before"], head[key]["after"]


def _title(key: str) -> tuple[str, str]:
    """What the page of a scan calls it, and its unit."""
    return (SHOWN[key].title, SHOWN[key].unit) if key in SHOWN else (key.replace("_", " ").capitalize(), "")


def _column(key: str, heads: Sequence[Mapping[str, Any]]) -> Column:
    """Means are over heads that have a number on both sides: of the same heads, so that they compare."""
    pairs = [pair for head in heads if None not in (pair := _pair(head, key))]
    means = [sum(pair[side] or 0.0 for pair in pairs) / len(pairs) if pairs else None for side in (0, 1)]
    return Column(key, *_title(key), *map(number, means))


def _row(head: Mapping[str, Any], keys: Sequence[str]) -> Row:
    layer = "–" if head.get("layer") is None else str(head["layer"])
    return Row(clean(head["site"]), clean(head["mode"]), layer, head["head"], tuple(_cell(head[key]) for key in keys))


def _cell(value: Mapping[str, float | None]) -> Cell:
    before, after, change = value["before"], value["after"], value["change"]
    size = abs(change) if change is not None else 0.0 if before is after else None
    sign = "+" if change is not None and change > 0 else ""
    return Cell(
        exact_before=_exact(before),
        exact_after=_exact(after),
        exact_change=_exact(change),
        before=number(before),
        after=number(after),
        change=sign + number(change),
        size="Infinity" if size is None else repr(size),
    )


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)


def _picture(key: str, heads: Sequence[Mapping[str, Any]]) -> Picture:
    """Both axes have the same ends, those of all the numbers that it shows."""
    known = [(head, *pair) for head in heads if None not in (pair := _pair(head, key))]
    values = [value for _, *pair in known for value in pair if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) or 1.0

    def at(value: float | None) -> float:
        return _MARGIN + ((value or 0.0) - low) / room * (SIDE - 2 * _MARGIN)

    def dot(head: Mapping[str, Any], before: float | None, after: float | None) -> Dot:
        title = f"{cut(clean(head['site']), 200)} head {head['head']}: {number(before)} → {number(after)}"
        return Dot(f"{at(before):.2f}", f"{SIDE - at(after):.2f}", before != after, title)

    dots = tuple(dot(*one) for one in reversed(known))
    return Picture(_title(key)[0], number(low, 3), number(high, 3), dots)
