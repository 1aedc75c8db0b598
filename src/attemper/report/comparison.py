"""The page of a comparison: two scans or two runs side by side, in one file, without a library of charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from attemper.readings.labels import pattern_of
from attemper.report.document import Quantity, mode_of, number_said, quantity
from attemper.report.page import page_of
from attemper.report.picture import Weights, paired_pictures, pairs
from attemper.report.texts import Clauses, Date, Message, Names, Within, message, page_texts, place_said
from attemper.statistics import SHOWN
from attemper.text import clean, cut, number

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


Dot = tuple[str, str, bool, Message]
"""A head in a picture: where it stands, whether it moved, and what is said of it."""


def comparison_page(comparison: Any, patterns: tuple[Sequence[Weights], Sequence[Weights]] = ((), ())) -> str:
    """The page of an :class:`attemper.types.Comparison`. The same comparison gives the same page, to the byte. Of two
    runs the histories of the heads that differ most stand side by side.

    Args:
        patterns: heads whose weights on a text it shows, before and after, as :func:`attemper.pattern` gives them: it
            then holds text.
    """
    heads = comparison.heads
    keys = [key for key in (heads[0].pairs if heads else ()) if any(head.pairs[key] != (None, None) for head in heads)]
    columns = [_column(key, heads) for key in keys]
    pictured = pairs(*patterns)
    courses: Sequence[Any] = ()
    if comparison.runs is not None:
        from attemper.report.history import courses_of

        courses = [courses_of(comparison.runs, heads, key) for key in _PICTURED if key in keys]
    return page_of(
        "comparison",
        ("page", "comparison"),
        _SCRIPTS,
        {"texts": page_texts(of="compared"), "pictures": paired_pictures(pictured)},
        before=clean(comparison.before),
        after=clean(comparison.after),
        level=_level(comparison),
        summary=summary(comparison, keys[0] if keys else ""),
        advised=bool(comparison.beyond) and comparison.texts != "other" and comparison.runs is None,
        facts=side_lines(comparison),
        floor=_floor_said(comparison),
        heads=len(heads),
        sites=len({(head.site, head.kind, head.mode) for head in heads}),
        columns=columns,
        first=Within(columns[0].quantity.title) if columns else "",
        rows=[_row(head, keys) for head in heads[:MOST_ROWS]],
        courses=courses,
        pictures=[_picture(key, heads[:MOST_ROWS]) for key in _PICTURED if key in keys],
        side=SIDE,
        margin=_MARGIN,
        alone=[(side, [clean(name) for name in getattr(comparison, f"only_{side}")]) for side in ("before", "after")],
        pictured=[_place(one) for one, _ in pictured],
    )


def summary(comparison: Any, key: str) -> Message:
    """How many heads differ beyond what rounding, sampled rows and texts explain, the mean of a statistic on both
    sides, where it changed most, and what is missing or not known.
    """
    heads, means = comparison.heads, comparison.means
    alone = len(comparison.only_before) + len(comparison.only_after)
    lost = sum(None in head.pairs[key] and head.differs(key) for head in heads)
    return message(
        "compared.said",
        count=_count_said(comparison),
        first=_first_said(comparison),
        mean=_mean_said(key, heads) if any(head.change(key) is not None for head in heads) else "",
        lost=message("compared.lost", n=lost) if lost else "",
        alone=message("compared.alone", n=alone) if alone else "",
        means=message("compared.means", sites=cut(clean(", ".join(means)), 200)) if means else "",
        texts=_unknown_said(comparison),
    )


def _level(comparison: Any) -> str:
    """Of the verdict: a warning where heads differ beyond what rounding, sampled rows and texts explain, a notice where
    some differ, come or go, or were not judged.
    """
    heads = comparison.heads
    if comparison.beyond:
        return "warning"
    unknown = _differing(heads) and len(comparison.judged) < len(heads)
    return "notice" if unknown or comparison.only_before or comparison.only_after or not heads else "fine"


def _differing(heads: Sequence[Any]) -> int:
    """How many heads differ in any statistic."""
    return sum(any(map(head.differs, head.pairs)) for head in heads)


def _count_said(comparison: Any) -> Message:
    heads, judged, beyond = comparison.heads, len(comparison.judged), len(comparison.beyond)
    total, many = message("count.heads", n=len(heads)), _differing(heads)
    if not many:
        return message("compared.none", heads=total)
    if not judged:
        return message("compared.count", heads=total, n=many)
    key, heads_judged = "compared.beyond" if beyond else "compared.within", message("count.heads", n=judged)
    said = message(key, heads=heads_judged, n=beyond, floor=_floor_said(comparison))
    left = len(heads) - judged
    return message("compared.not_judged", said=said, n=left) if left else said


def _floor_said(comparison: Any) -> Clauses:
    """What differences are counted against."""
    reasons = ["rounding", *(["texts"] if comparison.texts == "other" else [])]
    reasons += ["rows"] if any(side["sampled_rows"] for side in comparison.sides or ()) else []
    return Clauses([message(f"compared.floor.{reason}") for reason in reasons])


def _first_said(comparison: Any) -> Message | str:
    """Where differences begin. Later layers read what it gives and may differ for that alone: said where an earlier
    layer, or a head beside it, does not differ, and all of it is one stack that read one text.
    """
    moved = comparison.beyond
    stacks = {(pattern_of(head.site), head.layer is None) for head in comparison.heads}
    if not moved or comparison.texts == "other" or len(stacks) != 1 or stacks.pop()[1]:
        return ""
    layer = min(head.layer for head in moved)
    here = [head for head in moved if head.layer == layer]
    later = len(moved) - len(here)
    if not later or len(here) == sum(head.layer <= layer for head in comparison.judged):
        return ""
    said = message("compared.first", n=len(here), layer=layer, head=here[0].head)
    return message("compared.later", first=said, n=later)


def _unknown_said(comparison: Any) -> Message | str:
    """What is not known of why heads differ."""
    if comparison.texts == "other":
        before, after = comparison.tokens
        return message("compared.texts" if comparison.judged else "compared.texts_unknown", before=before, after=after)
    if not comparison.judged and any(side["dtype"] is None for side in comparison.sides or ()):
        return message("compared.no_precision")
    return message("compared.same_text_unknown") if comparison.texts == "unknown" else ""


def side_lines(comparison: Any) -> list[Message]:
    """What the numbers of each side depend on: precision, text, date and rows."""
    found = zip(("before", "after"), comparison.sides or (), strict=False)
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


def _change_said(key: str, change: float, digits: int = 3) -> Message | str:
    """A change, in points where its statistic is in percent."""
    told = number(abs(change) * SHOWN[key].scale, digits)
    return told if SHOWN[key].scale == 1.0 else message("compared.points", size=told)


def _mean_said(key: str, heads: Sequence[Any]) -> Message:
    before, after = _means(key, heads)
    where, most = "", _most_changed(key, heads)
    if most is not None:
        ends, change = _both_said(key, *most.pairs[key]), _change_said(key, most.change(key))
        where = message("compared.most", place=_place(most), change=change, **ends)
    title = Within(quantity(key).title)
    return message("compared.mean_said", title=title, most=where, **_both_said(key, before, after))


def _means(key: str, heads: Sequence[Any], scale: float = 1.0) -> tuple[float | None, float | None]:
    """Means on both sides over heads that have a number on both: of the same heads, so that they compare."""
    both = [head.pairs[key] for head in heads if head.change(key) is not None]
    before, after = (scale * sum(pair[side] for pair in both) / len(both) if both else None for side in (0, 1))
    return before, after


def _both_said(key: str, before: float | None, after: float | None) -> dict[str, Message | str]:
    """Both sides with the same decimals, where they are in percent and one is not small."""
    said = {"before": number_said(key, before), "after": number_said(key, after)}
    shares = [abs(SHOWN[key].scale * float(value or 0.0)) for value in (before, after)]
    if SHOWN[key].scale == 1.0 or max(shares) < 10:
        return said
    decimals = min(2, max(len(number(one).partition(".")[2]) for one in shares))
    return {side: message("as_percent", value=f"{one:.{decimals}f}") for side, one in zip(said, shares, strict=True)}


def _place(head: Any) -> Message:
    """Of a head that is compared, or drawn."""
    return place_said(head.site, head.head, 200)


def _column(key: str, heads: Sequence[Any]) -> Column:
    kind, most = quantity(key), _most_changed(key, heads)
    unit = message("compared.unit", unit=kind.unit) if kind.display.percent else kind.unit
    said: Message | str = ""
    if most is not None:
        said = message("compared.most_changed", place=_place(most), **_both_said(key, *most.pairs[key]))
    return Column(kind, unit, *_means(key, heads, SHOWN[key].scale), said)


def _most_changed(key: str, heads: Sequence[Any]) -> Any:
    return max((head for head in heads if head.change(key)), key=lambda head: head.size(key), default=None)


def _row(head: Any, keys: Sequence[str]) -> tuple[str, Message | str, str, int, list[Cell]]:
    """A head: its site, its mode (empty for evaluation, which goes without saying), layer and number; its cells."""
    layer = "–" if head.layer is None else str(head.layer)
    mode = "" if head.mode == "eval" else mode_of(head.mode)
    return clean(head.site), mode, layer, head.head, [_cell(key, head) for key in keys]


def _cell(key: str, head: Any) -> Cell:
    (before, after), change, floor = head.pairs[key], head.change(key), head.floors.get(key)
    scale, size = SHOWN[key].scale, head.size(key)
    sign = "+" if change is not None and change > 0 else ""
    return Cell(
        exact_before=_exact(before),
        exact_after=_exact(after),
        exact_change=_exact(change),
        before=number(None if before is None else scale * before, 3),
        after=number(None if after is None else scale * after, 3),
        change=sign + number(None if change is None else scale * change, 3),
        size="Infinity" if size == inf else repr(size),
        floor="" if floor is None else number(scale * floor, 2),
        level="" if floor is None else "beyond" if head.is_beyond(key) else "within",
    )


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)


def _picture(key: str, heads: Sequence[Any]) -> tuple[Message, Message | str, Message | str, list[Dot]]:
    """A statistic before (to the right) against after (upwards): what did not change lies on the diagonal. Both axes
    have the same ends, those of all the numbers that it shows: after the title, the least and the largest.
    """
    known = [head for head in heads if None not in head.pairs[key]]
    values = [value for head in known for value in head.pairs[key]]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) or 1.0

    def at(value: float) -> float:
        return _MARGIN + (value - low) / room * (SIDE - 2 * _MARGIN)

    def dot(head: Any) -> Dot:
        before, after = head.pairs[key]
        title = message(
            "compared.dot", place=_place(head), before=number_said(key, before), after=number_said(key, after)
        )
        moved = head.size(key) > (head.floors.get(key) or 0.0)
        return f"{at(before):.2f}", f"{SIDE - at(after):.2f}", moved, title

    return quantity(key).title, number_said(key, low), number_said(key, high), [dot(head) for head in reversed(known)]
