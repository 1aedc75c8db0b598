"""Alarms of the loss in a watch: told in the step itself, and those of the stored run."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import attemper
from attemper.readings.reading import Alarm
from tests.sites.own_models import Own


def losses(many: int = 160) -> list[float]:
    found = np.random.default_rng(0).normal(2.0, 0.05, many)
    found[90] = math.nan
    found[120:] += 1.0
    return found.tolist()


def train(watch: attemper.types.Watch, steps: range) -> None:
    given = losses()
    for step in steps:
        if step % 50 == 0:
            watch.model(torch.randn(1, 4, 32))
        watch.step(step, loss=given[step])


def test_alarms_of_the_loss_are_told_in_their_step_and_stand_beside_those_of_heads(caplog):
    told: list[Alarm] = []
    with caplog.at_level(logging.INFO, "attemper"), attemper.watch(Own(), every=50, on_alarm=told.append) as watch:
        train(watch, range(91))
        assert [(alarm.kind, alarm.since) for alarm in told] == [("nonfinite_loss", 90)]
        assert "nonfinite_loss" in {alarm.kind for alarm in watch.alarms()}
        train(watch, range(91, 123))
        assert [(alarm.kind, alarm.since) for alarm in told] == [("nonfinite_loss", 90), ("loss_spike", 120)]
        (standing,) = (alarm for alarm in watch.alarms() if alarm.site == "loss")
        assert standing.kind == "loss_spike"
        assert watch.run.alarms() == [*watch._recorder.judge.alarms]
    assert sum("loss: it is NaN or infinite" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("cut", [100, 121, 140])
@pytest.mark.quick("121")
def test_a_run_that_goes_on_or_back_has_the_alarms_of_one_that_never_ended(tmp_path: Path, cut: int):
    with attemper.watch(Own(), every=50, store=tmp_path / "whole") as watch:
        train(watch, range(150))
        expected = [alarm for alarm in watch._recorder.judge.alarms if alarm.site == "loss"]
    for steps in (range(cut), range(cut - 7, 150)):
        with attemper.watch(Own(), every=50, store=tmp_path / "resumed") as watch:
            train(watch, steps)
            live = [alarm for alarm in watch._recorder.judge.alarms if alarm.site == "loss"]
    assert len(expected) == 2
    assert live == expected
    with attemper.open(tmp_path / "resumed") as run:
        assert [alarm for alarm in run.alarms() if alarm.site == "loss"] == expected
        assert [alarm for alarm in run.alarms({"loss_spike": None}) if alarm.site == "loss"] == expected[:1]
        assert [alarm.kind for alarm in run.at(100).alarms if alarm.site == "loss"] == []


def test_without_a_loss_one_note_says_what_is_not_judged(tmp_path: Path):
    said = "not judged: loss_spike, nonfinite_loss (needs loss)."
    with attemper.watch(Own(), store=tmp_path / "a") as watch:
        watch.model(torch.randn(1, 40, 32))
        assert said not in shown(watch)
        watch.step()
        assert shown(watch).count(said) == 1
        watch.model(torch.randn(1, 40, 32))
        watch.step(loss=1.0)
        assert said not in shown(watch)


def shown(watch: attemper.types.Watch) -> str:
    return " ".join(str(watch.table()).split())
