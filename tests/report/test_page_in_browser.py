"""The page as a person meets it, in Chromium."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attemper.readings.reading import Reading
from attemper.report.document import as_csv
from tests.report import readings
from tests.report.conftest import Open
from tests.support.contrast import contrast, of_hex

if TYPE_CHECKING:
    from playwright.sync_api import Page

MAP = ".map .cells"
DRAWN = """
(selector) => {
  const canvas = document.querySelector(selector);
  const { data } = window.copy(canvas).getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3]) colours.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
  }
  return colours.size;
}
"""
COLOUR = """
({ map, row, column }) => {
  const area = document.querySelectorAll(".map .cells")[map];
  const canvas = area.querySelector("canvas");
  const stack = JSON.parse(document.getElementById("data").textContent).stacks[map];
  const scale = canvas.width / canvas.clientWidth;
  const wide = canvas.clientWidth / stack.heads, tall = (canvas.clientHeight - 22) / stack.sites.length;
  const at = [(column + 0.12) * wide, 22 + (row + 0.85) * tall].map((place) => Math.round(place * scale));
  return [...window.copy(canvas).getImageData(...at, 1, 1).data].slice(0, 3);
}
"""


def colour(page: Page, row: int, column: int, stack: int = 0) -> list[int]:
    """What the map shows near the lower left corner of a cell."""
    return page.evaluate(COLOUR, {"map": stack, "row": row, "column": column})


def colours(page: Page, canvas: str) -> int:
    return page.evaluate(DRAWN, f"{canvas} canvas")


def click_head(page: Page, row: int, column: int, stack: int = 0) -> None:
    area = page.locator(MAP).nth(stack)
    area.scroll_into_view_if_needed()
    size = area.evaluate(
        "(area) => [area.querySelector('canvas').clientWidth, area.querySelector('canvas').clientHeight]"
    )
    shape = page.evaluate(
        "(stack) => { const s = JSON.parse(document.getElementById('data').textContent).stacks[stack];"
        " return [s.heads, s.sites.length]; }",
        stack,
    )
    wide, tall = size[0] / shape[0], (size[1] - 22) / shape[1]
    area.click(position={"x": (column + 0.5) * wide, "y": 22 + (row + 0.5) * tall})


def numbers(page: Page) -> dict[str, str]:
    """Title to value of every number in the panel, units left out."""
    return dict(
        page.locator("#values div").evaluate_all(
            "(pairs) => pairs.map((pair) => [pair.querySelector('dt').textContent,"
            " pair.querySelector('dd').firstChild.textContent])"
        )
    )


def test_the_map_the_charts_and_the_numbers_are_those_of_the_reading(open_page: Open) -> None:
    reading = readings.minilm()
    page = open_page(reading)
    assert colours(page, ".map") > 60
    assert all(colours(page, f"#{chart}") > 5 for chart in ("strip", "histogram", "curve"))
    red, green, blue = colour(page, 0, 2)
    assert blue > red > green, "the sharpest head is violet"
    red, green, blue = colour(page, 0, 11)
    assert red > 200 > blue, "a diffuse head is yellow"
    click_head(page, 3, 8)
    head = reading.sites[3].heads[8]
    assert page.text_content("#panel-title") == "Layer 3, head 8"
    assert reading.sites[3].name in (page.text_content("#panel-site") or "")
    found = numbers(page)
    assert head.normalized_entropy is not None
    assert float(found["Normalised entropy"]) == pytest.approx(head.normalized_entropy, rel=1e-3)
    assert head.max_logit is not None
    assert float(found["Largest logit"]) == pytest.approx(head.max_logit, rel=1e-3)
    assert (page.text_content("#rows") or "").startswith("Rows measured: 961;")
    entropies = [one.normalized_entropy or 0 for site in reading.sites for one in site.heads]
    place = 1 + sum(entropy < head.normalized_entropy for entropy in entropies)
    assert (page.text_content("#rank") or "").startswith(f"{place}th sharpest of 72")
    assert "Layer 3, head 8".lower() in (page.text_content("#live") or "").lower()
    assert "; visible keys 512: " in (page.get_attribute("#curve", "aria-label") or "")
    assert page.locator("#role, #scores, #panel-role").count() == 0, "no roles were read"


def test_the_keyboard_alone_reaches_every_head(open_page: Open) -> None:
    page = open_page(readings.minilm())
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('cells')"):
            break
    assert page.locator(".cursor").is_visible(), "focus can be seen"
    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        page.keyboard.press(key)
    assert (page.text_content("#live") or "").startswith("layer 2, head 2: normalised entropy 0.7")
    assert page.text_content("#panel-title") == "Layer 0, head 2", "moving does not choose"
    page.keyboard.press("Enter")
    assert page.text_content("#panel-title") == "Layer 2, head 2"
    page.keyboard.press("End")
    for _ in range(9):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    assert page.text_content("#panel-title") == "Layer 5, head 11"


@pytest.mark.slow("a browser for seconds")
def test_another_statistic_redraws_the_map_its_legend_and_the_rank_and_the_table_sorts(open_page: Open) -> None:
    page = open_page(readings.minilm())
    before = colour(page, 0, 2)
    page.select_option("#quantity", label="Largest logit")
    assert colour(page, 0, 2) != before
    assert page.text_content("#scale-name") == "Largest logit"
    assert page.text_content("#rank") == "The largest of 72 by largest logit."
    page.select_option("#quantity", label="Effective tokens")
    assert page.text_content("#scale-name") == "Effective tokens, logarithmic"
    page.click("#all summary")
    page.locator("#all-table tbody tr").first.wait_for()
    assert page.locator("#all-table tbody tr").count() == 72
    page.click("#all-table .sort >> text=Normalised entropy")
    assert page.text_content("#all-table tbody tr:first-child td:nth-child(2)") == "2"
    page.click("#all-table tbody tr:first-child .place")
    assert page.text_content("#panel-title") == "Layer 0, head 2"


@pytest.mark.slow("takes many seconds")
def test_every_statistic_can_be_drawn_stretched_or_not(open_page: Open) -> None:
    page = open_page(readings.encoder_decoder())
    for place in range(page.locator("#quantity option").count()):
        page.select_option("#quantity", index=place)
        page.check("#stretch")
        stretched = [page.text_content("#ticks span:first-child"), page.text_content("#ticks span:last-child")]
        page.uncheck("#stretch")
        assert all(stretched)


@pytest.mark.slow("a browser for seconds")
def test_the_theme_follows_the_system_until_the_button_is_pressed(open_page: Open) -> None:
    page = open_page(readings.minilm(), color_scheme="dark")

    def is_dark(expected: bool) -> None:
        # The page's policy forbids the eval with which wait_for_function polls.
        page.locator(f"html[data-theme={'dark' if expected else 'light'}]").wait_for(state="attached")
        red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
        assert (int(red) < 60) is expected

    is_dark(True)
    page.emulate_media(color_scheme="light")
    is_dark(False)
    page.click("#theme")
    is_dark(True)
    for system in ("dark", "light"):
        page.emulate_media(color_scheme=system)
        page.wait_for_timeout(100)
        is_dark(True)  # what was chosen stays
    assert page.evaluate("localStorage.length + document.cookie.length") == 0


@pytest.mark.slow("takes many seconds")
def test_a_map_too_wide_for_a_phone_scrolls_inside_its_box_and_stays_big_enough_to_hit(open_page: Open) -> None:
    page = open_page(readings.huge(layers=4), width=390, has_touch=True, is_mobile=True)
    canvas, box = page.locator(".map canvas").bounding_box(), page.locator(".scroll").bounding_box()
    assert canvas is not None
    assert box is not None
    assert canvas["width"] / 64 >= 24
    assert box["width"] < 390
    page.locator(MAP).focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    assert page.text_content("#panel-title") == "Layer 0, head 63"


def test_the_worst_alarm_is_open_each_leads_to_its_head_and_one_without_numbers_is_hatched(open_page: Open) -> None:
    page = open_page(readings.encoder_decoder())
    assert page.text_content("#panel-title") == "Layer C0, head 3"
    assert "critical" in (page.text_content("#panel-alarms") or "")
    page.click("#alarms .place >> text=A0 · 2")
    assert page.text_content("#panel-title") == "Layer A0, head 2"
    assert page.evaluate("document.activeElement.id") == "panel-title"
    assert "logits 120" in (page.text_content("#panel-alarms") or "")
    click_head(page, 2, 0)
    assert set(numbers(page).values()) == {"–"}
    assert "has no place" in (page.text_content("#rank") or "")
    red, green, blue = colour(page, 2, 0)
    assert max(red, green, blue) - min(red, green, blue) < 40, "grey, not a colour of the scale"
    red, green, _ = colour(page, 0, 3, stack=2)
    assert red > green + 15, "reddish: NaN or infinite scores"


@pytest.mark.slow("a browser for seconds")
def test_charts_have_labels_and_gaps_and_the_strip_leads_to_other_heads(open_page: Open) -> None:
    heads = readings.site("layer.0", 2).heads
    gap = replace(heads[0].by_visible_keys[0], first=256, last=511, entropy_nats=None, normalized_entropy=None)
    odd = replace(heads[0], by_visible_keys=(*heads[0].by_visible_keys, gap), normalized_entropy_histogram=(0,) * 32)
    page = open_page(readings.reading(replace(readings.site("layer.0", 2), heads=(odd, heads[1]))))
    assert page.get_attribute("#histogram", "aria-label") == "no row"
    assert "visible keys 256: –" in (page.get_attribute("#curve", "aria-label") or "")
    label = "echarts.getInstanceByDom(document.querySelector('#curve')).getOption().series[0].label"
    assert page.evaluate(f"{label}.formatter({{ dataIndex: 0 }})") == "0.25", "what the axis shows"
    box = page.locator("#strip").bounding_box()
    assert box is not None
    # Two heads, at 0.25 and at 0.75; the chart's margins are 10 and 14.
    page.mouse.click(box["x"] + 10 + 0.75 * (box["width"] - 24), box["y"] + 6 + (78 - 30) / 2)
    assert page.text_content("#panel-title") == "Layer 0, head 1"


@pytest.mark.slow("takes many seconds")
def test_a_page_of_very_many_heads_leaves_out_details_and_the_end_of_its_table_and_says_so(open_page: Open) -> None:
    page = open_page(readings.huge())
    page.click("#all summary")
    page.locator("#all-table tbody tr").first.wait_for()
    assert page.locator("#all-table tbody tr").count() == 1000
    assert (page.text_content("#all-more") or "").startswith("The first 1,000 of 6,400 in this order")
    click_head(page, 99, 63)
    assert page.text_content("#panel-title") == "Layer 99, head 63"
    assert page.locator("#histogram").count() == 0
    assert "would not fit" in (page.text_content("#panel") or "")


def test_without_scripts_there_is_a_table(open_page: Open) -> None:
    page = open_page(readings.minilm(), java_script_enabled=False)
    assert page.locator("noscript tbody tr").count() == 72
    assert page.locator("#heads").is_hidden()
    assert "No warning in 72 heads" in (page.text_content("#verdict") or "")
    assert page.locator(".save").first.is_hidden()


@pytest.mark.parametrize("sites", [(), (readings.silent("layer.0"),)])
@pytest.mark.quick("sites0")
def test_an_empty_reading_gives_a_page_that_says_so(open_page: Open, sites: tuple) -> None:
    page = open_page(readings.reading(*sites))
    assert page.text_content("#verdict-title") == "Verdict: Nothing measured"
    assert page.locator(".map canvas").count() == len(sites)


INK = """
([host, x, y]) => {
  const canvas = document.querySelector(`${host} canvas`);
  const scale = canvas.width / canvas.clientWidth;
  const at = [x, canvas.clientHeight + y].map((place) => Math.round(place * scale));
  return [...window.copy(canvas).getImageData(...at, 1, 1).data].slice(0, 3);
}
"""
GROUND = """
(selector) => {
  const [r, g, b] = getComputedStyle(document.querySelector(selector)).backgroundColor.match(/[0-9]+/g).map(Number);
  return [r, g, b];
}
"""
MARKS = """
() => {
  const options = (box) => echarts.getInstanceByDom(document.querySelector(box)).getOption();
  const [strip, histogram, curve, map] = ["#strip", "#histogram", "#curve", ".map .drawing"].map(options);
  return {
    "#panel": [
      strip.series[0].itemStyle.borderColor, strip.xAxis[0].axisLine.lineStyle.color,
      histogram.series[0].itemStyle.color, histogram.xAxis[1].axisLine.lineStyle.color,
      curve.series[0].lineStyle.color, curve.series[0].itemStyle.color, curve.xAxis[0].axisLine.lineStyle.color,
    ],
    "body": [map.series[0].itemStyle.borderColor],
  };
}
"""


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize(("theme", "value"), [("dark", 0.02), ("light", 0.98)])
@pytest.mark.quick("dark")
def test_every_mark_and_the_bars_of_sharp_and_of_diffuse_rows_stand_out_from_their_ground(
    open_page: Open, theme: str, value: float
) -> None:
    page = open_page(readings.reading(readings.site("layer.0", 2, value=value)), color_scheme=theme)
    for box, marks in page.evaluate(MARKS).items():
        ground = page.evaluate(GROUND, box)
        for mark in marks:
            assert contrast(of_hex(mark), ground) >= 3, (box, mark)
    wide = page.evaluate("document.querySelector('#histogram canvas').clientWidth")
    middle = 44 + (int(value * 32) + 0.5) / 32 * (wide - 58)  # of the bar; the chart's margins are 44 and 14
    bar = page.evaluate(INK, ["#histogram", middle, -24 - 20])
    assert contrast(bar, page.evaluate(GROUND, "#panel")) >= 3


@pytest.mark.slow("a browser for a second")
def test_on_a_phone_the_numbers_are_in_the_cells_and_the_alarms_before_the_panel(open_page: Open) -> None:
    page = open_page(readings.minilm(), width=390, has_touch=True, is_mobile=True)
    texts = page.evaluate(
        "echarts.getInstanceByDom(document.querySelector('.map .drawing')).getOption()"
        ".series[0].data.map((cell) => cell.label && cell.label.formatter)"
    )
    assert len(texts) == 72
    assert texts[:3] == [".92", ".94", ".04"]
    tops = [page.evaluate(f"document.querySelector('{at}').offsetTop") for at in ("#heads", "#alarms", "#panel")]
    assert tops == sorted(tops)
    assert page.locator(".figures .value small").first.is_visible(), "units"


@pytest.mark.slow("a browser for seconds")
def test_the_numbers_can_be_saved_offline_under_the_policy_of_the_page(open_page: Open, tmp_path: Path) -> None:
    reading = replace(readings.minilm(), model="org/a model")
    page = open_page(reading, offline=True)
    saved = dict[str, str]()
    for kind in ("csv", "json"):
        with page.expect_download() as waiting:
            page.get_by_role("button", name=kind.upper(), exact=True).click()
        assert waiting.value.suggested_filename == f"attemper-org-a-model.{kind}"
        waiting.value.save_as(tmp_path / kind)
        saved[kind] = (tmp_path / kind).read_text(encoding="utf-8")
    assert Reading.from_json(saved["json"]) == reading
    assert saved["csv"] == as_csv(reading)


def with_roles() -> Reading:
    """Two layers of two heads: three with a role, two of which are alike."""
    scores = (
        {"previous token": 0.9, "separator": None},
        {"induction": 0.8},
        {"previous token": 0.6},
        {"own token": 0.1},
    )
    sites = []
    for layer in range(2):
        heads = tuple(readings.head(at, 0.5, layer=layer, roles=scores[2 * layer + at]) for at in range(2))
        sites.append(replace(readings.site(f"h.{layer}.attn", 2), heads=heads))
    return readings.reading(*sites)


@pytest.mark.slow("a browser for seconds")
def test_heads_are_found_by_their_role_in_map_panel_and_table(open_page: Open) -> None:
    page = open_page(with_roles())
    assert page.locator("#role option").all_text_contents() == [
        *("all heads", "previous token (2)", "induction (1)", "no role (1)")
    ]
    inked = colours(page, ".map")
    page.locator("#all summary").click()
    page.locator("#all-table tbody tr").first.wait_for()
    assert page.locator("#all-table tbody tr").count() == 4
    page.select_option("#role", "0")
    assert page.locator("#all-table tbody tr").count() == 2
    assert "previous-token head" in (page.text_content("#all-table") or "")
    assert (page.text_content("#live") or "") == "previous token (2)"
    assert colours(page, ".map") != inked
    click_head(page, 0, 0)
    assert page.text_content("#panel-role") == "Previous-token head"
    assert "previous token0.9" in (page.text_content("#scores") or "")
    assert "not known" in (page.text_content("#scores") or "")
    page.select_option("#quantity", label="Score: previous token")
    assert (page.text_content("#rank") or "").startswith("The highest of 2 by score: previous token")
    page.locator("#language").click()
    assert page.text_content("#panel-role") == "前一个 token 头"
    assert page.locator("#role option").nth(1).text_content() == "前一个 token（2）"
