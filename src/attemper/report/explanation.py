"""The page of an explanation: where two runs first differ and why, and how far apart each stage of each site is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from markupsafe import Markup

from attemper import __version__
from attemper.fingerprints import floor
from attemper.fingerprints.explanation import HARMLESS, UNKNOWN, FirstDifference, Remark
from attemper.fingerprints.finding import short
from attemper.fingerprints.levels import STAGES, SiteLevels
from attemper.report.page import asset, policy, script_of, templates
from attemper.report.texts import Message, message, message_of, page_texts, reason
from attemper.text import clean, cut, number, script_json

_SCRIPTS = ("document", "texts", "colours", "theme", "explanation")
MOST_SITES = 1000
"""Sites that the page lists."""
_FILLS = {"first": "words", "then": "words", "last": "end", "other_window": "window"}
"""Place of a text -> which texts fill it; others by their own name, where there are such texts."""
_NO_CAUSE = (*HARMLESS, *UNKNOWN, "output")
"""Kinds that name no cause, so that none leaves anything unexplained."""
_COLUMNS = (*STAGES[:3], "visible keys", *STAGES[3:])


@dataclass(frozen=True)
class Cell:
    """A stage of a site."""

    said: Message | str
    exact: str
    level: str
    """ "beyond" what rounding explains, "edge" of it, "within" it, or empty where it was not seen."""
    is_first: bool
    """Whether it is what the explanation is of."""


@dataclass(frozen=True)
class Row:
    """A site."""

    number: int
    site: str
    cells: tuple[Cell, ...]


def explanation_page(found: FirstDifference) -> str:
    """The page of what :func:`attemper.explain` says of two runs. The same runs give the same page, to the byte."""
    sites, models = found.runs.sites, [clean(name) for name in found.runs.models]
    style = asset("page.css") + asset("explanation.css")
    script = script_of(_SCRIPTS, "start();\n")
    return (
        templates()
        .get_template("explanation.html.j2")
        .render(
            before=models[0],
            after=models[1],
            found=found,
            advice=_advice(found.advice),
            words=_words(found),
            site=None if found.site is None else clean(found.site),
            level="critical" if found.is_fault else "fine",
            value=None if found.value is None else short(found.value),
            left=None if found.kind in _NO_CAUSE else f"{found.residual:.0%}",
            cause=_of_heads(found.extent, _cause(found.kind, found.value)),
            extent=_extent(found.extent),
            also=[(one.kind, _remark(one)) for one in found.also],
            sites=len(sites),
            stages=_COLUMNS,
            rows=[_row(place, one, found) for place, one in enumerate(sites[:MOST_SITES], 1)],
            skipped=[(run, clean(name), reason(why)) for run, name, why in found.runs.skipped],
            policy=policy(style, (script,)),
            style=Markup(style),
            script=Markup(script),
            data=Markup(script_json({"texts": page_texts(of="explained")})),
            version=__version__,
        )
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


def _of_heads(extent: str, said: Message) -> Message:
    """The same with the heads that show it, where not all do."""
    which = extent.partition(", heads ")[2].rpartition(" of ")[0]
    key, place = ("heads", "numbers") if "," in which else ("head", "number")
    return message(f"explained.words.{key}", first=said, **{place: which}) if which else said


def _remark(one: Remark) -> Message:
    """What else the runs show, and where."""
    words = message("explained.words.more", first=_cause(one.kind, one.value), then=_said(one.message))
    return message("head.alarm", place=cut(clean(one.site), 160), said=words)


def _cause(kind: str, value: float | None) -> Message:
    """What a kind means, with its number where it has one, in every language."""
    if value is None:
        return message(f"explained.kind.{kind}")
    return message(f"explained.said.{kind}", value=short(value))


def _extent(extent: str) -> Message:
    """How far a cause reaches, in every language."""
    sites, _, heads = extent.partition(", heads ")
    numbers = dict(zip(("n", "of"), map(int, re.findall(r"\d+", sites)), strict=False))
    key = "all" if not numbers else "from" if sites.startswith("from") else "only" if numbers["of"] == 1 else "some"
    said = message(f"explained.extent.{key}", **numbers)
    which, _, of = heads.rpartition(" of ")
    if not heads:
        return said
    return message("explained.extent.heads", sites=said, heads=which, last=int(of) - 1, n=1 + which.count(","))


def _row(place: int, one: SiteLevels, found: FirstDifference) -> Row:
    here = found.site is not None and clean(one.site) == clean(found.site)
    cells = {stage: _cell(one.times[stage], here and found.stage == stage) for stage in STAGES}
    apart = one.rows_apart
    cells["visible keys"] = Cell(
        message("explained.rows", n=apart, of=one.rows),
        str(apart),
        "beyond" if apart else "within",
        here and found.stage == "visible keys",
    )
    return Row(place, clean(one.site), tuple(cells[stage] for stage in _COLUMNS))


def _cell(times: float | None, is_first: bool) -> Cell:
    if times is None:
        return Cell("–", "", "", is_first)
    level = "beyond" if times > 1 else "edge" if times > floor.EDGE else "within"
    return Cell(number(times, 3), repr(times), level, is_first)
