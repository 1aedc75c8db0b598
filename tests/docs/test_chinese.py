"""Chinese texts say what the English ones say, with one word for each concept; links to English pages say so."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from attemper.readings.alarms import ALARMS
from attemper.report.texts import texts
from scripts.website.sources import DOCS, ROOT, TRANSLATED

TRANSLATED_PAGES = (
    *(DOCS / page for page in ("README.md", "tutorial.md", "guide.md", "alarms.md")),
    DOCS / "articles" / "from-article-to-library.md",
    *(
        path
        for folder in ("tasks", "lab", "research")
        for path in sorted((DOCS / folder).glob("*.md")) if not path.name.endswith(TRANSLATED)
    ),
)  # fmt: skip
"""What of docs/ is there in Chinese. Every other page is shown in English, and says so."""
WORD_FOR_WORD = {ROOT / "README.md", DOCS / "guide.md"}
"""Pages that have the same numbers and names in code, too."""
SAME = (r"\]\(([^)]+)\)", r"^(#+) ", r"^(\|)")
"""Links, headings, rows of tables."""
SAME_WORDS = (r"`([^`\n]+)`", r"(?<![\w.])(\d+(?:\.\d+)*(?:e-\d+)?)")
LANGUAGE_LINE = re.compile(r"^\[(?:English|中文)\]\([\w.-]*\)\n", re.MULTILINE)
PAGES = sorted([ROOT / "README.zh-CN.md", *(ROOT / "docs").rglob("*.zh-CN.md")])
TABLES = [ROOT / "src" / "attemper" / name for name in ("report/texts/zh.json", "lab/pages/texts.json")]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """Without code; a link to a page's Chinese version counts as one to the page, and so does its name in the link."""
    return LANGUAGE_LINE.sub("", FENCE.sub("", text)).replace(TRANSLATED, ".md")


@pytest.mark.parametrize("path", [ROOT / "README.md", *TRANSLATED_PAGES], ids=name)
def test_a_chinese_page_holds_what_the_english_one_holds_and_is_chinese(path: Path) -> None:
    other = path.with_name(path.stem + TRANSLATED)
    english, chinese = (one.read_text("utf-8") for one in (path, other))
    assert f"\n[中文]({other.name})\n" in english[:200], f"{path}: put [中文]({other.name}) below the title"
    assert f"\n[English]({path.name})\n" in chinese[:200]
    assert FENCE.findall(english) == FENCE.findall(chinese)
    for pattern in SAME + (SAME_WORDS if path in WORD_FOR_WORD else ()):
        one, two = (Counter(re.findall(pattern, prose(text), re.MULTILINE)) for text in (english, chinese))
        assert one == two, f"only in English: {one - two}; only in Chinese: {two - one}"
    for target in re.findall(r"\]\(([^)#:]+)\)", prose(english)):
        assert (path.parent / target).exists(), target
    assert len(re.findall("[一-鿿]", chinese)) > 100
    for paragraph in re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(chinese)).split("\n\n"):
        if path in WORD_FOR_WORD and len(paragraph) > 60 and not paragraph.startswith("|"):
            assert len(re.findall("[一-鿿]", paragraph)) > 0.2 * len(paragraph), paragraph


def refused() -> list[str]:
    """The last column of the table of words in CONTRIBUTING.md."""
    table = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("\n| English | Chinese | not |\n")[1].split("\n\n")[0]
    return [word for row in table.splitlines()[1:] for word in row.split("|")[3].strip().split("，") if word]


@pytest.mark.parametrize("path", [*PAGES, *TABLES], ids=name)
def test_one_word_stands_for_each_concept(path: Path) -> None:
    text = FENCE.sub("", path.read_text("utf-8"))  # code of the articles is as they print it
    assert [word for word in refused() if word in text] == []
    assert "坍塌" in refused()


@pytest.mark.parametrize("path", [path for path in PAGES if "articles" not in path.parts], ids=name)
def test_a_paragraph_that_links_to_an_english_page_says_so(path: Path) -> None:
    for paragraph in re.split(r"\n\n|\n(?=[|-] )", FENCE.sub("", path.read_text("utf-8"))):
        linked = [(path.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+\.md)", paragraph)]
        pages = [page for page in linked if not page.name.startswith(("README", "CONTRIBUTING"))]
        english = [
            page for page in pages if not page.with_name(page.stem.removesuffix(".zh-CN") + ".zh-CN.md").exists()
        ]
        said = "英文" in paragraph
        if english and not said:
            pytest.fail(f"{name(path)}: say （英文） beside the link to {english[0].name}: {paragraph[:80]}")
        assert not (pages and said and not english), (
            f"{name(path)}: every page linked to is in Chinese: {paragraph[:80]}"
        )


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_a_link_leads_to_the_chinese_page_where_there_is_one(path: Path) -> None:
    """Except the one below the title, to the English page itself."""
    for target in re.findall(r"\]\(([^)#:\s]+\.md)", FENCE.sub("", path.read_text("utf-8"))):
        chinese = (path.parent / target).with_suffix(".zh-CN.md").resolve()
        if not target.endswith(".zh-CN.md") and chinese != path.resolve():
            assert not chinese.exists(), f"{name(path)}: link to {chinese.name} instead of {target}"


def test_every_advice_on_the_page_of_alarms_is_that_of_the_pages() -> None:
    page = (ROOT / "docs" / "alarms.zh-CN.md").read_text("utf-8")
    written = dict(re.findall(r"^\*\*`(\w+)`\*\*(.+)$", page, re.MULTILINE))
    said = texts("zh")
    assert written == {
        kind.name: re.sub(
            r"{\w+}", "N", f"（{said[f'{of}.title']}）。{said[f'{of}.line' if kind.line else f'{of}.advice']}"
        )
        for kind in ALARMS
        for of in (f"alarm.{kind.name}",)
    }
