"""The page of a run as a person meets it, in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attemper
from attemper.results.run import Run
from attemper.store.fragment import Fragment
from tests.report.conftest import Open
from tests.report.test_page_in_browser import colour, colours, numbers
from tests.support.runs import collapsing, written

if TYPE_CHECKING:
    from playwright.sync_api import Page

BOX = "#multiples-box"


@pytest.fixture
def run(collapsed: Callable[[str, int], Run]) -> Run:
    return collapsed("run", 250)


def ready(page: Page) -> Page:
    """Once the history is unpacked."""
    page.locator("html[data-ready]").wait_for(state="attached")
    return page


def slide(page: Page, column: int) -> None:
    page.locator("#moment").evaluate(
        "(slider, at) => { slider.value = at; slider.dispatchEvent(new Event('input')); }", column
    )


def marked(page: Page) -> list[list[int]]:
    """[column, row] of the heads with an alarm on the map."""
    return page.evaluate("echarts.getInstanceByDom(document.querySelector('.map .drawing')).getOption().series[1].data")


def test_the_slider_moves_the_map_the_numbers_and_the_alarms(open_page: Open, run: Run) -> None:
    page = ready(open_page(run))
    assert page.text_content("#step") == "step 100, the first warning", "it opens there"
    assert page.text_content("#panel-title") == "Layer 0, head 0", "and on its head"
    assert page.locator("#loss-box").is_hidden(), "there is no loss"
    slide(page, 249)
    assert page.text_content("#step") == "step 249, the last sample"
    fallen = colour(page, 1, 1)
    assert len(marked(page)) == 3
    slide(page, 120)
    assert page.text_content("#step") == "step 120"
    assert colour(page, 1, 1) != fallen
    assert marked(page) == [[0, 0]], "the logits of head 0 of layer 0 were large then, and nothing else"
    assert page.text_content("#numbers-at") == "Numbers at step 120"
    assert (page.text_content("#rank") or "").startswith("At step 120: "), "tiles are of the last step"
    assert float(numbers(page)["Normalised entropy"]) == pytest.approx(0.6, abs=0.05)
    slide(page, 235)
    page.click("#play")
    assert page.text_content("#play") == "Pause"
    page.locator("#step", has_text="the last sample").wait_for()
    assert page.text_content("#play") == "Play"
    page.emulate_media(reduced_motion="reduce")
    slide(page, 100)
    assert page.text_content("#play") == "Next"
    page.click("#play")
    assert page.text_content("#step") == "step 125", "a tenth of the run at a press, and nothing moves by itself"


STOP = """
() => {
  const at = document.activeElement;
  const labelled = at.getAttribute("aria-labelledby");
  const style = getComputedStyle(at);
  const cursor = at.querySelector(".cursor:not([hidden])");
  const seen = at.matches(":focus-visible") && (style.outlineStyle !== "none" || cursor);
  return {
    id: at.id || at.className || at.tagName.toLowerCase(),
    name: (at.getAttribute("aria-label") || (labelled && document.getElementById(labelled).textContent)
      || at.labels?.[0]?.textContent || at.textContent || "").trim(),
    seen: Boolean(seen),
  };
}
"""


@pytest.mark.slow("a browser for seconds")
def test_the_keyboard_alone_suffices_and_every_stop_is_seen_and_named(open_page: Open, run: Run) -> None:
    page = ready(open_page(run))
    stops = []
    for _ in range(60):
        page.keyboard.press("Tab")
        stops.append(page.evaluate(STOP))
        if stops[-1]["id"] in ("body", stops[0]["id"]) and len(stops) > 1:
            break
    assert [stop for stop in stops[:-1] if not (stop["name"] and stop["seen"])] == []
    reached = {stop["id"] for stop in stops}
    assert {"skip", "language", "theme", "quantity", "stretch", "play", "moment", "cells", "multiples-box"} <= reached
    page.locator("#moment").focus()
    page.keyboard.press("Home")
    assert page.text_content("#step") == "step 0"


@pytest.mark.slow("a browser for seconds")
def test_a_click_and_the_keyboard_open_the_history_of_a_head_and_the_pointer_tells_a_value(
    open_page: Open, run: Run
) -> None:
    page = ready(open_page(run))
    slide(page, 249)
    box = page.locator(BOX)
    box.scroll_into_view_if_needed()
    box.click(position={"x": 500, "y": 20})
    assert page.text_content("#panel-title") == "Layer 0, head 2"
    assert colours(page, "#history") > 5
    box.hover(position={"x": 60, "y": 20})
    assert "layer 0, all heads" in (page.text_content("#tip") or "")
    assert "mean 0.59" in (page.text_content("#tip") or "")
    assert "from 0." in (page.get_attribute("#history", "aria-label") or "")
    box.focus()
    for key in ("Home", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert (page.text_content("#live") or "").startswith("layer 1, head 1: 0.0")
    page.keyboard.press("Enter")
    assert page.text_content("#panel-title") == "Layer 1, head 1"
    assert "since step 219" in (page.text_content("#panel-alarms") or "")
    more = page.locator("#panel-alarms details").last
    assert not more.locator("p").first.is_visible()
    more.locator("summary").click()
    assert "keys or more" in more.inner_text()


@pytest.mark.slow("a browser for seconds")
def test_language_and_theme_switch_everything(open_page: Open, run: Run) -> None:
    page = ready(open_page(run, locale="zh-CN", color_scheme="dark"))
    assert page.get_attribute("html", "lang") == "zh-Hans"
    assert (page.text_content("#verdict") or "").startswith("1 层已经坍缩（自第 219 步起）")
    assert "降低学习率" in (page.text_content("#alarms") or "")
    assert page.text_content("#panel-title") == "第 0 层第 0 头"
    assert "normalised" not in page.inner_text("main").lower()
    page.click("#language")
    assert page.get_attribute("html", "lang") == "en"
    assert "limit the logits" in (page.text_content("#alarms") or "")
    assert "层" not in page.inner_text("main")
    slide(page, 3)
    page.click("#language")
    assert page.text_content("#step") == "第 3 步"
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "light"


@pytest.mark.slow("takes many seconds")
def test_the_drawn_history_is_saved_with_its_resolution(open_page: Open, run: Run, tmp_path: Path) -> None:
    page = ready(open_page(run, offline=True))
    with page.expect_download() as waiting:
        page.get_by_role("button", name="CSV", exact=True).click()
    waiting.value.save_as(tmp_path / "saved.csv")
    lines = (tmp_path / "saved.csv").read_text("utf-8").splitlines()
    assert "rounded to 1/254 of the head's range" in lines[1]
    assert len(lines) == 3 + 6 * 250
    assert lines[2].startswith("step,site,mode,head,normalized_entropy")


@pytest.mark.slow("takes many seconds")
@pytest.mark.quick("zh-CN")
@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_a_dark_page_fits_a_phone_and_is_printed_in_the_light_theme(open_page: Open, run: Run, locale: str) -> None:
    page = ready(open_page(run, width=390, locale=locale, color_scheme="dark"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.emulate_media(media="print")
    assert page.locator("#verdict").is_visible()
    assert page.locator("#play").is_hidden()
    # The page hears of another medium a moment after it is set.
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")
    page.emulate_media(media="screen")
    page.locator("html[data-theme=dark]").wait_for(state="attached")


def test_two_runs_stand_side_by_side_the_largest_difference_first(open_page: Open, run: Run, tmp_path: Path) -> None:
    written(tmp_path / "healthy", collapsing(250, falls=10_000))
    with attemper.open(tmp_path / "healthy") as healthy:
        page = open_page(healthy.compare(run))
    first = page.locator(".pairs li").first
    assert "layers.1.attn, head" in (first.text_content() or "")
    assert (
        page.locator(".pairs").first.locator("svg path.course").count()
        == 2 * page.locator(".pairs").first.locator("li").count()
    )
    page.click("#language")
    assert "两边的历史" in (page.text_content("main") or "")


@pytest.mark.slow("a browser for seconds")
def test_the_loss_is_drawn_above_the_heads_on_their_steps_with_its_alarms(open_page: Open, tmp_path: Path) -> None:
    written(tmp_path / "run", collapsing(60))
    fragment = Fragment(tmp_path / "run" / "fragment-0.sqlite")
    fragment.keep_scalars([(step, {"loss": 9.0 if step > 400 else 2.0 + step % 3}) for step in range(900)])
    fragment.keep_scalars([(900, {"loss": float("nan")})])
    fragment.close()
    with attemper.open(tmp_path / "run") as opened:
        page = ready(open_page(opened))
    assert page.locator("#loss-box").is_visible()
    chart = "echarts.getInstanceByDom(document.querySelector('#loss')).getOption()"
    line, *band = page.evaluate(f"{chart}.series.map((one) => one.data)")
    assert (len(line), len(band)) == (226, 2)
    assert [line[0], line[-1]] == [[0, pytest.approx(2.75)], [900, None]]
    assert page.evaluate(f"{chart}.xAxis[0].max") == 900
    marks = page.evaluate(
        f"{chart}.series[0].markLine.data.filter((one) => one.lineStyle.width === 2).map((one) => one.xAxis)"
    )
    assert marks == [900, 403]
    assert "Loss over steps 0 to 896" in str(page.get_attribute("#loss", "aria-label"))
    for at, side in ((10, "left"), (30, "center"), (58, "right")):
        slide(page, at)
        assert page.evaluate(f"{chart}.series[0].markLine.data.at(-1).xAxis") == at
        label = page.evaluate(f"{chart}.series[0].markLine.data.at(-1).label")
        assert (label["formatter"], label["align"]) == (f"shown: step {at}", side), "the line says what it is"
