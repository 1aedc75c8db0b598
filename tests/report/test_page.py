"""The page as a file: what is in it, what is not, and how big it is."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from attemper.cli.heads import heads_csv
from attemper.readings.reading import Reading
from attemper.report.document import as_csv, file_name, towers
from attemper.report.page import ECHARTS, ECHARTS_SHA256, scan_page
from tests.report import readings
from tests.report.conftest import shown_text
from tests.support.command import run_command
from tests.support.contrast import contrast, of_hex

PAGE = import_module("attemper.report.page")
"""The package has a function of this name."""


def data_of(html: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found.group(1))


def test_the_vendored_library_is_the_file_that_its_authors_published() -> None:
    assert hashlib.sha256(ECHARTS.read_bytes()).hexdigest() == ECHARTS_SHA256
    for licence in ("LICENSE", "NOTICE", "LICENSE-d3"):
        assert (ECHARTS.parent / licence).stat().st_size > 100
    assert "</script" not in ECHARTS.read_text(encoding="utf-8").lower()
    assert "<!--" not in ECHARTS.read_text(encoding="utf-8")


@pytest.mark.slow("takes many seconds")
def test_a_page_is_smaller_than_2_mb() -> None:
    assert len(scan_page(readings.huge()).encode("utf-8")) <= 2_000_000


def test_a_number_that_json_has_no_word_for_is_refused() -> None:
    site = readings.site("layer.0")
    for value in (float("nan"), float("inf")):
        sick = replace(site, heads=(replace(site.heads[0], max_weight=value), *site.heads[1:]))
        with pytest.raises(ValueError, match="not JSON compliant"):
            scan_page(readings.reading(sick))


def test_every_head_is_in_the_data() -> None:
    reading = readings.minilm()
    data = data_of(scan_page(reading))
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
    assert data_of(scan_page(readings.reading(measured)))["quantities"][-1]["key"] == "gini"


def test_layers_of_a_kind_are_one_map_even_where_they_alternate() -> None:
    found = [
        (tower.letter, tower.pattern, tower.stack.kind, tower.stack.mode, len(tower.stack.sites))
        for tower in towers(readings.encoder_decoder().sites)
    ]
    assert found == [
        ("A", "encoder.block.*.SelfAttention", "self", "eval", 4),
        ("B", "decoder.block.*.layer.*.SelfAttention", "self", "eval", 4),
        ("C", "decoder.block.*.layer.*.EncDecAttention", "cross", "eval", 4),
        ("D", "encoder.block.*.SelfAttention", "self", "train", 1),
    ]


def test_a_map_is_labelled_by_layers_and_by_all_numbers_where_sites_share_one() -> None:
    t5 = [readings.site(f"decoder.block.{block}.layer.{part}.attention", 2) for block in range(2) for part in range(2)]
    (tower,) = towers(tuple(t5))
    assert tower.labels == dict(enumerate(("0.0", "0.1", "1.0", "1.1")))
    (tower,) = towers(tuple(t5[::2]))
    assert tower.labels == {0: "0", 1: "1"}
    data = data_of(scan_page(readings.reading(*t5[::2], readings.site("pooler"))))
    assert [(one["label"], one["layer"]) for one in data["sites"]] == [("0", 0), ("1", 1), ("–", None)]


def test_layers_with_other_numbers_of_heads_are_another_map() -> None:
    sites = (readings.site("layers.0.attn", 3), readings.site("layers.1.attn", 6), readings.site("layers.2.attn", 6))
    assert [(tower.stack.heads, tower.stack.places) for tower in towers(sites)] == [(3, (0,)), (6, (1, 2))]


def test_an_alarm_of_a_name_seen_in_two_modes_is_given_to_the_head_it_fits() -> None:
    sites = (readings.site("a.0", value=0.4), readings.site("a.0", mode="train", value=0.01))
    alarm = readings.alarm("collapsed", "notice", "a.0", 2, 0.012)
    assert data_of(scan_page(readings.reading(*sites, alarms=(alarm,))))["alarms"][0]["site"] == 1


def test_advice_stands_once_and_what_was_skipped_has_its_reason() -> None:
    html = scan_page(readings.encoder_decoder())
    assert html.count("What to do: logits.") == 1
    assert "it takes a keyword this version does not know" in html


def test_a_page_of_sampled_rows_says_that_its_largest_logit_is_a_bound() -> None:
    whole = readings.minilm()
    for reading, sampled in ((whole, False), (replace(whole, sampled_rows=128), True)):
        own = shown_text(scan_page(reading))
        assert ("Largest logit, at least 77.25" in own) == sampled
        assert own.count("Largest logit, at least") == (3 if sampled else 0), "figure, colours, table"
        assert ("a sample: 128 rows of each sequence" in own) == sampled
        assert ("the largest logit is at least 77.25" in own) == sampled
        assert ("the largest logit is a lower bound" in own) == sampled
        assert ("the largest logit is the largest over all rows" in own) != sampled


def test_a_page_that_would_be_too_large_leaves_out_the_json_then_the_details_then_the_csv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for _ in range(4):
        html = scan_page(readings.minilm())
        files = tuple(kind for kind in ("csv", "json") if f'data-kind="{kind}"' in html)
        found.append((len(data_of(html)["sites"][0]["heads"][0]) == 7, files))
        own = shown_text(html)
        assert ("Histograms and curves of this many heads would not fit in a page" in own) == (not found[-1][0])
        assert ("The JSON of this many heads would not fit" in own) == (files == ("csv",))
        assert ("CSV and JSON of this many heads would not fit" in own) == (files == ())
        monkeypatch.setattr(PAGE, "LARGEST_BYTES", len(html.encode("utf-8")) - 1)
    assert found == [(True, ("csv", "json")), (True, ("csv",)), (False, ("csv",)), (False, ())]


def test_a_page_that_cannot_be_written_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ended = run_command(monkeypatch, capsys, "scan", "no/such/model", "--html", tmp_path / "missing" / "page.html")
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err.startswith("attemper: the page cannot be written to ")


def file_of(html: str, kind: str) -> str:
    found = re.search(rf'<script type="text/plain" id="file-{kind}">([A-Za-z0-9+/=]*)</script>', html)
    assert found
    return gzip.decompress(base64.b64decode(found.group(1))).decode("utf-8")


@pytest.mark.parametrize("name", ["minilm", "encoder_decoder", "hostile"])
def test_the_files_in_a_page_hold_every_number_exactly(name: str) -> None:
    reading: Reading = getattr(readings, name)()
    html = scan_page(reading)
    assert Reading.from_json(file_of(html, "json")) == reading
    lines = list(csv.DictReader(io.StringIO(file_of(html, "csv"), newline="")))
    assert len(lines) == len(reading.heads)
    for line, head in zip(lines, reading.heads, strict=True):
        assert int(line["head"]) == head.head
        for field in ("entropy_nats", "max_logit", "gini"):
            value = getattr(head, field)
            assert line[field] == ("" if value is None else str(value))
    assert set(lines[0]) >= {"site", "layer", "kind", "mode", "judged", "rows"}
    assert "by_visible_keys" not in lines[0]


def test_what_a_spreadsheet_would_calculate_is_text() -> None:
    sites = tuple(readings.site(f"{first}1+1", 1) for first in "=+-@x")
    reading = readings.reading(*sites)
    for text in (as_csv(reading), heads_csv(reading, None)):
        found = [line["site"] for line in csv.DictReader(io.StringIO(text))]
        assert found == ["'=1+1", "'+1+1", "'-1+1", "'@1+1", "x1+1"]


def test_a_file_has_a_plain_name() -> None:
    models = ("org/model 7b", "../../etc/passwd", "模型")
    assert [*map(file_name, models)] == ["attemper-org-model-7b", "attemper-etc-passwd", "attemper"]


def test_a_page_says_what_was_read_when_and_with_what() -> None:
    reading = replace(
        readings.minilm(), text="poems <b>.txt", date="2026-01-31T09:30:00Z", dtype="bfloat16", revision="0a" * 20,
        versions={"attemper": "9.9", "torch": "2.13.0"},
    )  # fmt: skip
    found = re.search(r'<p class="facts" id="origin">(.*?)</p>', scan_page(reading), re.DOTALL)
    assert found
    text = " ".join(re.sub(r"<[^>]*>", " ", found.group(1)).split())
    assert text == (
        "text poems &lt;b&gt;.txt read on 2026-01-31 09:30:00 UTC weights bfloat16 revision 0a0a0a0a0a0a "
        "with attemper 9.9, torch 2.13.0"
    )
    assert 'id="origin"' not in scan_page(readings.minilm()), "older readings do not tell"


def test_a_page_says_which_heads_were_not_judged_instead_of_no_alarms() -> None:
    short = replace(readings.head(0), judged=False)
    html = scan_page(readings.reading(replace(readings.site("layer.0", 1), heads=(short,)), fewest_keys=64))
    own = shown_text(html)
    assert "No alarms" not in own
    assert "nothing needs attention" not in own
    assert "Too few keys to judge (64 needed): the only head; give longer inputs or lower fewest_keys." in html
    assert "No alarms." in scan_page(readings.reading(readings.site("layer.0", 1)))


@pytest.mark.parametrize(
    ("marks", "grounds", "least"),
    [
        (("ink", "muted", "accent", "critical", "warning", "notice", "fine"), ("ground", "surface"), 4.5),
        (("mark", "accent"), ("ground", "surface"), 3.0),
        (("hatch",), ("hatch-ground",), 3.0),
        (("critical",), ("broken-ground",), 3.0),
    ],
)
def test_colours_of_text_and_of_marks_stand_out_in_both_themes(
    marks: tuple[str, ...], grounds: tuple[str, ...], least: float
) -> None:
    style = re.search(r"<style>(.*?)</style>", scan_page(readings.reading()), re.DOTALL)
    assert style
    themes = re.findall(r":root[^{]*\{([^}]*)\}", style.group(1))
    assert len(themes) == 3
    for theme in themes:
        colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", theme))
        for mark in marks:
            for ground in grounds:
                assert contrast(of_hex(colours[mark]), of_hex(colours[ground])) >= least, (mark, ground)
    assert themes[1].split() == themes[2].split(), "dark by the button is dark by the system"
