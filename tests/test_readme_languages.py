"""README and guide say the same in two languages: the same code, names, numbers and links."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README", "docs/guide")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK_LINE = re.compile(r"^\[(?:English|中文)\]\([\w.-]*\)\n", re.MULTILINE)

pytestmark = pytest.mark.parametrize("page", PAGES)


def both(page: str) -> tuple[str, str]:
    """A page in English and in Chinese."""
    english, chinese = ((ROOT / f"{page}{language}.md").read_text(encoding="utf-8") for language in ("", ".zh-CN"))
    return english, chinese


def prose(text: str) -> str:
    """Without code; a link to a page's Chinese version counts as one to the page, and so does its name in the link."""
    return LINK_LINE.sub("", FENCE.sub("", text)).replace(".zh-CN.md", ".md")


def test_both_hold_the_same_code_in_the_same_order(page: str) -> None:
    english, chinese = both(page)
    assert FENCE.findall(chinese) == FENCE.findall(english)
    assert len(FENCE.findall(english)) >= 3


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"`([^`\n]+)`", id="names in code"),
        pytest.param(r"\]\(([^)]+)\)", id="links"),
        pytest.param(r"(?<![\w.])(\d+(?:\.\d+)*(?:e-\d+)?)", id="numbers"),
        pytest.param(r"^(#+) ", id="headings"),
        pytest.param(r"^(\|)", id="rows of tables"),
    ],
)
def test_both_hold_the_same(page: str, pattern: str) -> None:
    english, chinese = (Counter(re.findall(pattern, prose(text), flags=re.MULTILINE)) for text in both(page))
    assert english == chinese, f"only in English: {english - chinese}; only in Chinese: {chinese - english}"
    assert english


def test_each_links_to_the_other(page: str) -> None:
    english, chinese = both(page)
    name = Path(page).name
    assert f"\n[中文]({name}.zh-CN.md)\n" in english[:200], f"{page}.md: put [中文]({name}.zh-CN.md) below the title"
    assert f"\n[English]({name}.md)\n" in chinese[:200]


def test_every_link_leads_to_a_file(page: str) -> None:
    for text in both(page):
        for target in re.findall(r"\]\(([^)#:]+)\)", prose(text)):
            assert ((ROOT / page).parent / target).exists(), target


def test_the_chinese_page_is_chinese(page: str) -> None:
    _, chinese = both(page)
    for paragraph in re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(chinese)).split("\n\n"):
        if len(paragraph) > 60 and not paragraph.startswith("|"):
            assert len(re.findall("[一-鿿]", paragraph)) > 0.2 * len(paragraph), paragraph
