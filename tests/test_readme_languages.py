"""README.md and README.zh-CN.md say the same: the same code, names, numbers and links, in two languages."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK_LINE = re.compile(r"^\[(?:English|中文)\]\(README[\w.-]*\)\n", re.MULTILINE)


def prose(text: str) -> str:
    """Without code; a link to a page's Chinese version counts as one to the page."""
    return LINK_LINE.sub("", FENCE.sub("", text)).replace(".zh-CN.md", ".md")


def test_both_hold_the_same_code_in_the_same_order() -> None:
    assert FENCE.findall(CHINESE) == FENCE.findall(ENGLISH)
    assert len(FENCE.findall(ENGLISH)) >= 5


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
def test_both_hold_the_same(pattern: str) -> None:
    english, chinese = (Counter(re.findall(pattern, prose(text), flags=re.MULTILINE)) for text in (ENGLISH, CHINESE))
    assert english == chinese, f"only in English: {english - chinese}; only in Chinese: {chinese - english}"
    assert english


def test_each_links_to_the_other() -> None:
    assert "\n[中文](README.zh-CN.md)\n" in ENGLISH[:200], "README.md: put [中文](README.zh-CN.md) below the title"
    assert "\n[English](README.md)\n" in CHINESE[:200]


def test_the_chinese_page_is_chinese() -> None:
    for paragraph in re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(CHINESE)).split("\n\n"):
        if len(paragraph) > 60 and not paragraph.startswith("|"):
            assert len(re.findall("[一-鿿]", paragraph)) > 0.2 * len(paragraph), paragraph
