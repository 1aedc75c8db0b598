"""Names that the articles define lead to the line that does the same here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import attemper
from attemper import lab, schedules
from attemper.lab.model import ByteConfig, ByteModel
from tests.articles import pages
from tests.articles.cases import DOCUMENTS

OF_THE_LIBRARY = {"attention"}
"""Of the articles' names those that attemper has itself."""
NOT_FOR_USERS = {"fit", "model"}
"""What an article's demonstration calls its own model, and the training of it."""


def given() -> dict[str, Any]:
    model = ByteModel(ByteConfig(layers=1, heads=2, width=16, context=40)).eval()
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    return {
        "attemper": attemper, "model": model, "batch": torch.randint(256, (1, 40)), "dim": 16, "layers": 3,
        "q": q, "k": k, "v": v, "scores": torch.randn(2, 5),
    }  # fmt: skip


def defined() -> set[str]:
    """Classes and functions that stand at the left margin of a snippet."""
    sources = [case.source for document in DOCUMENTS for case in document.cases if case.snippet]
    return {name for source in sources for name in re.findall(r"^(?:class|def) ([A-Za-z]\w*)", source, re.MULTILINE)}


def test_every_name_that_the_articles_define_has_a_line() -> None:
    assert defined() - NOT_FOR_USERS - OF_THE_LIBRARY <= set(pages.NAMES)
    assert not OF_THE_LIBRARY - set(attemper.__all__)


@pytest.mark.parametrize("name", pages.NAMES)
def test_a_name_of_the_articles_is_an_error_that_says_what_to_write_and_that_runs(name: str) -> None:
    line = pages.NAMES[name]
    with pytest.raises(AttributeError, match=re.escape(f"attemper has no {name}; write {line}")):
        getattr(attemper, name)
    if "in a shell" in line:
        assert line.split()[:2] == ["attemper", "lab"]
        assert line.split()[2] in lab.EXPERIMENTS
    else:
        assert eval(line, given()) is not None


@pytest.mark.parametrize("language", pages.PAGES)
def test_the_page_begins_with_the_table_of_names(language: str) -> None:
    text = pages.PAGES[language].read_text("utf-8")
    table = pages.names_table(language)
    assert table in text
    assert text.index(table) < text.index("## 000")


def test_another_name_is_an_error_as_before() -> None:
    with pytest.raises(AttributeError, match="module 'attemper' has no attribute 'entropies'"):
        _ = attemper.entropies  # type: ignore[attr-defined]


def test_the_articles_own_word_for_a_shape_is_taken() -> None:
    assert schedules.layerwise(4, 0.5, 2.0, "exp") == schedules.layerwise(4, 0.5, 2.0, "exponential")
