"""The page of a comparison: exact, escaped, complete, the same each time, and usable in a browser."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from attemper import compare
from attemper.readings.reading import Reading
from attemper.report.comparison import MOST_ROWS, comparison_page, summary
from attemper.report.texts import say
from attemper.results.comparison import STATISTICS, Comparison
from tests.report import readings
from tests.report.conftest import Open, shown_text


def changed(before: Reading, number: int, **values: float | None) -> Reading:
    """``before`` with other numbers in a head of its first site."""
    first, *others = before.sites
    heads = [replace(head, **values) if head.head == number else head for head in first.heads]
    return replace(before, sites=(replace(first, heads=tuple(heads)), *others))


def sharpened() -> Comparison:
    before = readings.reading(readings.site("layers.0.attn"), readings.site("layers.1.attn"))
    after = changed(before, 2, normalized_entropy=0.1 + 0.2, max_logit=1 / 3)
    return compare(before, changed(after, 3, first_token_mass=None), names=("a <b>", "c & d"))


def test_every_number_is_on_the_page_with_all_its_digits():
    comparison = sharpened()
    html = comparison_page(comparison)
    rows = re.findall(r"<tr><td.*?</tr>", html, re.DOTALL)
    assert len(rows) == len(comparison.heads) == 8
    for row, head in zip(rows, comparison.heads, strict=True):
        cells = re.findall(r'<td data-size="([^"]*)">(.*?)</td>', row, re.DOTALL)
        for name, (size, cell) in zip(STATISTICS, cells, strict=False):
            before, after, change = re.findall(r'<data value="([^"]*)"', cell)
            wanted = (*getattr(head, name), head.change(name))
            assert [None if text == "" else float(text) for text in (before, after, change)] == list(wanted)
            known = head.change(name)
            assert float(size) == (abs(known) if known is not None else float("inf"))
    assert 'value="0.30000000000000004"' in html


def moved(*places: tuple[int, int], layers: int = 3, known: bool = True, **fields: Any) -> Comparison:
    """A comparison of two scans of one text, of whose heads those at (layer, head) differ beyond the floor."""
    sites = [readings.site(f"layers.{layer}.attn") for layer in range(layers)]
    after = [
        replace(one, heads=tuple(replace(h, max_logit=99.0) if (at, h.head) in places else h for h in one.heads))
        for at, one in enumerate(sites)
    ]
    found = compare(readings.reading(*sites), readings.reading(*after))
    floors = {"max_logit": 0.5} if known else {}
    heads = tuple(replace(head, floors=floors) for head in found.heads)
    return replace(found, **{"heads": heads, "texts": "same", **fields})


def test_the_first_head_that_differs_is_named_and_later_ones_may_follow_from_it():
    follows = " may follow from it; mean "
    said = say(summary(moved((1, 2), (2, 0), (2, 3)), "max_logit"))
    assert (
        f"3 of 12 heads differ beyond rounding; the first is head 2 of layer 1, and 2 in later layers{follows}" in said
    )
    said = say(summary(moved((0, 1), (0, 2), (2, 3)), "max_logit"))
    assert f"; the first are 2 heads of layer 0, and 1 in a later layer{follows}" in said
    chinese = say(summary(moved((1, 2), (2, 0)), "max_logit"), "zh")
    assert "；最先的是第 1 层第 2 头，后面各层的 1 个可能由此而来；" in chinese


def test_a_page_with_heads_beyond_rounding_says_how_to_find_the_cause():
    advice = "call attemper.explain(a, b)"
    assert advice in shown_text(comparison_page(moved((1, 2))))
    for given in (moved(), moved((1, 2), texts="other", tokens=(1, 2))):
        assert advice not in shown_text(comparison_page(given))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (moved((1, 2)), "Look at this"),
        (moved(), "Fine"),
        (moved((1, 2), known=False), "Worth knowing"),
        (moved(only_after=("layers.3.attn",)), "Worth knowing"),
    ],
)
def test_the_verdict_has_the_level_of_what_the_summary_counts(change: Comparison, said: str):
    assert f"Verdict: {said}" in shown_text(comparison_page(change))


def test_a_figure_names_the_head_that_changed_most_and_percents_are_called_so():
    html = comparison_page(moved((1, 2)))
    assert "most at layers.1.attn, head 2: 7.5 → 99" in shown_text(html)
    low, right, above = re.findall(r"<text [^>]*>(.*?)</text>", html)[:3]
    assert re.fullmatch(r"[\d.]+%", low)
    assert re.fullmatch(r"[\d.]+% before", right)
    assert re.fullmatch(r"[\d.]+% after", above)


def test_what_others_follow_from_is_said_only_as_far_as_the_numbers_go():
    """Not of one layer alone, of heads that all differ from the first layer on, of other texts, nor of two stacks."""
    everything = [(layer, head) for layer in range(3) for head in range(4)]
    alone, others = moved((1, 2), (1, 3)), moved((1, 2), (2, 0))
    two = compare(readings.encoder_decoder(), changed(readings.encoder_decoder(), 0, max_logit=1e3))
    for given in (alone, moved(*everything), replace(others, texts="other"), two):
        assert "may follow" not in say(summary(given, "max_logit"))


def test_of_very_many_heads_those_that_changed_most_are_listed_and_the_rest_counted():
    many = readings.reading(*(readings.site(f"layers.{place}.attn", 64) for place in range(20)))
    html = comparison_page(compare(many, changed(many, 5, normalized_entropy=0.0)))
    assert html.count("<tr><td") == MOST_ROWS
    assert f"The {MOST_ROWS:,} heads that changed most of 1,280" in shown_text(html)


def test_sites_of_one_side_only_are_listed():
    one = readings.reading(readings.site("layers.0.attn"), readings.site("layers.1.attn"))
    html = comparison_page(compare(one, replace(one, sites=one.sites[:1])))
    assert re.search(r"Only before</h2>.*layers\.1\.attn", html, re.DOTALL)
    assert "Only after" not in shown_text(html)


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.quick("390")
def test_a_click_on_a_statistic_sorts_by_its_change_and_nothing_is_wider_than_the_window(open_page: Open, width: int):
    page = open_page(sharpened(), width=width)
    first = "() => document.querySelector('#heads tbody tr').cells[2].textContent"
    assert page.evaluate(first) == "2"
    page.get_by_role("button", name="First-token weight").click()
    assert page.evaluate(first) == "3"
    assert page.locator("th[aria-sort=descending]").count() == 1
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("button", name="theme").click()
    assert page.locator("svg circle").count() == 16
