"""Chinese texts: one word for each concept, advice of alarms as on pages, links to English pages that say so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attemper.readings.alarms import ALARMS
from attemper.report.texts import texts

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.zh-CN.md", *(ROOT / "docs").rglob("*.zh-CN.md")])
TABLES = [ROOT / "src" / "attemper" / name for name in ("report/texts/zh.json", "lab/pages/texts.json")]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
        kind.name: re.sub(r"{\w+}", "N", f"（{said[f'{of}.title']}）。{said[f'{of}.line' if kind.line else f'{of}.advice']}")
        for kind in ALARMS
        for of in (f"alarm.{kind.name}",)
    }
