"""The page of a check: every rule in a row, headers above their cells, in both languages and on a phone."""

from __future__ import annotations

from typing import Any

import pytest

from attemper.report.check import check_page
from attemper.results.check import Check, Rule
from tests.report.conftest import Open, check_policy, shown_text

RULES = (
    Rule("causal", "kept", "is_causal of the model's attention", "proved at 3 sites", message="proved at 3 sites"),
    Rule(
        "documents", "broken", "2 documents in a sequence", "proved at 3 sites; tested at 2 cuts", "model.layers.0 <i>",
        24, 40.0, 0.7756, 0.5706, "model.layers.0 <i>: 24 rows, and the output by 0.571 of its size",
    ),
    Rule("window", "cannot tell", "8 keys (config.sliding_window)", "-", message="the window is not shorter"),
    Rule("padding", "not declared", None, "-", message="nothing declares it"),
)  # fmt: skip
ALIGNED = """
() => [...document.querySelectorAll("#rules th")].map((head, column) => {
  const cells = [...document.querySelectorAll(`#rules tbody td:nth-child(${column + 1})`)];
  return [head, ...cells].map((one) => getComputedStyle(one).textAlign);
})
"""


def certificate() -> dict[str, Any]:
    return Check("mine <i>", RULES, (1, 64), 31, ("a", "b", "c"), {"linear": "delta rule"}).to_dict()


def page() -> str:
    return check_page(certificate())


def test_the_page_says_what_is_broken_and_runs_nothing_that_others_wrote():
    html = page()
    check_policy(html, 2)
    text = shown_text(html)
    assert "1 rule is broken" in text
    assert "<i>" not in html.partition("<body>")[2].partition("<script")[0]
    assert "the window is not shorter" in text
    assert "linear delta rule" in text


@pytest.mark.quick("390-zh-CN")
@pytest.mark.parametrize("locale", ["en", "zh-CN"])
@pytest.mark.parametrize("width", [1440, 390])
def test_headers_stand_over_their_cells_and_fit(open_page: Open, width: int, locale: str):
    shown = open_page(page(), width=width, locale=locale)
    columns = shown.evaluate(ALIGNED)
    assert [set(column) for column in columns] == [{"left"}] * 5 + [{"right"}] * 4
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.evaluate("document.querySelector('#rules thead').getBoundingClientRect().height") < 80
