"""The page of an explanation: where two runs first differ and why, and how far apart each stage of each site is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from attemper import __version__
from attemper.files import write_whole
from attemper.fingerprints import floor
from attemper.fingerprints.explanation import Explanation
from attemper.fingerprints.finding import short
from attemper.fingerprints.levels import STAGES, SiteLevels, levels
from attemper.fingerprints.record import Fingerprint
from attemper.report.page import asset, policy, script_of, templates
from attemper.report.texts import Message, message, page_texts
from attemper.text import clean, number, script_json

_SCRIPTS = ("document", "texts", "colours", "theme", "explanation")
MOST_SITES = 1000
"""Sites that the page lists."""
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


def explanation_page(a: Fingerprint, b: Fingerprint, found: Explanation) -> str:
    """The page of what :func:`attemper.explain` says of two runs. The same runs give the same page, to the byte.

    Raises:
        InputError: as :func:`attemper.explain`.
    """
    sites, pair = levels(a, b), (("a", a), ("b", b))
    style = asset("page.css") + asset("explanation.css")
    script = script_of(_SCRIPTS, "start();\n")
    return (
        templates()
        .get_template("explanation.html.j2")
        .render(
            before=clean(a.model),
            after=clean(b.model),
            found=found,
            said=clean(found.message),
            site=None if found.site is None else clean(found.site),
            level="critical" if found.is_fault else "fine",
            value=None if found.value is None else short(found.value),
            cause=_cause(found.kind, found.value),
            extent=_extent(found.extent),
            also=[(one.kind, clean(one.site), _cause(one.kind, one.value), clean(one.message)) for one in found.also],
            sites=len(sites),
            stages=_COLUMNS,
            rows=[_row(place, one, found) for place, one in enumerate(sites[:MOST_SITES], 1)],
            skipped=[(run, clean(name), clean(why)) for run, one in pair for name, why in one.skipped.items()],
            policy=policy(style, (script,)),
            style=Markup(style),
            script=Markup(script),
            data=Markup(script_json({"texts": page_texts(of="explained")})),
            version=__version__,
        )
    )


def write_explanation(a: Fingerprint, b: Fingerprint, found: Explanation, path: str | os.PathLike[str]) -> Path:
    """Writes the page to ``path``, whole or not at all, and gives the file's place.

    Raises:
        InputError: no file can be written there.
    """
    return write_whole(path, explanation_page(a, b, found))


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
    return message("explained.extent.heads", sites=said, heads=which, of=int(of)) if heads else said


def _row(place: int, one: SiteLevels, found: Explanation) -> Row:
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
    return Cell(number(times), repr(times), level, is_first)
