"""The page of several runs: every run once, what they lack, bounded, and usable in a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attemper
from attemper import InputError
from attemper.readings.sample import Sample
from attemper.report.headline import LEVELS, Verdict
from attemper.report.page import LARGEST_BYTES
from attemper.report.run_page import run_page
from attemper.report.runs import MOST_RUNS, runs_page, sentence_of, warnings_said
from attemper.report.texts import message, say
from attemper.results.run import Run, open_run
from tests.report.conftest import Open, shown_text
from tests.support.runs import collapsing, written
from tests.support.samples import sites


def run(folder: Path, taken: Iterable[Sample], **options: Any) -> Run:
    written(folder, taken, **options)
    return open_run(folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    """A run whose second layer collapses, one that does not, and one that is shorter."""
    folder = tmp_path_factory.mktemp("three")
    taken = {"a": collapsing(300), "b": collapsing(300, falls=1000), "c <b>": collapsing(120)}
    with ExitStack() as opened:
        yield [opened.enter_context(run(folder / name, samples)) for name, samples in taken.items()]


@pytest.fixture(scope="module")
def page_of_three(three: list[Run]) -> str:
    return runs_page(three)


def data_of(html: str) -> tuple[dict[str, Any], list[Any]]:
    """The data of a page, and the courses in it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    data = json.loads(found[1])
    return data, json.loads(zlib.decompress(base64.b64decode(data["packed"])))


def test_each_run_has_its_courses_and_its_warnings(three: list[Run], page_of_three: str):
    data, courses = data_of(page_of_three)
    assert [one["letter"] for one in data["runs"]] == ["A", "B", "C"]
    assert [one["name"] for one in data["runs"]] == ["a", "b", "c <b>"]
    assert [bool(one["warnings"]) for one in data["runs"]] == [True, True, True]
    place = [site[0] for site in data["sites"]].index("layers.1.attn")
    steps, mean, heads = courses[0]["normalized_entropy"][place]
    history = three[0].history("normalized_entropy", site="layers.1.attn").values
    assert (steps[0], len(mean), len(heads)) == (0, len(steps), 3)
    assert mean[-1] == pytest.approx(float(np.mean(history[-len(history) // len(steps) :])), rel=0.05)
    _, largest, _ = courses[0]["max_logit"][place]
    logits = three[0].history("max_logit", site="layers.1.attn").values
    assert max(largest) == pytest.approx(float(np.nanmax(logits)), rel=1e-3), "of a largest number the largest head's"
    assert [one["over"] for one in data["statistics"] if one["key"] in ("normalized_entropy", "max_logit")] == [
        "mean", "largest",
    ]  # fmt: skip
    assert data["runs"][0]["tokens"][0][-1] == 299
    assert "layer_fallen" in {alarm.kind for alarm in three[0].alarms()}
    began = json.dumps(data["runs"][0]["began"])
    assert "runs.began" in began
    assert "layers.1.attn" in began


def test_the_table_is_there_without_scripts_and_names_are_escaped(three: list[Run], page_of_three: str):
    html = page_of_three
    told = shown_text(html)
    assert "3 runs in one picture" in told
    assert "c <b>" in told
    assert "c &lt;b&gt;" in html
    assert "0 to 299" in told
    assert "Without a loss: A, B, C. watch.step(loss=loss) keeps it." in told


def test_the_sentence_says_which_runs_are_ill_and_the_table_what_its_numbers_are(three: list[Run], page_of_three: str):
    told = shown_text(page_of_three)
    said, _, table = told.partition("attemper report RUN writes the page of one run, which says what to do.")
    assert "Look at this A (a) and C (c <b>) have warnings and B (b) has no warning now." in said
    assert "A: 1 layer has collapsed (since step" in said
    assert "Normalised entropy mean over heads of log n" in table
    assert "Largest logit largest of all heads" in table
    assert "%" not in told, "one unit for one number"
    last = three[0].reading.heads
    assert f"{sum(head.normalized_entropy or 0.0 for head in last) / len(last):.3g}" in table
    assert "drawn with Apache ECharts" in told
    assert "on both sides" not in told


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        (("fine", "fine"), "in A (a) and B (b) nothing looks wrong."),
        (("fine", "empty", "critical"), "C (c) is broken, B (b) measured nothing, and in A (a) nothing looks wrong."),
        (("untrained", "unjudged"), "A (a) looks untrained and B (b) sees too few keys to judge."),
    ],
)
def test_every_level_of_a_verdict_has_its_part_of_the_sentence(levels: tuple[str, ...], said: str):
    found = [{"letter": letter, "name": letter.lower()} for letter in "ABC"[: len(levels)]]
    given = sentence_of([Verdict(level, message("as_is", said="x")) for level in levels], found)
    assert say(given["said"]).lower() == said.lower()
    assert given["level"] == min(levels, key=LEVELS.index)
    assert say(given["said"], "zh")


def test_a_run_that_never_had_a_warning_has_none_and_not_none_now():
    found = [{"letter": "A", "name": "a", "warnings": 2}, {"letter": "B", "name": "b", "warnings": 0}]
    given = sentence_of([Verdict("notice", message("as_is", said="x"))] * 2, found)
    assert say(given["said"]) == "A (a) has no warning now and B (b) has no warning."
    assert say(given["said"], "zh") == "A（a）目前没有警告，B（b）没有警告。"
    assert sentence_of([Verdict("notice", message("as_is", said="x"))], found[1:])["level"] == "notice"


def test_the_table_counts_the_warnings_that_the_page_of_each_run_counts(three: list[Run], page_of_three: str):
    for one, facts in zip(three, data_of(page_of_three)[0]["runs"], strict=True):
        counts = re.findall(r"(\d+) earlier warnings? ha", shown_text(run_page(one))) or ["0"]
        assert facts["ended"] == int(counts[0])
        stand = sum(alarm.severity == "warning" for alarm in one.alarms() if alarm.ended is None)
        assert facts["warnings"] - facts["ended"] == stand


def test_warnings_that_have_ended_are_counted_apart():
    assert say(warnings_said(13, 8, 180)) == "5 now, 8 ended, first at step 180"
    assert [say(warnings_said(2, ended, 9)) for ended in (0, 2)] == ["2, first at step 9"] * 2


def test_the_same_run_twice_is_shown_once_and_one_without_a_sample_is_left_out(three: list[Run], tmp_path: Path):
    empty = run(tmp_path / "empty", [])
    told = shown_text(runs_page([*three, three[0], empty]))
    assert "a was named twice and is shown once" in told
    assert "empty has no sample yet and is left out" in told
    assert "3 runs in one picture" in told
    with pytest.raises(InputError, match="needs two different ones with a sample: a was named twice and is shown once"):
        three[0].to_html(tmp_path / "page.html", beside=[three[0]])
    with pytest.raises(InputError, match=f"a page has room for {MOST_RUNS} runs, got 9"):
        three[0].to_html(tmp_path / "page.html", beside=[three[1]] * 8)


def test_runs_of_other_models_and_other_statistics_are_told(three: list[Run], tmp_path: Path):
    labels = tuple(replace(label, name=f"other.{place}") for place, label in enumerate(sites(2, 3)))

    def others() -> Iterable[Sample]:
        for one in collapsing(40):
            kept = [place for place, name in enumerate(one.quantities) if name != "max_logit"]
            names = tuple(one.quantities[place] for place in kept)
            yield Sample(one.step, one.time, labels, names, one.values[kept])

    other = run(tmp_path / "other", others())
    html = runs_page([three[0], other])
    data, courses = data_of(html)
    assert data["runs"][1]["lacking"] == ["max_logit"]
    assert "max_logit" not in courses[1]
    assert "No site is in all of these runs: only the mean over all sites can be compared." in shown_text(html)


def test_a_loss_of_every_step_and_what_is_still_being_written_are_shown(tmp_path: Path, three: list[Run]):
    import torch

    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 8, 16)
    with attemper.watch(layer, every=2, store=attemper.Store(tmp_path / "live", tags=["mine"])) as watch:
        for step in range(12):
            layer(x, x, x)
            watch.step(loss=float(step))
        assert len(watch.run.steps) > 1  # waits for the writer
        with open_run(tmp_path / "live") as live:
            html = runs_page([live, three[0]])
    told = shown_text(html)
    assert "still being written" in told
    assert "mine" in told
    assert "The runs are of different models (" in told
    data, _ = data_of(html)
    assert data["runs"][0]["loss"]["mean"][:3] == [0, 1, 2]


@pytest.mark.slow("eight runs of many heads")
def test_eight_runs_of_many_heads_stay_in_bounds(tmp_path: Path):
    labels = tuple(replace(label, heads=32) for label in sites(12, 32))
    names = ("normalized_entropy", "max_logit", "effective_tokens", "first_token_mass", "rows", "judged_rows")

    def taken(seed: int) -> Iterable[Sample]:
        rng = np.random.default_rng(seed)
        for step in range(60):
            values = np.concatenate([rng.random((4, 12 * 32)), np.full((2, 12 * 32), 64.0)])
            yield Sample(step, 1000.0 + step, labels, names, values.astype(np.float32), 64)

    runs = [run(tmp_path / str(seed), taken(seed)) for seed in range(8)]
    html = runs_page(runs)
    assert len(html.encode()) <= LARGEST_BYTES
    data, courses = data_of(html)
    assert len(courses) == 8
    assert len(courses[0]["max_logit"]) == 12
    assert not data["single"]  # noise does not deflate: heads have no room here


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.quick("390")
def test_runs_are_hidden_by_a_key_and_charts_follow_what_is_chosen(open_page: Open, page_of_three: str, width: int):
    page = open_page(page_of_three, width=width)
    page.wait_for_selector("html[data-ready]")
    label = "() => document.getElementById('course').getAttribute('aria-label')"
    assert "Normalised entropy, of log n: all sites, mean over heads. Run A: " in page.evaluate(label)
    assert page.locator("#loss-box").is_hidden()
    first = page.locator("button.run").first
    first.focus()
    page.keyboard.press("Enter")
    assert first.get_attribute("aria-pressed") == "false"
    assert "Run A: " not in page.evaluate(label)
    assert "Run B: " in page.evaluate(label)
    assert page.locator("#head").is_disabled()
    page.select_option("#site", "1")
    page.select_option("#head", "2")
    page.select_option("#statistic", "1")
    page.select_option("#axis", "tokens")
    assert re.match(r".*: layers\.1\.attn( \(train\))?, head 2\. Run B: ", page.evaluate(label))
    assert "Tokens are estimated" in page.locator("#tokens-said").inner_text()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    page.locator("#language").click()
    assert "训练记录" in page.locator("#runs-title").inner_text()


def test_on_a_phone_a_run_is_a_card_and_nothing_is_cut(open_page: Open, page_of_three: str):
    shown = open_page(page_of_three, width=390)
    for box in ("document.documentElement", "document.querySelector('.wide')"):
        assert shown.evaluate(f"{box}.scrollWidth <= {box}.clientWidth")
    told = " ".join(shown.inner_text("#runs tbody tr:first-child").split())
    assert "Normalised entropy (mean over heads)0.304 of log n" in told
    assert "Largest logit (largest of all heads)12.08" in told
    assert "steps0 to 299" in told
    assert not shown.locator("#runs thead").is_visible()
