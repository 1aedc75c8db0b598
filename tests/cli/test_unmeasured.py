"""A run or a scan without a number never says that there are no alarms: it says why, and its command exits with 1."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import attemper
from attemper.readings.reading import Reading, Skipped
from attemper.readings.sample import Sample
from attemper.report import texts
from attemper.report.notebook import scan_html
from attemper.report.page import scan_page
from attemper.store.fragment import Fragment
from attemper.store.process import Lock
from tests.report.readings import alarm, reading, silent
from tests.support.command import Run
from tests.support.runs import written
from tests.support.samples import sites

QUANTITIES = ("normalized_entropy", "max_logit", "rows", "judged_rows", "empty_rows", "nonfinite_rows")


def watched(folder: Path) -> None:
    """A run whose watch saw nothing."""
    model = nn.Linear(3, 3)
    with attemper.watch(model, store=folder) as watch:
        model(torch.zeros(2, 3))
        with pytest.warns(UserWarning, match="nothing was measured"):
            watch.step()


def killed(folder: Path) -> None:
    written(folder, ())


def full(folder: Path) -> None:
    written(folder, ())
    fragment = Fragment(folder / "fragment-0.sqlite")
    fragment.lose(7, None, "disk full")
    fragment.close()


def padded(folder: Path) -> None:
    values = np.zeros((len(QUANTITIES), 6), np.float32)
    values[:2] = np.nan
    written(folder, [Sample(step, 1000.0, sites(), QUANTITIES, values) for step in range(3)])


RUNS = {
    "saw nothing": (watched, "watch saw no attention in Linear"),
    "ended": (killed, "its watch ended before the first sampled step did"),
    "lost": (full, "7 samples were lost"),
    "no row": (padded, "no row of its samples was valid"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_without_a_number_says_why_and_its_commands_exit_with_1(tmp_path: Path, run: Run, name: str) -> None:
    make, why = RUNS[name]
    make(tmp_path / "run")
    code, out, _ = run("show", tmp_path / "run", columns=2000)
    assert (code, "no alarms" in out) == (1, False)
    assert f"nothing was measured: {why}" in out
    code, out, _ = run("show", tmp_path / "run", "--json")
    assert (code, json.loads(out)["unmeasured"][: len(why)]) == (1, why)
    code, _, err = run("report", tmp_path / "run", "--html", tmp_path / "page.html")
    assert (code, "nothing was measured" in err, why in err) == (1, True, True)
    code, out, _ = run("watch", tmp_path / "run")
    assert (code, f"nothing was measured: {why}" in out) == (1, True)
    if name == "no row":
        shown = (tmp_path / "page.html").read_text("utf-8")
        assert "Nothing measured" in shown
        assert ">No alarms.<" not in shown
    else:
        (row,) = json.loads(run("runs", tmp_path, "--alarms", "--json")[1])["runs"]
        assert row["alarms"] is None


def test_a_live_run_without_a_sample_says_so(tmp_path: Path, run: Run) -> None:
    written(tmp_path / "run", ())
    lock = Lock(tmp_path / "run" / "fragment-0.lock")
    code, out, _ = run("show", tmp_path / "run")
    lock.release()
    assert code == 1
    assert "nothing was measured: its first sample has not come yet" in " ".join(out.split())


READINGS: dict[str, tuple[Reading, str, str]] = {
    "nothing": (reading(), "nothing was measured: no attention was seen.", "没有见到注意力"),
    "skipped": (
        reading(skipped=(Skipped("a", "why"), Skipped("b", "why"))),
        "nothing was measured: 2 parts were skipped.",
        "跳过了 2 个模块",
    ),
    "no row": (reading(silent("a")), "nothing was measured: no row of 4 heads was valid.", "4 个头都没有有效的行"),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_without_a_number_never_says_that_there_are_no_alarms(name: str) -> None:
    empty, note, chinese = READINGS[name]
    scan = attemper.Scan(empty, None)
    assert empty.notes[0] == scan.to_dict()["notes"][0] == note
    for shown in (str(scan), scan_html(empty), scan_page(empty)):
        for entry in ('"alarms.none":"No alarms."', '"show.no_alarms":"no alarms"'):  # of the page's table of texts
            shown = shown.replace(entry, "")
        assert "o alarms" not in shown
        assert note[1:-1] in " ".join(shown.split())
    assert chinese in texts.say(texts.note(note), "zh")
    rung = replace(empty, alarms=(alarm("nonfinite", "critical", "a", 0),))
    assert "nothing was measured" not in " ".join(rung.notes)
