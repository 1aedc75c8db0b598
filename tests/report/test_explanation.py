"""The page of an explanation: what is said, every stage of every site, escaped, in both languages."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper.fingerprints.advice import ADVICE
from attemper.fingerprints.explain import ORDER
from attemper.fingerprints.explanation import HARMLESS, TRANSFORMS, UNKNOWN, Remark
from attemper.fingerprints.finding import Finding
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
    rows = re.findall(r'<tr><td title="(.*?)">', html)
    assert rows == [f"layers.{number}.self_attn" for number in range(4)]
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
        "blocks 1, 3 (of 4), differs by 1 of its size (correlation 0.02, all 0 in run b)"
    ),
    "q_proj.weight [8, 8], k_proj.weight [8, 8] of run b equal those of layers.2.self_attn in the other run",
    "q_proj.weight [8, 8], block 0 (of 4), differs by 0.67 of its size (correlation 1.00, 3 times as large in run b)",
    "tried and rejected: it leaves 2% of the squared difference, and more than 2 times what rounding explains",
    "tried and rejected: it leaves 28% of the squared difference, more than 25%",
    "queries and keys differ, and so does what makes scores of them: final scores agree to 1e-06 of their size",
    "this stage differs by 0.8 of what rounding may explain: too little to name a cause",
)


def test_what_was_found_is_said_in_both_languages():
    for text in SAID:
        assert say(explanation._said(text)) == text
        english = re.sub(
            r"\w+_proj.weight|layers.2.self_attn|query|key|padding|softcap|YaRN|in run",
            "",
            say(explanation._said(text), "zh"),
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
    assert said[:3] == ["1 of 1 site", "2 of 4 sites", "1 of 1 site, heads 0, 3 (of 4)"]
    assert said[3] == "head 1 (of 4) of this site, then all later sites: 3 of 4", "not one head of four"


def of_fault(edit: Callable[[Any], object]) -> attemper.types.Explanation:
    """A clean run of Llama, and one whose third layer's attention was edited."""
    model = tiny("llama").model
    right = attemper.fingerprint(model, [tokens()])
    with torch.no_grad():
        edit(model.get_submodule("layers.2.self_attn"))
    return attemper.explain(right, attemper.fingerprint(model, [tokens()]))


def test_the_one_weight_that_differs_is_named_everywhere():
    """A page that sends its reader to every projection where its own evidence names one contradicts itself."""
    found = of_fault(lambda attention: attention.q_proj.weight.add_(0.3 * attention.q_proj.weight.flip(0)))
    assert found.kind == "weights"
    assert "The rule that changed q_proj.weight of layers.2.self_attn is not known" in found.advice
    html = explanation_page(found)
    assert "q_proj.weight of layers.2.self_attn differs, by no known rule" in html
    assert "The cause is not known" not in shown_text(html)
    assert re.search('What differs there</span><span class="value"><bdi[^>]*>q_<wbr>proj.<wbr>weight</bdi>', html)


def test_a_weight_that_looks_new_is_named_and_no_share_is_left():
    found = of_fault(lambda attention: nn.init.normal_(attention.k_proj.weight, std=0.02))
    assert found.kind == "not_loaded"
    html = explanation_page(found)
    assert "k_proj.weight of layers.2.self_attn looks newly initialised in run b" in html
    assert "Left unexplained" not in shown_text(html)
    assert "Correct the name or the mapping" in found.advice


WEIGHT = {"name": "query.weight [768, 768]", "numbers": "0", "all": "12", "size": "0.67", "like": "1.00", "factor": "3"}


def test_a_factor_is_said_only_where_it_is_all_that_is_known():
    found = replace(of_fault(lambda attention: None), extent="from site 3 of 6 on, heads 0 of 12")
    said = explanation._of_weight(WEIGHT, "layer.2", found)
    assert say(said) == "query.weight of layer.2 is 3 times as large in run b"
    for other in ({"like": "0.98"}, {"size": "0.9"}, {"numbers": "1"}):
        said = explanation._of_weight(WEIGHT | other, "layer.2", found)
        assert say(said) == "query.weight of layer.2 differs, by no known rule"


def test_only_the_first_that_counts_is_red():
    """What follows from it, or what other weights take back, is no second fault."""
    html = explanation_page(of_fault(lambda attention: attention.k_proj.weight.mul_(-1)))
    assert re.findall(r'<td class="beyond[^"]*"', html) == ['<td class="beyond first"']
    assert '<td class="after"' in html
    scale = torch.linspace(0.5, 2, 96)

    def smooth(attention: Any) -> None:
        for name in ("q_proj", "k_proj", "v_proj"):
            attention.get_submodule(name).weight.mul_(scale)

    model: Any = tiny("llama").model
    right = attemper.fingerprint(model, [tokens()])
    with torch.no_grad():
        for layer in model.layers:
            layer.input_layernorm.weight.div_(scale)
            smooth(layer.self_attn)
    found = attemper.explain(right, attemper.fingerprint(model, [tokens()]))
    assert found.kind == "equivalent"
    html = explanation_page(found)
    assert not re.findall(r'<td class="beyond', html)
    assert "Those above 1 are no fault" in html
    assert "First site that differs" not in html.partition("<script")[0]


def test_causes_that_were_rejected_are_listed_best_first_with_the_bound():
    left = Finding("scale", "q and k", 0.02, reproduced=False).left
    assert (
        left
        == "tried and rejected: it leaves 2% of the squared difference, and more than 2 times what rounding explains"
    )
    assert Finding("scale", "q and k", 0.28).left.endswith("more than 25%")
    assert Finding("scale", "q and k", 0.02).left == "it leaves 2% of the squared difference"
    remark = Remark("scale", "layer.2", "q and k", None, left)
    assert say(explanation._remark(remark)).startswith("layer.2: scores differ by a factor: tried and rejected")
    found = of_fault(partial(_longer, head=0))
    shares = [float(one.message.split("leaves ")[1].split("%")[0]) for one in found.also if "leaves" in one.message]
    assert shares == sorted(shares)


def _longer(attention: Any, head: int) -> None:
    """A head's queries, and noise on them that no factor explains."""
    rows = attention.q_proj.weight[32 * head : 32 * (head + 1)]
    rows.mul_(3).add_(0.1 * rows.flip(1))


def test_a_factor_of_some_heads_does_not_send_its_reader_to_what_is_the_same_for_all():
    def longer(attention: Any) -> None:
        attention.q_proj.weight[32:64].mul_(1.3)

    found = of_fault(longer)
    assert (found.kind, found.extent) == ("scale", "from site 3 of 4 on, heads 1 of 4")
    assert "YaRN and the scale of the call are the same for all heads" in found.advice
    assert "q_proj.weight [128, 96], block 1 (of 4), differs" in found.message
    model = tiny("llama")
    right = attemper.fingerprint(model.model, [tokens()])
    with next(one for one in FAULTS if one.variant == "one head").patch(model, [1], 1.3):
        found = attemper.explain(right, attemper.fingerprint(model.model, [tokens()]))
    assert found.message.endswith("the weights around it are the same.")
    assert "Weights of the projections agree" in found.advice


def test_names_stay_in_view_on_a_phone_and_break_at_dots(pair: Pair, open_page: Open):
    html = page(pair)
    assert "layers.<wbr>1.<wbr>self_<wbr>attn</bdi>" in html
    opened = open_page(html, width=390)
    box = "document.querySelector('#sites').parentElement"
    opened.evaluate(f"{box}.scrollLeft = 250")
    left = opened.evaluate(
        f"document.querySelector('#sites td').getBoundingClientRect().left - {box}.getBoundingClientRect().left"
    )
    assert abs(left) <= 2
