"""``attemper demo``: what it prints, where, and what it leaves behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

import attemper
from attemper.cli.demo import Curves
from attemper.lab.trained import demo
from tests.support.command import Run
from tests.support.small_runs import CONFIG, corpus


@pytest.fixture
def trained(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """``attemper demo`` with a very small model, in an empty folder."""
    monkeypatch.setattr(demo, "DemoRun", lambda **given: RUN.change(**given))
    monkeypatch.setattr(demo, "standard_library", corpus)
    monkeypatch.chdir(tmp_path)
    return partial(run, "demo")


RUN = demo.DemoRun(batch=2, config=CONFIG)


def test_without_a_terminal_it_prints_plain_lines_and_leaves_a_page(trained: Run, tmp_path: Path):
    code, out, err = trained("--steps", 40)
    assert code == 0, err
    assert "step 0 of 40: loss" in err
    assert "by layer: entropy" in err
    assert "\x1b" not in out + err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("demo-")
    assert (folder / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert attemper.open(folder).steps.tolist() == list(range(0, 40, 5))
    assert "trained 40 steps" in out
    assert f"run: {folder.relative_to(tmp_path)}" in out
    assert "attention: no alarm that is a warning or worse" in out
    assert "loss: no alarm that is a warning or worse" in out


@pytest.mark.slow("trains")
def test_json_is_one_document_on_stdout(trained: Run, tmp_path: Path):
    code, out, _ = trained("--steps", 40, "--json", "--store", "mine", "--html", "here.html", "--seed", 3)
    document = json.loads(out)
    assert code == 0
    assert (tmp_path / "here.html").is_file()
    assert {name: document[name] for name in ("schema", "run", "page", "inject", "seed", "steps")} == {
        "schema": 1,
        "run": "mine",
        "page": "here.html",
        "inject": None,
        "seed": 3,
        "steps": 40,
    }
    assert (document["attention_alarm"], document["loss_alarm"]) == (None, None)


def test_an_injected_collapse_is_told_with_both_steps(trained: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "RAISED", 3000.0)
    code, out, err = trained("--steps", 80, "--inject", "collapse", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["inject"] == "collapse"
    first = next(alarm for alarm in document["alarms"] if alarm["severity"] != "notice")
    assert document["attention_alarm"] == first["since"] >= 40
    assert f"step {first['since']}: {first['severity']} {first['kind']}: {first['site']}" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--steps", 10), 2, "40"),
        (("--inject", "fire"), 2, "collapse"),
        (("--store", "full"), 1, "--store full: this folder is not empty. Name a new one"),
        (("--store", "file"), 1, "--store file: File exists"),
        (("--html", "no/page.html"), 1, "the page cannot be written to 'no/page.html'"),
    ],
)
def test_what_cannot_be_done_is_told_before_training(
    trained: Run, tmp_path: Path, arguments: Any, code: int, message: str
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "file").touch()
    ended, out, err = trained(*arguments)
    assert (ended, out) == (code, "")
    assert message in err
    assert "step 0" not in err


def test_curves_show_the_loss_each_layer_and_the_alarms():
    screen = io.StringIO()
    console = Console(file=screen, width=120, height=40, force_terminal=True, color_system=None)
    run = RUN.change(steps=40)
    with Live(console=console, auto_refresh=False) as live:
        curves = Curves(run, live)
        demo.run_demo(run, curves.show, corpus=corpus())
    last = screen.getvalue().rpartition("step ")[2]
    assert last.startswith("40 of 40   learning rate 0.0000")
    assert "loss  █" in last
    assert "blocks.0.attention" in last
    assert "blocks.1.attention" in last
    assert "nats a byte" in last


def test_an_interrupt_ends_it_with_a_line_that_names_the_run(trained: Run, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "Progress", interrupted)
    code, out, err = trained("--store", "mine")
    assert (code, out) == (130, "")
    assert "attemper: interrupted; the samples so far are in mine: attemper show mine" in err
    assert attemper.open("mine").steps.tolist() == [0]


@pytest.mark.slow("trains in a process of its own")
@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_ends_it_with_a_line_that_names_the_run(tmp_path: Path):
    command = [sys.executable, "-m", "attemper", "demo", "--store", "run"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 40 of 800"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "attemper: interrupted; the samples so far are in run" in err
    steps = attemper.open(tmp_path / "run").steps.tolist()
    assert steps == list(range(0, len(steps) * 5, 5))
    assert len(steps) >= 8
