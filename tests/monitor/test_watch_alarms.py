"""Alarms of a watch: raised on models made sick on purpose, and none above a notice on healthy ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.lab.model import ByteModel, encode, load, windows
from attemper.readings.reading import Alarm

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


def kinds(alarms: list[Alarm]) -> set[tuple[str, str]]:
    return {(alarm.kind, alarm.severity) for alarm in alarms}


def test_a_head_whose_queries_grow_thirtyfold_is_collapsed_and_its_logits_are_large() -> None:
    assert kinds(watched(lambda q, k: q.mul_(30))) >= {("collapsed", "notice"), ("logits", "warning")}


def test_a_head_whose_queries_are_zero_is_diffuse() -> None:
    assert kinds(watched(lambda q, k: q.zero_())) == {("diffuse", "notice")}


def test_a_nan_weight_is_nonfinite_and_critical() -> None:
    assert kinds(watched(lambda q, k: k[0].fill_(torch.nan))) == {("nonfinite", "critical")}


def test_a_head_that_is_left_alone_raises_nothing() -> None:
    assert watched(lambda q, k: None) == []


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
