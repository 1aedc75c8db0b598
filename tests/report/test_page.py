"""The page as a file: what is in it, what is not, and how big it is."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from attemper import report
from attemper._text import shown
from attemper.records import Reading
from attemper.report import build, vendored
from attemper.report.display import script_json
from attemper.report.document import stacks
from tests.report import readings


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_the_vendored_library_is_the_file_that_its_authors_published() -> None:
    assert hashlib.sha256(vendored.FILE.read_bytes()).hexdigest() == vendored.SHA256
    for licence in ("LICENSE", "NOTICE", "LICENSE-d3"):
        assert (vendored.FILE.parent / licence).stat().st_size > 100
    assert "</script" not in vendored.echarts().lower()
    assert "<!--" not in vendored.echarts()


@pytest.mark.parametrize("name", ["minilm", "encoder_decoder", "hostile", "huge"])
def test_a_page_is_smaller_than_2_mb(name: str) -> None:
    assert len(report.page(getattr(readings, name)()).encode("utf-8")) <= 2_000_000


def test_the_same_reading_gives_the_same_bytes() -> None:
    assert report.page(readings.minilm()) == report.page(readings.minilm())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_json_has_no_word_for_is_refused(value: float) -> None:
    site = readings.site("layer.0")
    sick = replace(site, heads=(replace(site.heads[0], max_weight=value), *site.heads[1:]))
    with pytest.raises(ValueError, match="not JSON compliant"):
        report.page(readings.reading(sick))


def test_data_in_a_script_cannot_end_it() -> None:
    text = script_json({"a": "</script><!--\u2028\u2029&\ud800"})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"a": "</script><!--\u2028\u2029&\ud800"}


def test_what_cannot_be_seen_is_written_out() -> None:
    assert shown("a\x00\u202eb\ud800\n") == "a\\u0000\\u202eb\\ud800\\u000a"
    assert shown("שלום <b>") == "שלום <b>"


def test_hostile_names_are_escaped_in_the_markup() -> None:
    html = report.page(readings.hostile())
    own = html.replace(vendored.echarts(), "")
    assert "<script>alert" not in own
    assert "<svg" not in own
    assert "<img" not in own
    assert own.count("<script") == 3
    assert "{{ 7 * 7 }}" in own
    assert {site["name"] for site in data_of(html)["sites"]} == {
        shown(f"layer.{place}.{name}") for place, name in enumerate(readings.HOSTILE)
    }


def test_the_policy_allows_these_scripts_and_this_style_and_nothing_else() -> None:
    html = report.page(readings.minilm())
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert found
    policy = found.group(1).replace("&#39;", "'")
    inline = [
        *re.findall(r"<style>(.*?)</style>", html, re.DOTALL),
        *re.findall(r"<script>(.*?)</script>", html, re.DOTALL),
    ]
    assert len(inline) == 3
    for text in inline:
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    own = html.replace(vendored.echarts(), "")
    assert " style=" not in own
    assert not re.search(r'\b(src|href)="(?!#|data:,)', own)


def test_every_head_is_in_the_data() -> None:
    reading = readings.minilm()
    data = data_of(report.page(reading))
    names = [quantity["key"] for quantity in data["quantities"]]
    assert "gini" not in names, "nobody measured it"
    for site, shown_site in zip(reading.sites, data["sites"], strict=True):
        for head, (number, rows, _, _, values, histogram, curve) in zip(site.heads, shown_site["heads"], strict=True):
            assert (number, rows) == (head.head, head.rows)
            for name, value in zip(names, values, strict=True):
                assert value == pytest.approx(getattr(head, name), rel=1e-4)
            assert sum(histogram[1:]) == sum(head.normalized_entropy_histogram)
            assert head.normalized_entropy_histogram[histogram[0]] == histogram[1]
            assert len(curve) == 5 * len(head.by_visible_keys)


def test_the_gini_coefficient_is_shown_where_it_was_measured() -> None:
    site = readings.site("layer.0")
    measured = replace(site, heads=(replace(site.heads[0], gini=0.25), *site.heads[1:]))
    assert data_of(report.page(readings.reading(measured)))["quantities"][-1]["key"] == "gini"


def test_layers_of_a_kind_are_one_map_even_where_they_alternate() -> None:
    found = [
        (stack.letter, stack.pattern, stack.kind, stack.mode, len(stack.sites))
        for stack in stacks(readings.encoder_decoder().sites)
    ]
    assert found == [
        ("A", "encoder.block.*.SelfAttention", "self", "eval", 4),
        ("B", "decoder.block.*.layer.*.SelfAttention", "self", "eval", 4),
        ("C", "decoder.block.*.layer.*.EncDecAttention", "cross", "eval", 4),
        ("D", "encoder.block.*.SelfAttention", "self", "train", 1),
    ]


def test_a_map_is_labelled_by_layers_and_by_all_numbers_where_sites_share_one() -> None:
    t5 = [readings.site(f"decoder.block.{block}.layer.{part}.attention", 2) for block in range(2) for part in range(2)]
    towers = stacks(tuple(t5))
    assert [tower.labels for tower in towers] == [("0.0", "0.1", "1.0", "1.1")]
    towers = stacks(tuple(t5[::2]))
    assert [tower.labels for tower in towers] == [("0", "1")]
    data = data_of(report.page(readings.reading(*t5[::2], readings.site("pooler"))))
    assert [(one["label"], one["layer"]) for one in data["sites"]] == [("0", 0), ("1", 1), ("–", None)]


def test_layers_with_other_numbers_of_heads_are_another_map() -> None:
    sites = (readings.site("layers.0.attn", 3), readings.site("layers.1.attn", 6), readings.site("layers.2.attn", 6))
    assert [(stack.heads, stack.sites) for stack in stacks(sites)] == [(3, (0,)), (6, (1, 2))]


def test_an_alarm_of_a_name_seen_in_two_modes_is_given_to_the_head_it_fits() -> None:
    sites = (readings.site("a.0", value=0.4), readings.site("a.0", mode="train", value=0.01))
    alarm = readings.alarm("collapsed", "notice", "a.0", 2, 0.012)
    assert data_of(report.page(readings.reading(*sites, alarms=(alarm,))))["alarms"][0]["site"] == 1


def test_advice_stands_once_and_what_was_skipped_has_its_reason() -> None:
    html = report.page(readings.encoder_decoder())
    assert html.count("What to do: logits.") == 1
    assert "it takes a keyword this version does not know" in html


def test_a_page_of_sampled_rows_says_that_its_largest_logit_is_a_bound() -> None:
    whole = readings.minilm()
    for reading, sampled in ((whole, False), (replace(whole, sampled_rows=128), True)):
        own = report.page(reading).replace(vendored.echarts(), "")
        titles = {quantity["key"]: quantity["title"] for quantity in data_of(own)["quantities"]}
        assert titles["max_logit"] == ("Largest logit, at least" if sampled else "Largest logit")
        assert ('<span class="name">Largest logit, at least</span>' in own) == sampled
        assert ("<b>128</b> rows of each sequence" in own) == sampled
        assert ("the largest logit is at least 77.25" in own) == sampled
        assert ("the largest logit is a lower bound" in own) == sampled
        assert ("the largest logit is the largest over all rows" in own) != sampled


def test_a_page_that_would_be_too_large_leaves_out_the_details(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = len(report.page(readings.minilm()).encode("utf-8"))
    monkeypatch.setattr(build, "LARGEST_BYTES", whole - 1)
    html = report.page(readings.minilm())
    assert len(data_of(html)["sites"][0]["heads"][0]) == 5
    assert "would not fit in a page" in html


@pytest.mark.parametrize(
    "reading",
    [readings.reading(), readings.reading(readings.silent("layer.0")), readings.reading(readings.site("x", 0))],
)
def test_an_empty_reading_is_a_page(reading: Reading) -> None:
    html = report.page(reading)
    assert html.startswith('<!doctype html>\n<html lang="en">')
    assert "Nothing measured" in html


def test_a_page_says_which_heads_were_not_judged_instead_of_no_alarms() -> None:
    short = replace(readings.head(0), judged=False)
    html = report.page(readings.reading(replace(readings.site("layer.0", 1), heads=(short,)), fewest_keys=64))
    assert "No alarms" not in html
    assert "nothing needs attention" not in html
    assert "Too few keys to judge (64 needed): the only head; give longer inputs or lower fewest_keys." in html
    assert "No alarms." in report.page(readings.reading(readings.site("layer.0", 1)))


def test_a_page_needs_no_torch() -> None:
    code = "import sys, attemper.report; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_all_colours_of_text_have_a_contrast_of_4_5_in_both_themes() -> None:
    style = re.search(r"<style>(.*?)</style>", report.page(readings.reading()), re.DOTALL)
    assert style
    themes = re.findall(r":root[^{]*\{([^}]*)\}", style.group(1))
    assert len(themes) == 3
    for theme in themes:
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", theme))
        for text in ("ink", "muted", "accent", "critical", "warning", "notice", "fine"):
            for ground in ("ground", "surface"):
                light, dark = sorted((_luminance(colours[text]), _luminance(colours[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)
    assert themes[1].split() == themes[2].split(), "dark by the button is dark by the system"
