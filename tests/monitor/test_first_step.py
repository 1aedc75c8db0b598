"""The first step of a watch has all of its forward passes, however many came before the first ``watch.step()``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.monitor.sampled_steps import MOST_PASSES
from tests.monitor.test_history import Stack, collapse

LONG = torch.randn(1, 40, 32)


def passes(model: nn.Module, many: int, tokens: int = 40) -> None:
    with torch.no_grad():
        for number in range(many):
            model(torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(number)))


def rows(watch: attemper.types.Watch) -> list[tuple[int, float]]:
    found = watch.history("rows", site="layers.0", head=0)
    return list(zip(found.steps.tolist(), found.values.tolist(), strict=True))


@pytest.mark.parametrize("every", [1, 5])
def test_the_first_step_has_every_pass_of_an_accumulated_gradient_and_no_jump_follows(every: int) -> None:
    model = Stack().train()
    with attemper.watch(model, every=every) as watch:
        for _ in range(6):
            passes(model, 8)
            watch.step()
    assert rows(watch) == [(step, 320) for step in range(0, 6, every)]


def test_the_first_step_is_that_of_a_watch_that_was_stepped_before_the_loop() -> None:
    found = []
    for before in (True, False):
        model = Stack().train()
        with attemper.watch(model) as watch:
            if before:
                watch.step(9)
            for batch in (LONG, LONG[:, :20], 3 * LONG):
                model(batch)
            watch.step(10)
        found.append((watch.table().to_dict() | {"date": None}, rows(watch)))
    assert found[0] == found[1]
    assert (watch.table().tokens, rows(watch)) == (100, [(10, 100)])


def test_passes_are_held_back_from_store_and_alarms_until_the_first_step(tmp_path: Path) -> None:
    rung: list[Any] = []
    model = Stack().train()
    collapse(model)
    with attemper.watch(model, store=tmp_path / "run", limits={"logits": 1.0}, on_alarm=rung.append) as watch:
        passes(model, 3)
        assert {alarm.kind for alarm in watch.alarms()} >= {"logits"}, "the table judges what it shows"
        assert len(attemper.open(tmp_path / "run")) == 0
        assert rung == []
        watch.step(7)
        assert {alarm.since for alarm in rung} == {7}
        assert rows(watch) == [(7, 120)]
    assert {alarm.since for alarm in attemper.open(tmp_path / "run").alarms()} == {7}


def test_an_alarm_begins_once_though_each_pass_was_looked_at() -> None:
    rung: list[Any] = []
    model = Stack().train()
    collapse(model)
    with attemper.watch(model, limits={"logits": 1.0}, on_alarm=rung.append) as watch:
        for _ in range(3):
            passes(model, 1)
            watch.table()
    kinds = [(alarm.site, alarm.head, alarm.kind) for alarm in rung]
    assert kinds
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(("every", "many"), [(1, 2), (5, MOST_PASSES), (1, MOST_PASSES + 1), (5, 22)])
@pytest.mark.quick("5-16", "1-17")
def test_a_watch_that_is_never_stepped_keeps_the_passes_that_every_names(tmp_path: Path, every: int, many: int) -> None:
    model = Stack().eval()
    with attemper.watch(model, every=every, store=tmp_path / "run") as watch:
        passes(model, many)
    assert rows(watch) == [(step, 40) for step in range(0, many, every)]
    assert watch.sampled == len(range(0, many, every))
    assert attemper.open(tmp_path / "run").steps.tolist() == list(range(0, many, every))
    times = watch.run.ranks.moments[0]["time"]
    assert (times[1:] >= times[:-1]).all()


def test_the_table_of_a_watch_that_is_never_stepped_shows_the_last_pass_that_every_names() -> None:
    model = Stack().eval()
    with attemper.watch(model, every=2) as watch:
        for number, tokens in enumerate((40, 39, 38, 37)):
            passes(model, 1, tokens)
            assert watch.table().tokens == (40, 40, 38, 38)[number]
    assert watch.table().tokens == 38
    assert watch.table().row_statistics("layers.0").shape == (1, 4, 38)


def test_the_sixteenth_pass_may_be_followed_by_a_step_and_from_the_seventeenth_on_passes_are_steps() -> None:
    model = Stack().eval()
    with attemper.watch(model) as watch:
        passes(model, MOST_PASSES)
        watch.step()
    assert rows(watch) == [(0, 640)]
    with attemper.watch(model) as watch:
        passes(model, MOST_PASSES + 1)
        assert [step for step, _ in rows(watch)] == list(range(MOST_PASSES + 1))
        with pytest.warns(UserWarning, match=r"first watch\.step\(\) came after 17 .*Call watch\.step\(\) once before"):
            watch.step()
        passes(model, 2)
        watch.step()
    assert rows(watch) == [(0, 40), (1, 80)]


def test_a_history_that_is_asked_for_before_the_first_step_has_the_passes_and_the_step_takes_their_place() -> None:
    model = Stack().eval()
    with attemper.watch(model) as watch:
        passes(model, 2)
        assert rows(watch) == [(0, 40), (1, 40)]
        passes(model, 1)
        assert rows(watch) == [(0, 40), (1, 40), (2, 40)]
        watch.step()
        assert rows(watch) == [(0, 120)]
        assert watch.table().tokens == 120


@pytest.mark.filterwarnings("ignore:attemper. run holds a run up to step")
@pytest.mark.parametrize("passes_of", [(1, 1), (3, 1), (1, 3)])
@pytest.mark.quick("passes_of2")
def test_a_run_that_goes_on_holds_its_first_passes_back_as_well(tmp_path: Path, passes_of: tuple[int, int]) -> None:
    model = Stack().train()
    for many in passes_of:
        with attemper.watch(model, every=2, store=tmp_path / "run") as watch:
            for _ in range(4):
                passes(model, many)
                watch.step()
    steps = attemper.open(tmp_path / "run").history("rows", site="layers.0", head=0)
    one, two = (40 * many for many in passes_of)
    assert steps.steps.tolist() == [0, 2, 4, 6]
    assert steps.values.tolist() == [one, one, two, two]


@pytest.mark.filterwarnings("ignore:attemper. run holds a run up to step")
def test_passes_of_a_run_that_goes_on_unstepped_are_those_that_every_names(tmp_path: Path) -> None:
    model = Stack().eval()
    for many in (4, 7):
        with attemper.watch(model, every=3, store=tmp_path / "run") as watch:
            passes(model, many)
    # Numbers go on after the last that was kept, 3: passes of the second watch are 4 to 10.
    assert watch.history("entropy").steps.tolist() == [0, 3, 6, 9]


def trains(model: nn.Module, updates: int, accumulated: int = 1) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(accumulated):
            model(LONG).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(("updates", "accumulated"), [(3, 1), (20, 1), (4, 12)])
def test_a_training_whose_steps_nobody_tells_is_told_once_what_to_write(updates: int, accumulated: int) -> None:
    with pytest.warns(UserWarning, match=r"call watch.step\(loss=loss\) once after each optimizer.step") as told:  # noqa: SIM117
        with attemper.watch(Stack().train()) as watch:
            trains(watch.model, updates, accumulated)
    assert len(told) == 1


def test_neither_inference_nor_a_loop_that_tells_its_steps_is_taken_for_a_training_without_steps() -> None:
    class Normed(Stack):
        """Its embedding writes to its weight in each forward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 32, max_norm=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0 * self.embedding(torch.tensor([1])).detach())

    model = Normed()
    for mode, gradients in itertools.product((True, False), repeat=2):
        with attemper.watch(model.train(mode)), torch.set_grad_enabled(gradients):
            for _ in range(20):
                model(LONG)
    with attemper.watch(model.eval()), torch.no_grad():  # other weights, no training
        for _ in range(20):
            model.load_state_dict(model.state_dict())
            model(LONG)
    with attemper.watch(model.train()) as watch:
        for _ in range(3):
            trains(model, 1, 4)
            watch.step()
    with pytest.raises(ZeroDivisionError), attemper.watch(model):  # noqa: PT012
        trains(model, 3)
        raise ZeroDivisionError
