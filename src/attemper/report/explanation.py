"""The page of an explanation: where two runs first differ and why, and how far apart each stage of each site is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from typing import Any

from attemper.fingerprints import floor
from attemper.fingerprints.explanation import HARMLESS, UNKNOWN, FirstDifference, Remark
from attemper.fingerprints.finding import short
from attemper.fingerprints.levels import STAGES, SiteLevels
from attemper.report.page import page_of
from attemper.report.texts import Message, Names, inner_messages, message, message_of, page_texts, reason
from attemper.text import clean, cut, number

_SCRIPTS = ("document", "texts", "colour_scale", "theme", "explanation")
MOST_SITES = 1000
"""Sites that the page lists."""
_FILLS = {"first": "words", "then": "words", "last": "end", "other_window": "window"}
"""Place of a text -> which texts fill it; others by their own name, where there are such texts."""
_NO_CAUSE = (*HARMLESS, *UNKNOWN, "output", "not_loaded", "transposed", "order_of_layers")
"""Kinds that name no cause, or one that is seen in the weights: none leaves a share unexplained."""
_SAME = 0.05
"""A factor is the difference if it makes all but so little of its size."""
_COLUMNS = (*STAGES[:3], "visible keys", *STAGES[3:])


@dataclass(frozen=True)
class Cell:
    """A stage of a site."""

    said: Message | str
    exact: str
    level: str
    """ "beyond" what rounding explains, "after" where that follows from another or is explained, "edge" of it,
    "within" it, or empty where it was not seen.
    """
    is_first: bool
    """Whether it is what the explanation is of."""


def explanation_page(found: FirstDifference) -> str:
    """The page of what :func:`attemper.explain` says of two runs. The same runs give the same page, to the byte."""
    sites, models = found.runs.sites, [clean(name) for name in found.runs.models]
    words = _words(found)
    weights, headline = _headline(found, words)
    rows = [_row(one, found) for one in sites[:MOST_SITES]]
    cells = [cell for _, own in rows for cell in own]
    before = list(takewhile(lambda cell: not cell.is_first, cells))
    return page_of(
        "explanation",
        ("page", "explanation"),
        _SCRIPTS,
        {"texts": page_texts(of="explained")},
        before=models[0],
        after=models[1],
        found=found,
        advice=_advice(found.advice),
        words=words,
        site=None if found.site is None else clean(found.site),
        level="critical" if found.is_fault else "fine",
        value=None if found.value is None else short(found.value),
        left=None if found.kind in _NO_CAUSE else f"{found.residual:.0%}",
        cause=_of_heads(found.extent, headline),
        named=bool(weights) and ", heads " not in found.extent,
        weights=", ".join(weights),
        stage=_stage(found, words),
        extent=_extent(found.extent),
        also=[(one.kind, _remark(one)) for one in found.also],
        sites=len(sites),
        stages=_COLUMNS,
        rows=rows,
        explained_before=found.is_fault and len(before) < len(cells) and any(one.level == "after" for one in before),
        skipped=[(run, clean(name), reason(why)) for run, name, why in found.runs.skipped],
    )


def _advice(text: str) -> Message | str:
    """What to do, in every language."""
    return message_of(text, "explained.advice", {"then": "advice"}) or clean(text)


def _words(found: FirstDifference) -> Message | str:
    """How the runs differ: the message without what stands beside it on the page."""
    also = "".join(f" Also {one.kind} at {one.site}: {one.message}." for one in found.also)
    where = "" if found.site is None else f" at {found.site}, {found.stage} ({found.extent})"
    # That of other padding is without brackets.
    for before in (f"{found.kind}{where}: ", f"{found.kind} at {found.extent}, {found.stage}: "):
        if found.message.startswith(before):
            return _said(found.message.removeprefix(before).removesuffix(also).removesuffix("."))
    return clean(found.message)


def _said(text: str) -> Message | str:
    """How runs differ, in every language."""
    return message_of(text, "explained.words", _FILLS) or clean(text)


def _headline(found: FirstDifference, words: Message | str) -> tuple[list[str], Message]:
    """The weights that the evidence names, if these alone differ, and what differs in a few words."""
    every = {one.key.removeprefix("explained.words."): one for one in inner_messages(words)}
    weights = [one.values for one in inner_messages(words) if one.key.startswith("explained.words.weight")]
    names, place = [one["name"].partition(" [")[0] for one in weights], cut(clean(found.site or ""), 160)
    if weights and "new" in every:
        return names, message("explained.headline.new", name=Names(names), place=place, run=every["new"].values["run"])
    if found.kind in ("weights", "values") and len(weights) == 1 and "apart_both" not in every:
        return names, _of_weight(weights[0], place, found)
    if found.kind == "weights" and found.stage == "attention output":
        return [], message("explained.headline.output")
    parts = _parts(words)
    if found.kind == "weights" and parts:
        part = parts[0] if len(parts) == 1 else message("explained.part.both")
        return [], message("explained.headline.part", part=part)
    return [], _cause(found.kind, found.value)


def _parts(words: Message | str) -> list[Message]:
    """Queries, keys or both, as they differ by no rule that is known."""
    return [one.values["part"] for one in inner_messages(words) if one.key.startswith("explained.words.apart")]


def _of_weight(weight: Mapping[str, Any], place: str, found: FirstDifference) -> Message:
    """How the one weight that differs does: by a factor if that makes the difference, and is of all that differs."""
    given = {"name": weight["name"].partition(" [")[0], "place": place}
    heads = found.extent.partition(", heads ")[2]
    if "numbers" in weight and f"{weight['numbers']} of {weight['all']}" != heads:
        return message("explained.headline.weight", **given)
    if "run" in weight:
        return message("explained.headline.zero", **given, run=weight["run"])
    factor, size = float(weight["factor"]), float(weight["size"])
    if abs(abs(factor - 1) / max(factor, 1) - size) > _SAME * size or weight["like"] != "1.00":
        return message("explained.headline.weight", **given)
    return message("explained.headline.factor", **given, factor=weight["factor"])


def _stage(found: FirstDifference, words: Message | str) -> Message | None:
    """What differs at the site: queries or keys if one alone does, or its stage."""
    parts = _parts(words)
    if len(parts) == 1:
        return parts[0]
    return None if found.stage is None else message(f"explained.stage.{found.stage}")


def _of_heads(extent: str, said: Message) -> Message:
    """The same with the heads that show it, where not all do."""
    which = extent.partition(", heads ")[2].rpartition(" of ")[0]
    key, place = ("heads", "numbers") if "," in which else ("head", "number")
    return message(f"explained.words.{key}", first=said, **{place: which}) if which else said


def _remark(one: Remark) -> Message:
    """What else the runs show, and where."""
    tried = one.message.startswith("tried and rejected")
    key = "explained.tried" if tried else "explained.words.more"
    words = message(key, first=_cause(one.kind, one.value), then=_said(one.message))
    return message("head.alarm", place=cut(clean(one.site), 160), said=words)


def _cause(kind: str, value: float | None) -> Message:
    """What a kind means, with its number where it has one, in every language."""
    if value is None:
        return message(f"explained.kind.{kind}")
    return message(f"explained.said.{kind}", value=short(value))


def _extent(extent: str) -> Message:
    """How far a cause reaches, in every language."""
    sites, _, heads = extent.partition(", heads ")
    n, of = [*map(int, re.findall(r"\d+", sites)), 0, 0][:2]
    which, _, every = heads.rpartition(" of ")
    here = message("explained.extent.here")
    if heads:
        here = message("explained.extent.heads", numbers=which, all=int(every), n=1 + which.count(","))
    if sites.startswith("from"):
        key = "from_heads" if heads else "from"
        return message(f"explained.extent.{key}", heads=here, n=of - n + 1, of=of)
    key = "all" if not of else "only" if of == 1 else "some"
    said = message(f"explained.extent.{key}", n=n, of=of)
    return message("explained.extent.both", sites=said, heads=here) if heads else said


def _row(one: SiteLevels, found: FirstDifference) -> tuple[str, list[Cell]]:
    """A site and its cells."""
    here = found.site is not None and clean(one.site) == clean(found.site)
    cells = {stage: _cell(one.times[stage], here and found.stage == stage, found) for stage in STAGES}
    apart = one.rows_apart
    is_first = here and found.stage == "visible keys"
    cells["visible keys"] = Cell(
        message("explained.rows", n=apart, of=one.rows),
        str(apart),
        _level(inf if apart else 0.0, is_first, found),
        is_first,
    )
    return clean(one.site), [cells[stage] for stage in _COLUMNS]


def _cell(times: float | None, is_first: bool, found: FirstDifference) -> Cell:
    if times is None:
        return Cell("–", "", "", is_first)
    return Cell(number(times, 3), repr(times), _level(times, is_first, found), is_first)


def _level(times: float, is_first: bool, found: FirstDifference) -> str:
    """How a number stands: one alone is beyond what is explained, the first that counts, and only of a fault."""
    if times > 1:
        return "beyond" if is_first and found.is_fault else "after"
    return "edge" if times > floor.EDGE else "within"
