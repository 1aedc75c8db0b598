"""The page of all heads on one text: small maps with their roles, and a large one with lines between its tokens."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attemper.readings.reading import Skipped
from attemper.report.page import LARGEST_BYTES
from attemper.results.pattern import Pattern, Patterns
from tests.report.conftest import Open, shown_text
from tests.report.test_page import data_of

WORDS = ("one", "two", "<b>three</b>", "four")


def heads(*shape: int, layers: int = 2, many: int = 3, words: tuple[str, ...] = (), **options: Any) -> Patterns:
    """So many heads of each layer, head 1 a previous-token head."""
    rows, columns = shape or (4, 4)
    found = []
    for layer in range(layers):
        for head in range(many):
            weights = torch.randn(rows, columns).softmax(-1)
            if head == 1 and rows == columns:
                weights = torch.eye(rows).roll(1, 0)
            names = [(words or tuple(f"t{at}" for at in range(size)))[:size] for size in (rows, columns)]
            role = "previous token" if head == 1 else None
            found.append(Pattern(weights, names[0], f"layers.{layer}.attn", head, names[1], role=role))
    return Patterns(found, name="mine <i>", **options)


def page(patterns: Patterns, folder: Path) -> str:
    return patterns.to_html(folder / "heads.html").read_text("utf-8")


def levels_of(site: dict[str, Any]) -> np.ndarray:
    shape = len(site["heads"]), len(site["tokens"]), len(site["keys"] or site["tokens"])
    return np.frombuffer(zlib.decompress(base64.b64decode(site["packed"])), np.uint8).reshape(shape)


def test_the_page_holds_each_weight_to_its_stated_precision_and_runs_nothing_of_others(tmp_path: Path) -> None:
    found = heads(4, 4, words=WORDS, skipped=(Skipped("lost", "it adds keys of its own"),))
    html = page(found, tmp_path)
    text = shown_text(html)
    assert "mine <i>" in text
    assert "<i>" not in html.partition("<body>")[2].partition("<script")[0]
    assert "6 heads" in text
    assert "previous token 2" in text
    assert "4 heads have no clear role" in text
    assert "rounded here, by at most 0.004" in text
    assert "it adds keys of its own" in text
    assert "It holds the tokens of the text" in text
    data = data_of(html)
    (stack,) = data["stacks"]
    assert [site["label"] for site in stack["sites"]] == ["0", "1"]
    assert stack["sites"][0]["heads"] == [[0, None], [1, "previous_token"], [2, None]]
    for site, own in zip(stack["sites"], (found[:3], found[3:]), strict=True):
        kept = (levels_of(site) / data["steps"]) ** 2
        exact = torch.stack([one.weights for one in own]).numpy()
        assert np.abs(kept - exact).max() <= 0.004


def test_a_weight_that_is_no_number_stays_none(tmp_path: Path) -> None:
    found = heads()
    found[0].weights[1, 2] = torch.nan
    (stack,) = data_of(page(found, tmp_path))["stacks"]
    assert levels_of(stack["sites"][0])[0, 1, 2] == 255


@pytest.mark.slow("takes seconds")
@pytest.mark.quick("True")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.turns(2)
def test_32_times_32_heads_of_64_tokens_fit_into_two_megabytes(tmp_path: Path, causal: bool) -> None:
    words = tuple(f"token{at}" for at in range(64))
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1) if causal else torch.zeros(64, 64, dtype=torch.bool)
    found = []
    for layer in range(32):
        weights = torch.randn(32, 64, 64).masked_fill(hidden, -torch.inf).softmax(-1)
        found += [Pattern(one, words, f"layers.{layer}.attn", head, words) for head, one in enumerate(weights)]
    html = page(Patterns(found, name="large"), tmp_path)
    assert len(html.encode()) <= LARGEST_BYTES
    data = data_of(html)
    assert len(data["stacks"][0]["sites"][0]["tokens"]) == 64
    assert f"by at most {0.016 if data['steps'] == 63 else 0.032 if data['steps'] == 31 else 0.066}" in shown_text(html)


def test_a_long_text_shows_its_first_tokens_and_says_so(tmp_path: Path) -> None:
    html = page(heads(200, 150, layers=1), tmp_path)
    (site,) = data_of(html)["stacks"][0]["sites"]
    assert levels_of(site).shape == (3, 128, 128)
    assert "The text is longer, 200 × 150 (queries × keys): the page has room for the first 128" in shown_text(html)


def test_cross_attention_and_other_stacks_stand_apart(tmp_path: Path) -> None:
    cross = Pattern(torch.rand(2, 5), ("a", "b"), "decoder.0.cross", 0, tuple("vwxyz"), kind="cross", padding=(0, 3))
    data = data_of(page(Patterns([*heads(layers=1), cross], name="both"), tmp_path))
    assert [(stack["name"], stack["kind"]) for stack in data["stacks"]] == [
        ("layers.*.attn", "self"), ("decoder.*.cross", "cross"),
    ]  # fmt: skip
    (site,) = data["stacks"][1]["sites"]
    assert (site["tokens"], site["keys"], site["padding"]) == (["a", "b"], list("vwxyz"), [0, 3])


@pytest.mark.parametrize("shape", [(0, 0), (3, 0)])
def test_heads_without_weights_have_a_page(tmp_path: Path, shape: tuple[int, int]) -> None:
    assert "6 heads" in shown_text(page(heads(*shape), tmp_path))
    assert "0 heads" in shown_text(page(heads()[:0], tmp_path))


def test_maps_on_a_phone_are_as_large_as_a_finger_and_roles_are_whole(open_page: Open, tmp_path: Path) -> None:
    shown = open_page(page(heads(12, 12, many=12), tmp_path), width=390)
    shown.wait_for_selector(".site-row.painted")
    sizes = shown.evaluate("[...document.querySelectorAll('.small-map')].map((one) => one.clientWidth)")
    assert len(sizes) == 24
    assert min(sizes) >= 80
    assert shown.evaluate("[...document.querySelectorAll('.role')].every((one) => one.scrollWidth <= one.clientWidth)")
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390


LINES = """
() => {
  const canvas = document.querySelector("#large-lines");
  return copy(canvas).getImageData(0, 0, canvas.width, canvas.height).data.reduce((a, b) => a + b, 0);
}
"""


@pytest.mark.quick("1440-en")
@pytest.mark.parametrize(("width", "locale"), [(1440, "en"), (390, "zh-CN")])
def test_the_grid_opens_each_head_large_by_keyboard_alone(
    open_page: Open, tmp_path: Path, width: int, locale: str
) -> None:
    from playwright.sync_api import expect

    shown = open_page(page(heads(words=WORDS), tmp_path), width=width, locale=locale)
    shown.wait_for_selector(".site-row.painted")
    assert shown.locator(".small-map").count() == 6
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    second = shown.locator(".small-map").nth(1)
    spoken = "layer 0, head 1 previous token" if locale == "en" else "第 0 层第 1 头 前一个 token"
    assert second.text_content() == spoken
    shown.locator(".small-map").first.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowUp", "Enter"):
        shown.keyboard.press(key)
    shown.wait_for_selector("#large-queries .token")
    title = shown.text_content("#large-title") or ""
    assert title == second.text_content()
    every = shown.evaluate(LINES)
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("ArrowDown")
    said = shown.text_content("#large-said") or ""
    assert "two" in said
    assert "one" in said
    assert shown.text_content("#live") == said
    assert 0 < shown.evaluate(LINES) < every, "one line of four"
    shown.locator("#large-keys .token").nth(2).hover()
    assert "four" in (shown.text_content("#large-said") or "")
    shown.keyboard.press("ArrowRight")
    assert "2" in (shown.text_content("#large-title") or "")
    assert shown.evaluate(
        "document.querySelector('#large').scrollWidth <= document.querySelector('#large').clientWidth"
    )
    shown.keyboard.press("Escape")
    assert not shown.locator("#large").is_visible()
    # The browser says a little later that it has closed.
    expect(shown.locator(".small-map").nth(2)).to_be_focused()
    shown.click('[data-role="previous_token"]')
    assert [one.is_visible() for one in shown.locator(".small-map").all()] == [False, True, False] * 2
    shown.click("#language")
    shown.click("#theme")
    other = "Weight on the token before" if locale != "en" else "落在 query 前一个"
    assert other in (shown.text_content("#role-meaning") or "")


def test_one_head_is_large_at_once(open_page: Open, tmp_path: Path) -> None:
    place = heads(words=WORDS)[1].to_html(tmp_path / "one.html")
    shown = open_page(place.read_text("utf-8"), width=390)
    shown.wait_for_selector("#large-queries .token")
    assert shown.text_content("#large-title") == "layer 0, head 1 previous token"
    assert shown.locator(".small-map").count() == 0
    height = shown.evaluate("document.querySelector('#large-lines').getBoundingClientRect().height")
    shown.locator("#large-queries .token").nth(2).hover()
    assert "gives 1 of its weight to key 1 “two”" in (shown.text_content("#large-said") or "")
    assert shown.evaluate("document.querySelector('#large-lines').getBoundingClientRect().height") == height
    assert "Left and right" not in shown.inner_text("#large")


def test_weights_of_a_short_type_and_with_a_gradient_are_drawn(tmp_path: Path) -> None:
    weights = torch.rand(3, 3, dtype=torch.bfloat16).requires_grad_()
    one = Pattern(weights, tuple("abc"), "x", 0, tuple("abc"))
    assert len(data_of(page(Patterns([one]), tmp_path))["stacks"]) == 1
    assert "<td" in one._repr_html_()
