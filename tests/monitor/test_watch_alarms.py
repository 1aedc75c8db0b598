"""Alarms of a watch: raised on models made sick on purpose, and none above a notice on healthy ones. Those of the
loss are told in the step itself, and are those of the stored run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attemper
from attemper.lab.model import ByteModel, encode, load, windows
from attemper.readings.reading import Alarm
from tests.sites.own_models import Own

TEXT = windows(encode(Path(__file__).read_text("utf-8")), 256)[:4]
SITE, HEAD = "blocks.1.attention", 2


def watched(change: Callable[[Tensor, Tensor], object]) -> list[Alarm]:
    """Alarms at one head of the shipped model, in a training step, after ``change`` of its q and k projections."""
    model = load().train()
    attention: Any = model.get_submodule(SITE)
    size = attention.q_proj.in_features // attention.heads
    rows = slice(HEAD * size, (HEAD + 1) * size)
    with torch.no_grad():
        change(attention.q_proj.weight[rows], attention.k_proj.weight[rows])
    with attemper.watch(model, rows=128) as watch:
        model.loss(TEXT).backward()
        watch.step()
    return [alarm for alarm in watch.alarms() if (alarm.site, alarm.head) == (SITE, HEAD)]


SICK: dict[str, tuple[Callable[[Tensor, Tensor], object], set[tuple[str, str]]]] = {
    "queries thirty times as large": (lambda q, k: q.mul_(30), {("collapsed", "notice"), ("logits", "warning")}),
    "queries of zero": (lambda q, k: q.zero_(), {("diffuse", "notice")}),
    "a weight of NaN": (lambda q, k: k[0].fill_(torch.nan), {("nonfinite", "critical")}),
    "as it was trained": (lambda q, k: None, set()),
}


@pytest.mark.parametrize("name", SICK)
def test_a_head_that_is_made_sick_raises_the_alarms_of_its_sickness(name: str) -> None:
    change, expected = SICK[name]
    assert {(alarm.kind, alarm.severity) for alarm in watched(change)} == expected


@pytest.mark.slow("takes seconds")
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "fresh"])
@pytest.mark.quick("fresh")
def test_a_healthy_byte_model_in_training_raises_nothing_above_a_notice(trained: bool) -> None:
    model = (load() if trained else ByteModel()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with attemper.watch(model) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model.loss(TEXT).backward()
            optimizer.step()
            watch.step()
            assert {alarm.severity for alarm in watch.alarms()} <= {"notice"}


@pytest.mark.slow("takes a second")
def test_a_healthy_encoder_raises_nothing_above_a_notice() -> None:
    pytest.importorskip("transformers")
    from tests.support.encoder import loaded

    model, tokenizer = loaded()
    batch = tokenizer([Path(__file__).read_text("utf-8")[:1500]], return_tensors="pt")
    with attemper.watch(model) as watch:
        model(**batch)
    assert {alarm.severity for alarm in watch.alarms()} <= {"notice"}


# --- of the loss ---


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
