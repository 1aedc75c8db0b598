"""The page of a comparison: two scans or two runs side by side, in one file, without a library of charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attemper.readings.labels import pattern_of
from attemper.report.document import Quantity, mode_of, number_said, quantity
from attemper.report.page import page_of
from attemper.report.picture import Weights, paired_pictures, pairs
from attemper.report.texts import Clauses, Date, Message, Names, Within, message, page_texts
from attemper.statistics import SHOWN
from attemper.text import clean, cut, number

if TYPE_CHECKING:
    from attemper.store.run import StoredRun

MOST_ROWS = 1000
"""Heads that the page lists: those that changed most."""
_PICTURED = ("normalized_entropy", "max_logit")
_SCRIPTS = ("document", "texts", "colour_scale", "sheet", "comparison", "theme")
SIDE = 320
"""Width and height of a picture, in its own units."""
_MARGIN = 34


@dataclass(frozen=True)
class Column:
    """A statistic of the page, and its means over the heads that have a number on both sides, as they are shown."""

    quantity: Quantity
    unit: Message | str
    before: float | None
    after: float | None
    most: Message | str
    """The head whose number changed most, with both of its numbers."""


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
    floor: str
    """What the change is counted against; empty where that is not known."""
    level: str
    """Class of its element: "beyond" the floor, "within", or empty where that is not known."""


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
    low: Message | str
    high: Message | str
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
    keys = _keys((heads or [{}])[0])
    keys = [key for key in keys if any(_pair(head, key) != (None, None) for head in heads)]
    columns = [_column(key, heads) for key in keys]
    pictured = pairs(*patterns)
    courses: Sequence[Any] = ()
    if runs is not None:
        from attemper.report.history import courses_of

        courses = courses_of(runs, heads, [key for key in _PICTURED if key in keys])
    return page_of(
        "comparison",
        ("page", "comparison"),
        _SCRIPTS,
        {"texts": page_texts(of="compared"), "pictures": paired_pictures(pictured)},
        before=clean(document["before"]),
        after=clean(document["after"]),
        level=_level(document),
        summary=summary(document, keys[0] if keys else ""),
        advised=document["beyond"] > 0 and document["texts"] != "other" and runs is None,
        facts=side_lines(document),
        floor=_floor_said(document),
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
        pictured=[_pair_place(one) for one, _ in pictured],
    )


def _pair(head: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    return head[key]["before"], head[key]["after"]


def summary(document: Mapping[str, Any], key: str) -> Message:
    """How many heads differ beyond what rounding, sampled rows and texts explain, the mean of a statistic on both
    sides, where it changed most, and what is missing or not known.
    """
    heads, means = document["heads"], document.get("means", ())
    alone = len(document["only_before"]) + len(document["only_after"])
    lost = sum((None in (p := _pair(head, key))) and p[0] != p[1] for head in heads)
    return message(
        "compared.said",
        count=_count_said(document),
        first=_first_said(document),
        mean=_mean_said(key, heads) if any(head[key]["change"] is not None for head in heads) else "",
        lost=message("compared.lost", n=lost) if lost else "",
        alone=message("compared.alone", n=alone) if alone else "",
        means=message("compared.means", sites=cut(clean(", ".join(means)), 200)) if means else "",
        texts=_unknown_said(document),
    )


def _level(document: Mapping[str, Any]) -> str:
    """Of the verdict: a warning where heads differ beyond what rounding, sampled rows and texts explain, a notice where
    some differ, come or go, or were not judged.
    """
    heads = document["heads"]
    if document["beyond"]:
        return "warning"
    unknown = _differing(heads) and document["judged"] < len(heads)
    return "notice" if unknown or document["only_before"] or document["only_after"] or not heads else "fine"


def _differing(heads: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [head for head in heads if any(head[key]["before"] != head[key]["after"] for key in _keys(head))]


def _count_said(document: Mapping[str, Any]) -> Message:
    heads, judged = document["heads"], document["judged"]
    total, many = message("count.heads", n=len(heads)), len(_differing(heads))
    if not many:
        return message("compared.none", heads=total)
    if not judged:
        return message("compared.count", heads=total, n=many)
    key, heads_judged = "compared.beyond" if document["beyond"] else "compared.within", message("count.heads", n=judged)
    said = message(key, heads=heads_judged, n=document["beyond"], floor=_floor_said(document))
    left = len(heads) - judged
    return message("compared.not_judged", said=said, n=left) if left else said


def _floor_said(document: Mapping[str, Any]) -> Clauses:
    """What differences are counted against."""
    sides = (document["sides"] or {}).values()
    reasons = ["rounding", *(["texts"] if document["texts"] == "other" else [])]
    reasons += ["rows"] if any(side["sampled_rows"] for side in sides) else []
    return Clauses([message(f"compared.floor.{reason}") for reason in reasons])


def _first_said(document: Mapping[str, Any]) -> Message | str:
    """Where differences begin. Later layers read what it gives and may differ for that alone: said where an earlier
    layer, or a head beside it, does not differ, and all of it is one stack that read one text.
    """
    judged = [head for head in document["heads"] if any(head[key].get("floor") is not None for key in _keys(head))]
    moved = [head for head in judged if any(_is_beyond(head[key]) for key in _keys(head))]
    stacks = {(pattern_of(head["site"]), head.get("layer") is None) for head in document["heads"]}
    if not moved or document["texts"] == "other" or len(stacks) != 1 or stacks.pop()[1]:
        return ""
    layer = min(head["layer"] for head in moved)
    here = [head for head in moved if head["layer"] == layer]
    later = len(moved) - len(here)
    if not later or len(here) == sum(head["layer"] <= layer for head in judged):
        return ""
    said = message("compared.first", n=len(here), layer=layer, head=here[0]["head"])
    return message("compared.later", first=said, n=later)


def _is_beyond(value: Mapping[str, Any]) -> bool:
    floor, size = value.get("floor"), _size(value)
    return floor is not None and (size is None or size > floor)


def _size(value: Mapping[str, Any]) -> float | None:
    """How much a number changed; None where it came or went."""
    change = value["change"]
    return abs(change) if change is not None else 0.0 if value["before"] is value["after"] else None


def _unknown_said(document: Mapping[str, Any]) -> Message | str:
    """What is not known of why heads differ."""
    sides = (document["sides"] or {}).values()
    if document["texts"] == "other":
        key = "compared.texts" if document["judged"] else "compared.texts_unknown"
        return message(key, before=document["tokens"]["before"], after=document["tokens"]["after"])
    if not document["judged"] and any(side["dtype"] is None for side in sides):
        return message("compared.no_precision")
    return message("compared.same_text_unknown") if document["texts"] == "unknown" else ""


def side_lines(document: Mapping[str, Any]) -> list[Message]:
    """What the numbers of each side depend on: precision, text, date and rows."""
    found = (document["sides"] or {}).items()
    return [message(f"compared.facts.{side}", facts=Names(list(_facts(facts)))) for side, facts in found]


def _facts(side: Mapping[str, Any]) -> Iterator[Message]:
    yield message("as_is", said=clean(side["dtype"])) if side["dtype"] else message("compared.facts.no_dtype")
    digest, name = (side["text_digest"] or "")[:8], cut(clean(side["text"] or ""), 60)
    kind = "text" if name and digest else "name" if name else "digest" if digest else "no_text"
    yield message(f"compared.facts.{kind}", text=name, digest=digest)
    if side["date"]:
        yield message("as_is", said=Date(side["date"]))
    rows = side["sampled_rows"]
    yield message("compared.facts.rows", n=rows) if rows else message("compared.facts.all_rows")
    yield message("compared.facts.tokens", n=side["tokens"])


def _keys(head: Mapping[str, Any]) -> list[str]:
    return [name for name, value in head.items() if isinstance(value, Mapping)]


def _change_said(key: str, change: float, digits: int = 3) -> Message | str:
    """A change, in points where its statistic is in percent."""
    told = number(abs(change) * SHOWN[key].scale, digits)
    return told if SHOWN[key].scale == 1.0 else message("compared.points", size=told)


def _mean_said(key: str, heads: Sequence[Mapping[str, Any]]) -> Message:
    both = [head for head in heads if head[key]["change"] is not None]
    before, after = (sum(float(_pair(head, key)[side] or 0.0) for head in both) / len(both) for side in (0, 1))
    where, most = "", _most_changed(key, both)
    if most is not None:
        ends, change = _both_said(key, *_pair(most, key)), _change_said(key, most[key]["change"])
        where = message("compared.most", place=_place(most), change=change, **ends)
    title = Within(quantity(key).title)
    return message("compared.mean_said", title=title, most=where, **_both_said(key, before, after))


def _both_said(key: str, before: float | None, after: float | None) -> dict[str, Message | str]:
    """Both sides with the same decimals, where they are in percent and one is not small."""
    said = {"before": number_said(key, before), "after": number_said(key, after)}
    shares = [abs(SHOWN[key].scale * float(value or 0.0)) for value in (before, after)]
    if SHOWN[key].scale == 1.0 or max(shares) < 10:
        return said
    decimals = min(2, max(len(number(one).partition(".")[2]) for one in shares))
    return {side: message("as_percent", value=f"{one:.{decimals}f}") for side, one in zip(said, shares, strict=True)}


def _place(head: Mapping[str, Any]) -> Message:
    return message("head.named", site=cut(clean(head["site"]), 200), head=head["head"])


def _pair_place(one: Weights) -> Message:
    return _place({"site": one.site, "head": one.head})


def _column(key: str, heads: Sequence[Mapping[str, Any]]) -> Column:
    """Means are over heads that have a number on both sides: of the same heads, so that they compare."""
    pairs = [pair for head in heads if None not in (pair := _pair(head, key))]
    before, after = (
        SHOWN[key].scale * sum(float(pair[side] or 0.0) for pair in pairs) / len(pairs) if pairs else None
        for side in (0, 1)
    )
    kind = quantity(key)
    unit = message("compared.unit", unit=kind.unit) if kind.display.percent else kind.unit
    most = _most_changed(key, heads)
    said = (
        ""
        if most is None
        else message("compared.most_changed", place=_place(most), **_both_said(key, *_pair(most, key)))
    )
    return Column(kind, unit, before, after, said)


def _most_changed(key: str, heads: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    changed = (head for head in heads if head[key]["change"])
    return max(changed, key=lambda head: abs(head[key]["change"]), default=None)


def _row(head: Mapping[str, Any], keys: Sequence[str]) -> Row:
    layer = "–" if head.get("layer") is None else str(head["layer"])
    mode = "" if head["mode"] == "eval" else mode_of(head["mode"])
    return Row(clean(head["site"]), mode, layer, head["head"], tuple(_cell(key, head[key]) for key in keys))


def _cell(key: str, value: Mapping[str, float | None]) -> Cell:
    before, after, change, floor = value["before"], value["after"], value["change"], value.get("floor")
    scale, size = SHOWN[key].scale, _size(value)
    sign = "+" if change is not None and change > 0 else ""
    return Cell(
        exact_before=_exact(before),
        exact_after=_exact(after),
        exact_change=_exact(change),
        before=number(None if before is None else scale * before, 3),
        after=number(None if after is None else scale * after, 3),
        change=sign + number(None if change is None else scale * change, 3),
        size="Infinity" if size is None else repr(size),
        floor="" if floor is None else number(scale * floor, 2),
        level="" if floor is None else "beyond" if _is_beyond(value) else "within",
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
        title = message(
            "compared.dot", place=_place(head), before=number_said(key, before), after=number_said(key, after)
        )
        floor, size = head[key].get("floor"), abs((after or 0.0) - (before or 0.0))
        return Dot(f"{at(before):.2f}", f"{SIDE - at(after):.2f}", size > (floor or 0.0), title)

    dots = tuple(dot(*one) for one in reversed(known))
    return Picture(quantity(key).title, number_said(key, low), number_said(key, high), dots)
