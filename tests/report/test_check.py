"""The page of a check: every rule in a row, headers above their cells, in both languages and on a phone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attemper.report.check import check_page
from attemper.report.texts import texts
from attemper.results.check import Check, Rule
from attemper.rules import rules
from tests.report.conftest import Open, shown_text

RULES = (
    Rule("causal", "kept", "is_causal of the model's attention", "proved at 3 sites", message="proved at 3 sites"),
    Rule(
        "documents", "broken", "2 documents in a sequence (position_ids of the batch, which start anew)",
        "seen broken at 3 sites; tested at 2 cuts", "model.layers.0 <i>",
        24, 40.0, 0.7756, 0.5706,
        "model.layers.0 <i> (and 2 more sites): in 24 rows, 52.5 keys are seen on average where 12.5 are declared, and "
        "40 of these are of other documents, with 0.776 of the weight; exchanging every second document moves 24 rows, "
        f"and the output by 0.571 of its size. {rules.DOCUMENTS} {rules.DOCUMENTS_STATE}",
    ),
    Rule(
        "window", "cannot tell", "8 keys (config.sliding_window)", "-",
        message="the window is not shorter than the 8 tokens of the batch",
    ),
    Rule("padding", "not declared", None, "-", message="nothing declares it"),
)  # fmt: skip
KEPT = {"token", "batch", "padding"}
"""Words that stay English in Chinese texts."""
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
    text = shown_text(html)
    assert "1 rule is broken" in text
    assert "<i>" not in html.partition("<body>")[2].partition("<script")[0]
    assert "the window is not shorter" in text
    assert "linear delta rule" in text


def test_a_broken_rule_is_called_by_its_fault_and_what_to_do_comes_first():
    """ "No token sees another document", below "1 rule is broken", would say that all is well."""
    text = shown_text(page()).partition("Every rule")[0]
    assert "Tokens see other documents" in text
    assert "No token sees another document" not in text
    assert text.index("What to do: Give the attention what separates them") < text.index("Found: model.layers.0")


def test_every_rule_has_its_fault_and_its_advice_in_every_language():
    advice = {rule.name: rule.advice for rule in rules.RULES} | {"positions": rules.POSITIONS}
    parts = {"rest": rules.DOCUMENTS_REST, "mask": rules.DOCUMENTS_MASK, "state": rules.DOCUMENTS_STATE}
    advice |= {f"documents_{name}": text for name, text in parts.items()}
    for name, text in advice.items():
        assert texts("en")[f"checked.advice.{name}"] == text
        if name in {rule.name for rule in rules.RULES}:
            assert texts("en")[f"checked.broken.{name}"] != texts("en")[f"checked.rule.{name}"]


def test_the_chinese_page_has_no_english_sentence(open_page: Open):
    shown = open_page(page(), locale="zh-CN")
    text = shown.inner_text("main")
    assert "（以及另外 2 个模块）：24 行平均看到 52.5 个 key，而声明的是 12.5 个；其中 40 个属于别的文档" in text
    assert "一个序列有 2 篇文档（batch 的 position_ids，重新计数）" in text
    assert "在 3 个模块上确认违反；已检验 2 处" in text
    assert "delta 规则" in text or "状态" in text, "why a layer cannot be read"
    table = re.sub("model.layers.0|position_ids|config.sliding_window|is_causal", "", shown.inner_text("#rules"))
    left = set(re.findall("[A-Za-z]{4,}", table)) - KEPT
    assert left == set()


@pytest.mark.quick("en")
@pytest.mark.parametrize("locale", ["en", "zh-CN"])
def test_headers_stand_over_their_cells_and_fit(open_page: Open, locale: str):
    shown = open_page(page(), locale=locale)
    columns = shown.evaluate(ALIGNED)
    assert [set(column) for column in columns] == [{"left"}] * 5 + [{"right"}] * 4
    assert shown.evaluate("document.documentElement.scrollWidth") <= 1440
    assert shown.evaluate("document.querySelector('#rules thead').getBoundingClientRect().height") < 80


@pytest.mark.parametrize("locale", ["en", "zh-CN"])
@pytest.mark.quick("zh-CN")
def test_on_a_phone_a_rule_is_a_card_and_nothing_is_cut(open_page: Open, locale: str):
    shown = open_page(page(), width=390, locale=locale)
    for box in ("document.documentElement", "document.querySelector('.wide')"):
        assert shown.evaluate(f"{box}.scrollWidth <= {box}.clientWidth")
    broken = shown.inner_text("#rules tr:nth-child(2)")
    assert ("Weight on them" if locale == "en" else "这些 key 上的权重") in broken
    assert "0.7756" in broken
    assert not shown.locator("#rules thead").is_visible()
    assert not shown.locator("#rules .none").first.is_visible()
