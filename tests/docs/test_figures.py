"""A measured figure has one source page; no page quotes it with another value. figures.json lists the quoted ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FIGURES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "figures.json").read_text("utf-8"))
"""What is measured, the page that it comes from, regexes of its quotes (one group a number), its numbers."""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """Every page, English and Chinese, as one line."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return {path.relative_to(ROOT).as_posix(): " ".join(path.read_text("utf-8").split()) for path in found}


def quoted(figure: dict[str, Any], text: str) -> list[list[str]]:
    """The numbers of each quote in a text."""
    matches = (match for phrase in figure["phrases"] for match in re.finditer(phrase, text))
    return [[number.replace(",", "") for number in match.groups()] for match in matches]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["figure"])
def test_a_figure_has_one_value_on_all_pages(figure: dict[str, Any], pages: dict[str, str]) -> None:
    found = {name: numbers for name, text in pages.items() if (numbers := quoted(figure, text))}
    assert figure["source"] in found, "its source page does not have it: mend the phrase, or delete the row"
    wrong = {name: numbers for name, numbers in found.items() if any(one != figure["value"] for one in numbers)}
    assert not wrong, f"not {figure['value']}, as {figure['source']} has it"


def test_each_phrase_matches_some_page(pages: dict[str, str]) -> None:
    phrases = [phrase for figure in FIGURES for phrase in figure["phrases"]]
    assert [one for one in phrases if not any(re.search(one, text) for text in pages.values())] == []


def test_another_value_is_found() -> None:
    (figure,) = (one for one in FIGURES if one["figure"].startswith("MB of a fingerprint"))
    assert quoted(figure, "sizes: in bfloat16 a file takes 7.9 MB") == [["7.9"]]
