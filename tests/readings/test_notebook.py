"""Scans and comparisons in a notebook: tables without scripts, escaped, readable on light and dark ground."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import attemper
from attemper.readings.roles import ROLES
from attemper.report.notebook import MOST_LINES
from attemper.results.scan import Scan
from tests.monitor.test_heat_map import Parsed
from tests.report import readings
from tests.support.contrast import contrast

TAGS = {"div", "span", "b", "br", "table", "thead", "tbody", "tr", "th", "td"}


def scan_of(reading: readings.Reading) -> Scan:
    return Scan(reading, {})


def test_a_scan_shows_every_head_its_alarms_and_what_was_skipped() -> None:
    parsed = Parsed(scan_of(readings.encoder_decoder())._repr_html_())
    assert "13 sites, 104 heads, 256 tokens, blocked" in parsed.text
    assert [parsed.text.count(text) for text in ("NaN", "EncDecAttention: cross attention, eval")] == [1, 1]
    assert "logits" in parsed.text
    assert "logits 143.2" in parsed.text
    assert "skipped pooler.attention: it takes a keyword this version does not know" in parsed.text
    sampled = replace(readings.encoder_decoder(), sampled_rows=64)
    assert "64 rows of each sequence (max logit is a lower bound)" in scan_of(sampled)._repr_html_()
    coloured = [cell for tag, cell in parsed.tags if tag == "td" and "background:rgb" in (cell["style"] or "")]
    assert len(coloured) == 104 - 8 - 1, "of the silent layer and of the broken head there is no number"


def test_a_comparison_shows_what_changed_first_and_the_sites_of_one_side() -> None:
    before = readings.reading(readings.site("layers.0.attn"), readings.site("old.1"))
    after = readings.reading(readings.site("layers.0.attn", value=0.25), readings.site("new.1"), model="after")
    parsed = Parsed(attemper.compare(before, after)._repr_html_())
    assert "some-model → after 4 heads" in parsed.text
    assert parsed.text.index("87.5 → 25, -62.5") < parsed.text.index("62.5 → 25, -37.5")
    assert "normalised entropy, % of log n, change (floor)" in parsed.text
    assert "how far rounding moves heads is not known" in parsed.text, "the sentence of the page"
    assert "only before: old.1" in parsed.text
    assert "only after: new.1" in parsed.text


def test_a_comparison_has_its_floors_and_what_is_beyond_them_is_bold() -> None:
    before = readings.reading(readings.site("layers.0.attn"))
    found = attemper.compare(before, readings.reading(readings.site("layers.0.attn", value=0.25)))
    heads = tuple(
        replace(head, floors={"normalized_entropy": 0.5 if head.head == 3 else 0.007}) for head in found.heads
    )
    parsed = Parsed(replace(found, heads=heads)._repr_html_())
    assert "87.5 → 25, -62.5 (50)" in parsed.text
    assert "(0.7)" in parsed.text
    bold = [cell for tag, cell in parsed.tags if tag == "td" and "font-weight:700" in (cell["style"] or "")]
    assert len(bold) == sum(bool(head.is_beyond("normalized_entropy")) for head in heads) >= 3


def test_a_scan_names_the_heads_of_each_role() -> None:
    site = readings.site("layers.0.attn")
    scores = {role.name: 0.9 if role.name == "previous token" else 0.1 for role in ROLES}
    heads = tuple(replace(head, roles=scores) if head.head < 2 else head for head in site.heads)
    parsed = Parsed(scan_of(readings.reading(replace(site, heads=heads)))._repr_html_())
    assert "previous token, 2 heads (layer.head score): 0.0 0.90, 0.1 0.90" in parsed.text
    assert "layer.head score" not in Parsed(scan_of(readings.minilm())._repr_html_()).text


def test_long_tables_end_and_say_so() -> None:
    sites = tuple(readings.site(f"layers.{layer}.attn", 2) for layer in range(MOST_LINES + 5))
    html = scan_of(readings.reading(*sites))._repr_html_()
    assert "and 5 more layers" in html
    comparison = attemper.compare(readings.reading(*sites), readings.reading(*sites))
    assert f"and {2 * (MOST_LINES + 5) - MOST_LINES} heads that changed less" in comparison._repr_html_()


def test_hostile_names_are_text_and_never_markup() -> None:
    reading = readings.hostile()
    for html in (scan_of(reading)._repr_html_(), attemper.compare(reading, reading)._repr_html_()):
        parsed = Parsed(html)
        assert {tag for tag, _ in parsed.tags} <= TAGS
        assert {name for _, attributes in parsed.tags for name in attributes} <= {"style", "scope"}
        assert "<script>alert(1)</script>" in parsed.text
        assert not set(parsed.text) & set("\u202e\x00\x1b\u2028\ud800")
        assert "x" * 500 not in parsed.text


@pytest.mark.parametrize("sites", [(), (readings.silent("layer.0"),)])
def test_an_empty_scan_has_a_table_too(sites: tuple) -> None:
    assert "some-model" in scan_of(readings.reading(*sites))._repr_html_()


def test_no_colour_but_those_of_cells_is_fixed_so_that_both_themes_can_be_read() -> None:
    reading = readings.reading(readings.site("layers.0.attn", 33))
    for html in (scan_of(reading)._repr_html_(), attemper.compare(reading, reading)._repr_html_()):
        for style in re.findall(r'style="([^"]*)"', html):
            ground, ink = (re.search(rf"(?:^|;){name}:([^;]*)", style) for name in ("background", "color"))
            given = None if ground is None or ground.group(1) == "transparent" else ground.group(1)
            if given is None:
                assert ink is None or ink.group(1) == "inherit"
                continue
            assert ink is not None
            red, green, blue = map(int, re.findall(r"\d+", given))
            assert contrast((red, green, blue), (255, 255, 255) if ink.group(1) == "#fff" else (0, 0, 0)) >= 4.5
