"""The page of an explanation: what is said, every stage of every site, escaped, in both languages."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import attemper
from attemper.fingerprints.advice import ADVICE
from attemper.fingerprints.explain import ORDER
from attemper.fingerprints.explanation import HARMLESS, TRANSFORMS, UNKNOWN
from attemper.fingerprints.levels import STAGES
from attemper.report import explanation
from attemper.report.explanation import explanation_page
from attemper.report.texts import say, texts
from tests.report.conftest import Open, shown_text
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
    return explanation_page(attemper.explain(*pair))


def test_the_first_stage_of_the_first_site_is_framed(pair: Pair):
    html = page(pair)
    (framed,) = re.findall(r'<td class="beyond first">.*?</td>', html)
    assert re.search(r"rows: \d+ of 32", framed)
    rows = re.findall(r"<tr><td>(\d+)</td>.*?</tr>", html, re.DOTALL)
    assert rows == ["1", "2", "3", "4"]
    assert "a window of 24 keys in run a, a window of 23 keys in run b" in html
    assert '<data value="23.0" title="23.0">23</data>' in html


def test_what_comes_before_the_fault_is_within_rounding_and_what_it_makes_is_beyond(pair: Pair):
    first, second, *_ = attemper.explain(*pair).runs.sites
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
    assert "核对模型配置里这一层的滑动窗口" in opened.inner_text(".finding")
    assert "a 的情况：24 个 key 的窗口；b 的情况：23 个 key 的窗口" in opened.inner_text(".finding")
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
    path = attemper.explain(*pair).to_html(tmp_path / "page.html")
    assert path.read_text("utf-8") == page(pair)


def test_a_copy_writes_the_same_page_and_is_small(pair: Pair, tmp_path: Path):
    found = attemper.explain(*pair)
    kept = pickle.dumps(found)
    assert len(kept) < 5000
    assert pickle.loads(kept) == found
    pickle.loads(kept).to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text("utf-8") == page(pair)
    assert "runs" not in found.to_dict()


def test_what_to_do_stands_in_the_message_in_json_and_on_the_page(pair: Pair):
    found = attemper.explain(*pair)
    assert found.advice == ADVICE["window"]
    assert str(found) == f"{found.message}\nWhat to do: {found.advice}"
    assert found.to_dict()["advice"] == found.advice
    assert f"What to do: {found.advice} Found: a window of 24 keys" in shown_text(page(pair))


def test_every_kind_has_advice_and_an_unknown_cause_only_where_to_look_next():
    kinds = {*HARMLESS, *UNKNOWN, *(fault.kind for fault in FAULTS), "output"}
    assert {key.partition(" ")[0] for key in ADVICE} == {*kinds, "not"}
    for key, text in ADVICE.items():
        if key.partition(" ")[0] in (*UNKNOWN, "output"):
            assert "Look next at " in text
        assert say(explanation._advice(text), "zh") != text


SAID = (
    "a window of 24 keys in run a, a window of 23 keys in run b",
    "no softcap in run a, a softcap of 50 in run b",
    "run b sees 1 key of a row at most, the first among them: a window",
    "run a hides 36 places of padding, in sequences 1, and the other run shows them",
    "a row ends at its own place in run a and 1 key ahead of its own place in run b",
    "run a rotates 32 features of a head, run b 16, of queries alone",
    (
        "in run b k_proj.weight [64, 96] is q_proj.weight [128, 96], in run b v_proj.weight [64, 96] is "
        "k_proj.weight [64, 96]"
    ),
    (
        "head 1: q.k of run b is 0.68534 times that of run a, with queries and keys 0.82785 times as long, as by "
        "the magnitude of a rotary embedding (YaRN)"
    ),
    (
        "the queries of run b are the queries of heads 1, 0, 2, 3, and the keys of run b are the keys of heads 1, "
        "0 of run a"
    ),
    (
        "queries differ by 1 of their size (correlation 0.02, 1 times as long in run b); keys differ by 1 of "
        "their size (correlation 0.02, 1 times as long in run b), by no rule that is known; q_proj.weight [8, 8], "
        "blocks 1, 3 of 4, differs by 1 of its size (correlation 0.02, all 0 in run b)"
    ),
    "q_proj.weight [8, 8], k_proj.weight [8, 8] of run b equal those of layers.2.self_attn in the other run",
    "queries and keys differ, and so does what makes scores of them: final scores agree to 1e-06 of their size",
    "this stage differs by 0.8 of what rounding may explain: too little to name a cause",
)


def test_what_was_found_is_said_in_both_languages():
    for text in SAID:
        assert say(explanation._said(text)) == text
        english = re.sub(
            r"\w+_proj.weight|layers.2.self_attn|query|key|softcap|YaRN|in run", "", say(explanation._said(text), "zh")
        )
        assert not re.search("[A-Za-z]{3}", english), english


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "bert", "gemma2"])
def test_whatever_is_found_is_said_in_chinese(name: str):
    model = tiny(name)
    right = attemper.fingerprint(model.model, [tokens()])
    for fault in (one for one in FAULTS if one.fits(model) and not one.padding):
        sites = [site for site in range(1, 4) if fault.at(model, site)][:1]
        with fault.patch(model, sites, fault.sizes[0]):
            found = attemper.explain(right, attemper.fingerprint(model.model, [tokens()]))
        said = [explanation._words(found), explanation._advice(found.advice), *map(explanation._remark, found.also)]
        assert all(re.search("[\u4e00-\u9fff]", say(one, "zh")) for one in said), found.message
        assert not any(isinstance(one.values.get("then"), str) for one in said if not isinstance(one, str)), said


def test_what_is_behind_the_last_attention_is_not_placed_at_it(pair: Pair):
    """A page that called the last attention the first site that differs would send its reader there."""
    a, _ = pair
    assert a.output is not None
    html = page((a, replace(a, output=replace(a.output, sketch=1.5 * a.output.sketch))))
    assert "What comes after the last attention differs" not in html
    assert "what comes after the last attention differs" in html
    assert "Last attention, which agrees" in html
    assert "First site that differs" not in html.partition("<script")[0]


def test_one_site_is_in_the_singular():
    said = [
        say(explanation._extent(extent))
        for extent in (
            "1 of 1 site",
            "2 of 4 sites",
            "1 of 1 site, heads 0, 3 of 4",
            "from site 2 of 4 on, heads 1 of 4",
        )
    ]
    assert said[:3] == ["1 of 1 site", "2 of 4 sites", "1 of 1 site, heads 0, 3 of 0 to 3"]
    assert said[3] == "from site 2 of 4 on, head 1 of 0 to 3", "not one head of four"
