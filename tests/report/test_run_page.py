"""The page of a run as a file: what it says, what is in its history, and how big it is."""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attemper
from attemper.readings.sample import Sample
from attemper.report.page import scan_page
from attemper.report.run_page import run_page
from attemper.results.run import Run
from tests.report import readings
from tests.report.conftest import shown_text
from tests.report.test_page import data_of
from tests.support.runs import collapsing, restless, written
from tests.support.samples import sample, samples, sites


@pytest.fixture
def collapse(collapsed: Callable[[str, int], Run]) -> Run:
    return collapsed("run", 250)


def history_of(data: dict[str, Any]) -> dict[tuple[int, int, str], np.ndarray]:
    """(site, head, statistic) -> [columns], as the page's scripts read it."""
    run = data["run"]
    raw = zlib.decompress(base64.b64decode(run["packed"]))
    heads = [len(site["heads"]) for site in data["sites"]]
    place, ends, found = 0, {}, {}
    for site, many in enumerate(heads):
        for name in run["statistics"]:
            ends[site, name] = np.frombuffer(raw, "<f4", 2 * many, place).reshape(many, 2)
            place += 8 * many
    place += 4 * run["columns"] * len(run["exact"])
    for site, many in enumerate(heads):
        for name in run["statistics"]:
            rows = np.frombuffer(raw, np.uint8, (3 + many) * run["columns"], place).reshape(3 + many, -1)
            place += rows.size
            levels = np.cumsum(rows[3:], 1, dtype=np.uint8).astype(float)
            low, high = ends[site, name].astype(float).T[..., None]
            values = np.where(levels == 255, np.nan, low + (high - low) * levels / 254)
            found |= {(site, head, name): values[head] for head in range(many)}
    assert place + 3 * run["columns"] * len(run["bands"]) == len(raw)
    return found


def test_it_says_what_happened_since_when_and_what_to_do(collapse: Run) -> None:
    html = run_page(collapse)
    text = shown_text(html)
    assert "1 layer has collapsed (since step 219)" in text
    assert "First warning step 100 layer 0, head 0" in text
    ended = "2 earlier warnings have ended, the last at step 151 (large logits, growing logits)."
    assert f"{ended} Before step 100 there was no warning." in text
    assert "limit the logits: attemper.QKClip(model, threshold=" in text
    assert text.index("layer collapsed") < text.index("Every head, step by step"), "alarms come before the map"


def test_figures_and_alarms_say_what_they_are_of(collapse: Run) -> None:
    """A tile is of all rows at the last step, an alarm of fewer rows and of other steps: both stand on one page."""
    text = shown_text(run_page(collapse))
    assert text.partition("Alarms")[0].count("at step 249") == 4, "each tile but the first warning"
    assert "The figures and the map use all rows. Some alarms judge fewer rows: their cards say which." in text
    assert "means over the layer's heads, for rows that see 32 keys or more. layer 1 since step 219" in text
    assert "Some alarms judge fewer rows" not in shown_text(scan_page(readings.reading(readings.site("a"))))


def test_a_card_has_the_beginning_and_the_worst_of_an_alarm_and_the_panel_the_rest(collapse: Run) -> None:
    html = run_page(collapse)
    text, data = shown_text(html), data_of(html)
    card = text.partition("warning layer collapsed")[2].partition("Alarms that have ended")[0]
    assert re.search(r"since step 219 normalised entropy of all its heads has fallen, in the mean from 0.6 to 0", card)
    assert "(it was" not in text
    assert "latest" not in text
    (fallen,) = (one for one in data["alarms"] if one["since"] == 219)
    assert fallen["when"][0] == "alarm.since"
    assert [one[0] for one in fallen["more"][1]["said"]["names"]] == ["alarm.before", "alarm.latest"]
    assert data["bases"][fallen["of"]][0] == "alarms.of_layer"


def test_a_notice_that_has_ended_gives_no_advice(tmp_path: Path) -> None:
    written(tmp_path / "run", restless(300, 1))
    with attemper.open(tmp_path / "run") as run:
        over = run_page(run).partition('<details id="ended"')[2]
    cards = re.findall(r'<li class="alarm (\w+)">.*?</h3>\s*(?:<p class="(\w+)")?', over, re.DOTALL)
    assert {level for level, _ in cards} >= {"notice", "warning"}
    assert all((follows == "advice") == (level != "notice") for level, follows in cards)


def test_what_ended_warnings_said_to_do_is_open_and_before_the_map_if_nothing_stands(
    collapse: Run, tmp_path: Path
) -> None:
    assert '<details id="ended"><summary' in run_page(collapse), "an alarm stands: what has ended is folded"
    written(tmp_path / "run", collapsing(170, falls=1000))
    with attemper.open(tmp_path / "run") as run:
        html = run_page(run)
    assert '<details id="ended" open><summary' in html
    assert html.index('id="ended"') < html.index('id="heads-title"')


def test_every_sample_is_in_the_history_to_a_254th_of_the_range(collapse: Run) -> None:
    data = data_of(run_page(collapse))
    assert data["run"]["axes"] == [collapse.steps.tolist()]
    for (site, head, name), values in history_of(data).items():
        want = collapse.history(name, collapse.sites[site], head).values
        assert np.abs(values - want).max() <= np.ptp(want) / 254 / 2 + 1e-4 * np.abs(want).max()


def spiking(many: int) -> Iterator[Sample]:
    """Calm numbers, but for one step of one head; one head has a number at every fifth step alone."""
    for step in range(many):
        one = sample(step, sites(1))
        numbers = np.full_like(one.values, 0.5) + 1e-3 * np.sin(np.arange(3) + step)
        numbers[2, 1] = 40.0 if step == 1234 else numbers[2, 1]
        numbers[:, 2] = numbers[:, 2] if step % 5 == 0 else np.nan
        yield Sample(step, one.time, one.sites, one.quantities, numbers.astype(np.float32))


@pytest.mark.slow("takes many seconds")
def test_a_spike_of_one_step_stays_visible_in_few_columns(tmp_path: Path) -> None:
    written(tmp_path / "run", spiking(1500))
    with attemper.open(tmp_path / "run") as run:
        data = data_of(run_page(run))
    about = data["run"]
    assert about["columns"] <= 300
    assert about["per_column"] == -(-1500 // len(about["axes"][0])) >= 5
    found = history_of(data)
    spike = found[0, 1, "max_logit"]
    assert spike.max() == pytest.approx(40, rel=1e-3)
    column = int(spike.argmax())
    steps = [*about["axes"][0], 1500]
    assert steps[column] <= 1234 < steps[column + 1]
    assert (spike > 1).sum() == 1
    assert not np.isnan(found[0, 2, "max_logit"]).any()
    assert [0, 1, about["statistics"].index("normalized_entropy")] in about["bands"]


def test_a_resumed_run_says_where_and_sites_of_evaluation_keep_their_last_numbers(tmp_path: Path) -> None:
    train, both = sites(1), (*sites(1), *sites(1, mode="eval"))
    written(tmp_path / "run", (sample(step, both if step == 7 else train) for step in range(20)))
    written(tmp_path / "run", (sample(step, train) for step in range(12, 30)))
    with attemper.open(tmp_path / "run") as run:
        html = run_page(run)
        kept = run.at(7, alarms=False).sites[1].heads[0].max_logit
    data = data_of(html)
    assert data["run"]["resumed"] == [12]
    assert "resumed at step 12" in shown_text(html)
    assert [site["mode"] for site in data["sites"]] == [["mode.train", {}], ["mode.eval", {}]]
    logit = [one["key"] for one in data["quantities"]].index("max_logit")
    assert data["sites"][1]["heads"][0][4][logit] == pytest.approx(kept, rel=1e-4)


def test_a_site_may_lack_a_statistic_that_another_has(tmp_path: Path) -> None:
    turns = (sites(1), ("max_logit",)), (sites(1, mode="eval"), ("max_logit", "effective_tokens"))
    written(tmp_path / "run", (sample(step, *turns[step % 2]) for step in range(20)))
    with attemper.open(tmp_path / "run") as run:
        found = history_of(data_of(run_page(run)))
    assert np.isnan(found[0, 0, "effective_tokens"]).all()
    assert np.isfinite(found[1, 0, "effective_tokens"]).sum() == 10


@pytest.mark.slow("takes many seconds")
def test_many_heads_over_many_steps_still_fit(tmp_path: Path) -> None:
    written(tmp_path / "run", samples(300, labels=sites(10, 32)))
    with attemper.open(tmp_path / "run") as run:
        html = run_page(run)
    assert len(html.encode()) <= 2_000_000
    assert data_of(html)["run"]["statistics"]
