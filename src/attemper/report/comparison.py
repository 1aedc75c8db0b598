"""The page of a comparison: two scans or two runs side by side, in one file, without a library of charts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from attemper import __version__
from attemper.files import write_whole
from attemper.report.document import Quantity, mode_of, quantity
from attemper.report.page import asset, policy, script_of, templates
from attemper.report.picture import Weights, paired_pictures, pairs
from attemper.report.texts import Message, Within, message, page_texts
from attemper.text import clean, cut, number, script_json

if TYPE_CHECKING:
    from attemper.store.run import StoredRun

MOST_ROWS = 1000
"""Heads that the page lists: those that changed most."""
_PICTURED = ("normalized_entropy", "max_logit")
_SCRIPTS = ("document", "texts", "colours", "sheet", "comparison", "theme")
SIDE = 320
"""Width and height of a picture, in its own units."""
_MARGIN = 34


@dataclass(frozen=True)
class Column:
    """A statistic of the page, and its means over the heads that have a number on both sides."""

    quantity: Quantity
    before: float | None
    after: float | None


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
    mode: Message | str
    """Empty for evaluation, which goes without saying."""
    layer: str
    head: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Dot:
    """A head in a picture: where it stands, and what is said of it."""

    x: str
    y: str
    moved: bool
    title: Message


@dataclass(frozen=True)
class Picture:
    """A statistic before (to the right) against after (upwards): what did not change lies on the diagonal."""

    title: Message
    low: float
    high: float
    dots: tuple[Dot, ...]


def comparison_page(
    document: Mapping[str, Any],
    runs: tuple[StoredRun, StoredRun] | None = None,
    patterns: tuple[Sequence[Weights], Sequence[Weights]] = ((), ()),
) -> str:
    """The page of a comparison's ``to_dict``. The same document gives the same page, to the byte.

    Args:
        runs: the two runs, where runs were compared: the histories of the heads that differ most stand side by side.
        patterns: heads whose weights on a text it shows, before and after, as :func:`attemper.pattern` gives them: it
            then holds text.
    """
    heads = document["heads"]
    keys = [name for name, value in (heads or [{}])[0].items() if isinstance(value, Mapping)]
    keys = [key for key in keys if any(_pair(head, key) != (None, None) for head in heads)]
    columns = [_column(key, heads) for key in keys]
    style = asset("page.css") + asset("comparison.css")
    pictured = pairs(*patterns)
    script = script_of(_SCRIPTS, "start();\n")
    courses: Sequence[Any] = ()
    if runs is not None:
        from attemper.report.courses import courses_of

        courses = courses_of(runs, heads, [key for key in _PICTURED if key in keys])
    return (
        templates()
        .get_template("comparison.html.j2")
        .render(
            before=clean(document["before"]),
            after=clean(document["after"]),
            tokens=document["tokens"],
            summary=_summary(document, columns),
            heads=len(heads),
            sites=len({(head["site"], head["kind"], head["mode"]) for head in heads}),
            columns=columns,
            first=Within(columns[0].quantity.title) if columns else "",
            rows=[_row(head, keys) for head in heads[:MOST_ROWS]],
            courses=courses,
            pictures=[_picture(key, heads[:MOST_ROWS]) for key in _PICTURED if key in keys],
            side=SIDE,
            margin=_MARGIN,
            alone=[(side, [clean(name) for name in document[f"only_{side}"]]) for side in ("before", "after")],
            policy=policy(style, (script,)),
            style=Markup(style),
            script=Markup(script),
            pictured=[_pair_place(one) for one, _ in pictured],
            data=Markup(script_json({"texts": page_texts(of="compared"), "pictures": paired_pictures(pictured)})),
            version=__version__,
        )
    )


def write_comparison(
    document: Mapping[str, Any],
    path: str | os.PathLike[str],
    runs: tuple[StoredRun, StoredRun] | None = None,
    patterns: tuple[Sequence[Weights], Sequence[Weights]] = ((), ()),
) -> Path:
    """Writes the page to ``path``, whole or not at all, and gives the file's place.

    Raises:
        InputError: no file can be written there.
    """
    return write_whole(path, comparison_page(document, runs, patterns))


def _pair(head: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    return head[key]["before"], head[key]["after"]


def _summary(document: Mapping[str, Any], columns: Sequence[Column]) -> Message:
    """How many heads differ, the mean of the first statistic on both sides, where it changed most, what is missing."""
    heads, one = document["heads"], columns[0] if columns else None
    keys = [column.quantity.name for column in columns]
    many = sum(any(before != after for before, after in (_pair(head, key) for key in keys)) for head in heads)
    total = message("count.heads", n=len(heads))
    alone, tokens = len(document["only_before"]) + len(document["only_after"]), document["tokens"]
    means = document.get("means", ())
    lost = 0 if one is None else sum((None in (p := _pair(head, one.quantity.name))) and p[0] != p[1] for head in heads)
    return message(
        "compared.said",
        count=message("compared.count", heads=total, n=many) if many else message("compared.none", heads=total),
        mean="" if one is None or one.before is None else _mean_said(one, heads),
        lost=message("compared.lost", n=lost) if lost else "",
        alone=message("compared.alone", n=alone) if alone else "",
        means=message("compared.means", sites=cut(clean(", ".join(means)), 200)) if means else "",
        texts=message("compared.texts", **tokens) if tokens and tokens["before"] != tokens["after"] else "",
    )


def _mean_said(column: Column, heads: Sequence[Mapping[str, Any]]) -> Message:
    key = column.quantity.name
    both = [head for head in heads if head[key]["change"] is not None]
    most = max(both, key=lambda head: abs(head[key]["change"]))
    where: Message | str = ""
    if most[key]["change"]:
        before, after = (float(value or 0.0) for value in _pair(most, key))
        where = message("compared.most", place=_place(most), before=before, after=after)
    return message(
        "compared.mean_said", title=Within(column.quantity.title), before=column.before, after=column.after, most=where
    )


def _place(head: Mapping[str, Any]) -> Message:
    return message("head.named", site=cut(clean(head["site"]), 200), head=head["head"])


def _pair_place(one: Weights) -> Message:
    return _place({"site": one.site, "head": one.head})


def _column(key: str, heads: Sequence[Mapping[str, Any]]) -> Column:
    """Means are over heads that have a number on both sides: of the same heads, so that they compare."""
    pairs = [pair for head in heads if None not in (pair := _pair(head, key))]
    before, after = (sum(float(pair[side] or 0.0) for pair in pairs) / len(pairs) if pairs else None for side in (0, 1))
    return Column(quantity(key), before, after)


def _row(head: Mapping[str, Any], keys: Sequence[str]) -> Row:
    layer = "–" if head.get("layer") is None else str(head["layer"])
    mode = "" if head["mode"] == "eval" else mode_of(head["mode"])
    return Row(clean(head["site"]), mode, layer, head["head"], tuple(_cell(head[key]) for key in keys))


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
        title = message("compared.dot", place=_place(head), before=number(before), after=number(after))
        return Dot(f"{at(before):.2f}", f"{SIDE - at(after):.2f}", before != after, title)

    dots = tuple(dot(*one) for one in reversed(known))
    return Picture(quantity(key).title, low, high, dots)
