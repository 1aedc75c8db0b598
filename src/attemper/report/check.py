"""The page of a check: whether a model's tokens see what they should, rule by rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from attemper import __version__
from attemper.report.page import asset, policy, script_of, templates
from attemper.report.texts import page_texts
from attemper.text import clean, number, script_json

_SCRIPTS = ("document", "texts", "colours", "theme", "explanation")
_FIGURES = ("rows", "keys", "weight", "moved")
_LEVELS = {"kept": "fine", "broken": "critical", "cannot tell": "warning", "not declared": "calm"}


def check_page(document: Mapping[str, Any]) -> str:
    """The page of ``Check.to_dict()``. The same check gives the same page, to the byte."""
    rules = [_cells(rule) for rule in document["rules"]]
    broken = sum(rule["verdict"] == "broken" for rule in document["rules"])
    style = asset("page.css") + asset("explanation.css") + asset("check.css")
    script = script_of(_SCRIPTS, "start();\n")
    return (
        templates()
        .get_template("check.html.j2")
        .render(
            model=clean(document["model"]),
            document=document,
            rules=rules,
            broken=broken,
            level="critical" if broken else "fine",
            figures=_FIGURES,
            unread=[(clean(name), clean(why)) for name, why in document["unread"].items()],
            policy=policy(style, (script,)),
            style=Markup(style),
            script=Markup(script),
            data=Markup(script_json({"texts": page_texts(of="checked")})),
            version=__version__,
        )
    )


def _cells(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule as the page shows it."""
    texts = {name: clean(rule[name] or "–") for name in ("declared", "observed", "message", "site")}
    figures = {name: None if rule[name] is None else (rule[name], number(rule[name])) for name in _FIGURES}
    return {"name": rule["name"], "verdict": rule["verdict"], "level": _LEVELS[rule["verdict"]], **texts, **figures}
