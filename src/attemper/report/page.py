"""One file that holds everything: markup, style, scripts, data; and a policy under which nothing else can run."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from attemper import __version__
from attemper.readings.labels import by_reason
from attemper.readings.reading import Reading
from attemper.report import texts
from attemper.report.document import archive, document, file_name, quantities, towers
from attemper.report.headline import verdict
from attemper.report.key_figures import figures, groups, origin, picture_places, role_choices, rows, unknown_roles
from attemper.report.picture import MOST_PICTURES, Weights, pictures
from attemper.report.texts import Message, live_texts, mark, message, say, span
from attemper.text import clean, cut, script_json

LARGEST_BYTES = 2_000_000
"""A page that would be larger leaves something out, and says so."""
_LEVELS = ((1, True, ("csv", "json")), (3, True, ("csv",)), (3, False, ("csv",)), (3, False, ()))
"""Which part of the most pictures is in it, whether histograms and curves are, and which files it can save; the first
that is small enough is taken.
"""

_HERE = Path(__file__).parent
_SCRIPTS = (
    *(
        "document",
        "texts",
        "numbers",
        "history",
        "colour_scale",
        "theme",
        "maps",
        "charts",
        "panel",
        "course",
        "loss",
        "multiples",
        "sheet",
        "picture",
    ),
    *("time", "table", "download", "main"),
)
"""Put together in this order, inside one function: they share names, and add none to the window."""

ECHARTS = _HERE / "vendor" / "echarts" / "echarts.common.min.js"
"""The one file of others that a page carries: lines, bars and scatter plots on a canvas, Apache-2.0."""
ECHARTS_VERSION = "6.1.0"
ECHARTS_SHA256 = "61f13280aba3161f77fc801bf5f9c786f55f10432153a0683fc5cc0700b013d5"
"""Of the file as it lies in the npm package ``echarts``; the test of it keeps anyone from editing the copy."""


def scan_page(reading: Reading, patterns: Sequence[Weights] = ()) -> str:
    """The page of ``reading``. The same reading gives the same page, to the byte.

    Args:
        patterns: heads whose weights on a text it shows, as :func:`attemper.pattern` gives them: it then holds text.

    Raises:
        ValueError: a number of the reading is NaN or infinite; a missing number is None.
    """
    files = {kind: archive(reading, kind) for kind in ("csv", "json")}
    drawn = pictures(reading, patterns)
    return first_that_fits(
        _render(reading, drawn[: MOST_PICTURES // part], details=details, files={kind: files[kind] for kind in kinds})
        for part, details, kinds in _LEVELS
    )


def first_that_fits(pages: Iterable[str]) -> str:
    """The first page that is small enough; the last if none is."""
    whole = ""
    for whole in pages:
        if len(whole.encode("utf-8")) <= LARGEST_BYTES:
            break
    return whole


def _render(reading: Reading, shown: list[dict[str, Any]], *, details: bool, files: Mapping[str, str]) -> str:
    drawn, kinds = towers(reading.sites), quantities(reading)
    tokens = [(reading.tokens, message("fact.tokens", n=reading.tokens))]
    return render(
        reading,
        document(reading, drawn, details=details) | {"pictures": shown},
        run=False,
        title=texts.own_name(clean(reading.model)),
        facts=[*size_facts(reading), *tokens],
        backend=clean(reading.backend),
        origin=origin(reading),
        files={kind: Markup(text) for kind, text in files.items()},
        file_name=file_name(reading.model),
        verdict=verdict(reading),
        figures=figures(reading, drawn),
        groups=groups(reading, drawn),
        ended=(),
        notes=[texts.note(note) for note in reading.notes],
        towers=drawn,
        quantities=kinds,
        details=details,
        pictured=picture_places(reading, drawn, shown),
    )


def size_facts(reading: Reading) -> list[tuple[int, Message]]:
    """How many heads and layers there are."""
    heads, sites = len(reading.heads), len(reading.sites)
    return [(heads, message("fact.heads", n=heads)), (sites, message("fact.layers", n=sites))]


def render(reading: Reading, data: Mapping[str, Any], **given: Any) -> str:
    """The page of a reading, alone or as the last sample of a run, from ``templates/page.html.j2``."""
    skipped = by_reason((one.name, one.reason) for one in reading.skipped)
    return page_of(
        "page",
        ("page",),
        _SCRIPTS,
        data,
        ECHARTS.read_text(encoding="utf-8"),
        "",
        heads=len(reading.heads),
        sampled_rows=reading.sampled_rows,
        skipped=[(clean(name), texts.reason(why)) for name, why in skipped],
        rows=rows(reading, given["quantities"]),
        roles=role_choices(reading),
        unknown_roles=unknown_roles(reading),
        short_title=cut(given["title"], 120) if isinstance(given["title"], str) else given["title"],
        **given,
    )


def page_of(
    template: str,
    styles: Iterable[str],
    scripts: Iterable[str],
    data: Mapping[str, Any],
    library: str = "",
    last: str = "start();\n",
    look: Mapping[str, Any] | None = None,
    **given: Any,
) -> str:
    """A template with these style sheets, scripts and data, and nothing else.

    Args:
        library: draws charts, if given.
        last: line of the script.
        look: how a run looks that is served while it is written (``live.Look``): with the script that follows it.
    """
    style = "".join(asset(f"{name}.css") for name in styles)
    script = script_of((asset(f"{name}.js") for name in scripts), last)
    return (
        templates()
        .get_template(f"{template}.html.j2")
        .render(
            policy=policy(style, (library, script) if library else (script,), look),
            live=_live(look),
            style=Markup(style),
            script=Markup(script),
            library=Markup(library),
            data=Markup(script_json(data)),
            version=__version__,
            echarts_version=ECHARTS_VERSION,
            **given,
        )
    )


def message_page(said: str, look: Mapping[str, Any]) -> str:
    """A served page that says why there is no other, and asks whether there is one now."""
    style = asset("message.css")
    made = templates().get_template("message.html.j2")
    return made.render(said=said, policy=policy(style, (), look), style=Markup(style), live=_live(look))


def _live(look: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the script of a served page needs: its text, what it says in every language, and how the run looks."""
    return {"script": Markup(asset("live.js")), "look": look, "texts": live_texts()} if look else None


@cache
def templates() -> Environment:
    """The page's templates. Whatever they are given is escaped, and a missing value is an error."""
    # select_autoescape() would not escape files that end in .j2.
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"t": message, "say": say, "mark": mark, "span": span, "attribute": _attribute}
    made.filters |= {"cut": _cut, "breaks": _breaks}
    return made


def _attribute(name: str, said: object) -> Markup:
    """An attribute, and what the page needs to say it again."""
    return Markup(' {}="{}"{}').format(Markup(name), say(said), mark(said, name))


def _cut(text: Markup, longest: int) -> Markup:
    """A text that came from others, cut; messages of ours are as long as they are."""
    return text if text.startswith("<span") else escape(cut(text.unescape(), longest))


def _breaks(name: str) -> Markup:
    """A name that breaks behind a dot or an underscore, and nowhere else unless it must."""
    return Markup(re.sub(r"([._])(?=.)", r"\1<wbr>", str(escape(name))))


def asset(name: str) -> str:
    """The text of a style sheet or script of the page."""
    return (_HERE / "assets" / name).read_text(encoding="utf-8")


def script_of(parts: Iterable[str], last: str = "") -> str:
    """The script of a page: these parts one after another, and ``last`` behind them."""
    joined = "\n".join(parts)
    return f'(() => {{\n"use strict";\n{joined}\n{last}}})();\n'


def policy(style: str, scripts: tuple[str, ...], look: Mapping[str, Any] | None = None) -> str:
    """A content security policy: these scripts and this style by their hashes, and nothing from anywhere; of a page
    that is served, with ``look``, also the script that refreshes it, and requests to its own address.
    """
    allowed = " ".join(_hash(script) for script in (*scripts, *([asset("live.js")] if look else ())))
    requests = "connect-src 'self'; " if look else ""
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; "
        f"{requests}base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
