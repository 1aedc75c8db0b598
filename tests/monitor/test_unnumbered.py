"""A loop that is run again into the folder of a run, and gives no numbers: the run goes on, and that is said."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

import attemper
from attemper import InputError, Store
from attemper.report import texts
from attemper.store.process import Lock
from tests.monitor.test_first_step import passes
from tests.monitor.test_history import Stack
from tests.report.test_page import data_of


def trained(store: Any, *before: int, numbers: bool = False, steps: int = 3) -> list[str]:
    """Trains; the warnings."""
    model = Stack().train()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with attemper.watch(model, store=store) as watch:
            for number in before:
                watch.step(number)
            for step in range(steps):
                passes(model, 1)
                watch.step(3 + step if numbers else None)
    return [str(one.message) for one in told]


def test_a_loop_that_is_run_again_without_numbers_goes_on_and_says_so_once(tmp_path: Path) -> None:
    assert trained(tmp_path / "run") == []
    (said,) = trained(tmp_path / "run")
    assert said.startswith("attemper: run holds a run up to step 2, which goes on: this sample gets step 3, since the")
    assert (
        "store=attemper.Store('run', new=True), or another folder; from a checkpoint, call watch.step(n) once" in said
    )
    assert len(trained(tmp_path / "run")) == 1
    run = attemper.open(tmp_path / "run")
    assert run.steps.tolist() == list(range(9))
    marks = [f"resumed at step {step} without a step number: counting continues from the last" for step in (3, 6)]
    assert [remark[: len(marks[0])] for remark in run.remarks] == marks
    shown = run.to_html(tmp_path / "page.html").read_text("utf-8")
    assert "Resumed at step 3 without a step number" in shown
    assert texts.say(texts.note(run.remarks[0]), "zh").startswith("从第 3 步续训，但循环没有给出步数")
    assert data_of(shown)


def test_a_number_of_the_loop_or_of_a_checkpoint_says_where_it_goes_on_and_nothing_is_said(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    assert trained(tmp_path / "run", numbers=True) == []
    assert trained(tmp_path / "run", 5) == []
    assert attemper.open(tmp_path / "run").remarks == ()


def test_a_training_that_numbers_its_steps_from_0_again_hides_the_stored_run_and_says_so(tmp_path: Path) -> None:
    trained(tmp_path / "run", numbers=True, steps=4)
    (said,) = trained(tmp_path / "run", numbers=True)
    assert said == (
        "attemper: run holds steps 3 to 6, which are no longer shown: this training starts again at step 3. For a new "
        "training pass store=attemper.Store('run', new=True), or another folder."
    )
    run = attemper.open(tmp_path / "run")
    assert run.steps.tolist() == [3, 4, 5]
    assert run.remarks == ("started again at step 3: earlier samples are not shown",)
    assert texts.say(texts.note(run.remarks[0]), "zh") == "从第 3 步重新开始：此前存储的内容不再显示"


def test_passes_that_go_on_without_a_step_are_told_when_the_watch_is_closed(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    model = Stack().eval()
    watch = attemper.watch(model, store=tmp_path / "run")
    passes(model, 2)
    with pytest.warns(UserWarning, match="run holds a run up to step 2, which goes on: this sample gets step 3"):
        watch.close()


def test_a_new_training_begins_at_0_and_the_earlier_run_stays_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path / "run")
    (tmp_path / "run" / "mine.txt").write_text("not of attemper")
    for number in (1, 2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "attemper"):
            assert trained(Store(tmp_path / "run", new=True), steps=number) == []
        assert f"the run that was in run is kept in run-{number}." in caplog.text
    lengths = [len(attemper.open(tmp_path / name)) for name in ("run-1", "run-2", "run")]
    assert lengths == [3, 1, 2]
    assert (tmp_path / "run" / "mine.txt").exists()
    assert trained(Store(tmp_path / "none", new=True)) == []
    assert not (tmp_path / "none-1").exists()


def test_a_run_that_is_written_to_is_not_moved(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    lock = Lock(tmp_path / "run" / "fragment-0.lock")
    trained(Store(tmp_path / "run", new=True))
    lock.release()
    assert not (tmp_path / "run-1").exists()
    assert len(attemper.open(tmp_path / "run")) == 3


def test_a_new_training_at_a_url_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"Store\(new=True\) moves files of this machine: name another place than s3://"
    ):
        Store("s3://bucket/run", new=True)
