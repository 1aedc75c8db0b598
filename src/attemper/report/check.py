"""The page of a check: whether a model's tokens see what they should, rule by rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attemper.report.page import page_of
from attemper.report.texts import Message, keys_of, message, message_of, page_texts, reason, texts
from attemper.text import clean, number

_SCRIPTS = ("document", "texts", "colour_scale", "theme", "explanation")
_FIGURES = ("rows", "keys", "weight", "moved")
_LEVELS = {"kept": "fine", "broken": "critical", "cannot tell": "warning", "not declared": "calm"}
_FAMILIES = {"first": "said", "then": "said", "others": "window", "sinks": "declared"}
"""Place of a text -> which texts fill it; others by their own name, where there are such texts."""
_OPEN = ("first", "then", "place", "source")
"""Places that hold words of others, too: a name, what a model raised."""


def check_page(document: Mapping[str, Any]) -> str:
    """The page of ``Check.to_dict()``. The same check gives the same page, to the byte."""
    rules = [_cells(rule) for rule in document["rules"]]
    broken = sum(rule["verdict"] == "broken" for rule in document["rules"])
    unread = [(clean(name), reason(clean(why))) for name, why in document["unread"].items()]
    said = [*(one[part] for one in rules for part in ("finding", "observed")), *(why for _, why in unread)]
    return page_of(
        "check",
        ("page", "explanation", "check"),
        _SCRIPTS,
        {"texts": page_texts(said, of="checked")},
        model=clean(document["model"]),
        document=document,
        rules=rules,
        broken=broken,
        level="critical" if broken else "fine",
        figures=_FIGURES,
        unread=unread,
    )


def _cells(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule as the page shows it."""
    own = {"name": rule["name"], "verdict": rule["verdict"], "level": _LEVELS[rule["verdict"]]}
    figures = {name: None if rule[name] is None else (rule[name], number(rule[name])) for name in _FIGURES}
    return {**own, "site": clean(rule["site"] or "–"), **words(rule), **figures}


def words(rule: Mapping[str, Any]) -> dict[str, Message | str]:
    """What a rule of a check declares and observed, what was found, and what to do about it."""
    text = clean(rule["message"] or "–")
    advice: list[Message] = []
    while key := next((key for key in keys_of("checked.advice") if text.endswith(f". {texts('en')[key]}")), None):
        text = text.removesuffix(f" {texts('en')[key]}")
        advice.insert(0, message(key))
    finding = _as_message(text.removesuffix(".") if advice else text, "said")
    is_open = rule["verdict"] in ("cannot tell", "not declared")
    return {
        "declared": _as_message(rule["declared"] or "–", "declared"),
        "observed": finding if is_open else _as_message(rule["observed"], "said"),
        "finding": finding,
        "advice": message("checked.both", first=advice[0], then=advice[1])
        if advice[1:]
        else advice[0]
        if advice
        else "",
    }


def _as_message(text: str, family: str) -> Message | str:
    """A text of a rule as the message that it is; words of others as they are."""
    return message_of(text, f"checked.{family}", _FAMILIES, _OPEN) or reason(text)
