"""The page of an explanation: what is said, every stage of every site, escaped, in both languages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import attemper
from attemper.fingerprints.explain import ORDER
from attemper.fingerprints.explanation import HARMLESS, TRANSFORMS
from attemper.fingerprints.levels import STAGES, levels
from attemper.report import explanation
from attemper.report.explanation import explanation_page, write_explanation
from attemper.report.texts import say, texts
from tests.report.conftest import Open
from tests.support.engine_faults import FAULTS
from tests.support.engine_models import tiny, tokens

Pair = tuple[attemper.types.Fingerprint, attemper.types.Fingerprint]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """A clean run, and one whose second window is off by one."""
    model = tiny("mistral")
    a = attemper.fingerprint(model.model, [tokens()], name="right <b>")
    fault = next(one for one in FAULTS if one.kind == "window")
    with fault.patch(model, [1], -1.0):
        yield a, attemper.fingerprint(model.model, [tokens()], name="engine")


def page(pair: Pair) -> str:
    return explanation_page(*pair, attemper.explain(*pair))


def test_the_first_stage_of_the_first_site_is_framed(pair: Pair):
    html = page(pair)
    (framed,) = re.findall(r'<td class="beyond first">.*?</td>', html)
    assert re.search(r"rows: \d+ of 32", framed)
    rows = re.findall(r"<tr><td>(\d+)</td>.*?</tr>", html, re.DOTALL)
    assert rows == ["1", "2", "3", "4"]
    assert "window at layers.1.self_attn" in html
    assert '<data value="23.0" title="23.0">23</data>' in html


def test_what_comes_before_the_fault_is_within_rounding_and_what_it_makes_is_beyond(pair: Pair):
    first, second, *_ = levels(*pair)
    assert all(first.times[stage] == 0 for stage in STAGES)
    assert first.rows_apart == 0
    assert (second.times["q and k"], second.rows_apart > 0) == (0, True)
    assert (second.times["head output"] or 0) > 1


def test_two_same_runs_are_no_fault(pair: Pair):
    html = page((pair[0], pair[0]))
    assert '<section class="verdict fine"' in html
    assert "every number of both fingerprints is the same" in html
    assert not re.search(r'<td class="\w* first">', html)


def test_names_are_escaped_and_long_models_are_cut(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(explanation, "MOST_SITES", 2)
    a, b = pair
    hostile = "<script>alert(1)</script>"
    sites = tuple(replace(a.sites[0], name=f"{hostile}{number}") for number in range(3))
    one, other = (replace(part, sites=sites, skipped={hostile: hostile}) for part in (a, b))
    html = page((one, other))
    assert hostile not in html
    assert "right <b>" not in html
    assert "The first 2 of 3 are listed." in html


def test_the_page_speaks_chinese_and_is_no_wider_than_the_window(pair: Pair, open_page: Open):
    opened = open_page(page(pair), width=420)
    opened.click("#language")
    assert "有故障" in opened.inner_text(".verdict h2")
    assert "b 的窗口有 23 个 key" in opened.inner_text(".kind")
    assert opened.inner_text(".figures").count("1 个注意力模块（共 4 个）") == 1
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_every_kind_and_stage_has_words():
    said = {key.rpartition(".")[2] for key in texts("en") if key.startswith("explained.said.")}
    llama = tiny("llama")
    sizes = {fault.kind for fault in FAULTS for size in fault.sizes if fault.value(llama, size) is not None}
    assert said == {*sizes, "causality", "rounding", "rounded"}
    kinds = {*HARMLESS, *TRANSFORMS, *(fault.kind for fault in FAULTS), "scores", "output"}
    assert {f"explained.kind.{kind}" for kind in kinds} == {key for key in texts("en") if "explained.kind." in key}
    assert {f"explained.stage.{stage}" for stage in ORDER} == {key for key in texts("en") if "explained.stage." in key}


def test_it_is_written_where_it_should_be(pair: Pair, tmp_path: Path):
    path = write_explanation(*pair, attemper.explain(*pair), tmp_path / "page.html")
    assert path.read_text("utf-8") == page(pair)


def test_one_site_is_in_the_singular():
    said = [
        say(explanation._extent(extent)) for extent in ("1 of 1 site", "2 of 4 sites", "1 of 1 site, heads 0, 3 of 4")
    ]
    assert said == ["1 of 1 site", "2 of 4 sites", "1 of 1 site, heads 0, 3 of 4"]
