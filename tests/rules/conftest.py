"""Whatever a check of these tests says, its page says in Chinese, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from attemper.report.check import words
from attemper.report.texts import Message, say
from attemper.results.check import Check

OF_OTHERS = re.compile(r"[-–]|config\.\w+|\w+=|[\w.#]+(, [\w.#]+)*(, and [\d,]+ more)?")
"""A field, an argument, names of sites: what nobody translates."""


def left_in_english(said: Any) -> Iterator[str]:
    match said:
        case Message(_, values):
            for name, value in values.items():
                yield from left_in_english(value) if name not in ("error", "site", "sites", "name") else ()
        case str() if said and not OF_OTHERS.fullmatch(said) and not re.fullmatch(r"[\d.,e+-]+", said):
            yield said


@pytest.fixture(autouse=True)
def _checks_are_said_in_chinese(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Check] = []

    def keep(*given: Any) -> Check:
        made.append(Check(*given))
        return made[-1]

    monkeypatch.setattr("attemper.rules.check.Check", keep)
    yield
    for rule in (rule for check in made for rule in check.to_dict()["rules"]):
        found = words(rule)
        for part, said in found.items():
            assert list(left_in_english(said)) == [], f"{rule['name']}, {part}"
        finding, advice = say(found["finding"]), say(found["advice"])
        assert rule["message"] == (f"{finding}. {advice}" if advice else finding)
        assert say(found["observed"]) in (rule["observed"], rule["message"])
