"""Numbers that a loop gives with each step: what is kept of them, what is refused, and that nothing waits for them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attemper
from attemper import InputError
from attemper.monitor import kept_run, scalars
from attemper.monitor.scalars import ScalarsUnderway
from tests.sites.own_models import Own

LOSSES = [2.0, 1.5, math.nan, 1.0, math.inf, 0.5]


def train(watch: attemper.types.Watch, steps: range, **numbers) -> None:
    """A step a number; each of ``numbers`` is a function of the step."""
    for step in steps:
        watch.model(torch.randn(1, 4, 32))
        watch.step(step, **{name: value(step) for name, value in numbers.items()})


def test_the_loss_of_every_step_is_kept_though_few_are_sampled():
    with attemper.watch(Own(), every=4) as watch:
        train(watch, range(6), loss=LOSSES.__getitem__, grad_norm=lambda step: torch.tensor(step / 2))
        found = watch.history("loss")
        assert found.steps.tolist() == [0, 1, 2, 3, 4, 5]
        assert found.values.dtype == np.float32
        assert np.array_equal(found.values, np.array(LOSSES, np.float32), equal_nan=True)
        assert repr(found) == "History('loss': 6 steps from 0 to 5, values [6])"
        assert watch.history("grad_norm", start=2, stop=4).values.tolist() == [1.0, 1.5]
        assert watch.run.steps.tolist() == [0, 4]
        assert watch.mean("grad_norm") == 1.25
        assert watch.run.statistics[-2:] == ("loss", "grad_norm")
    assert watch.history("loss").steps.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_name_that_is_given_on_some_steps_has_gaps():
    with attemper.watch(Own(), every=2) as watch:
        train(watch, range(5), loss=float, accuracy=lambda step: step / 10 if step % 2 else None)
        assert watch.history("accuracy").steps.tolist() == [1, 3]
        assert watch.history("loss").steps.tolist() == [0, 1, 2, 3, 4]


def test_a_loop_that_goes_back_replaces_every_number_from_there_on(tmp_path):
    with attemper.watch(Own(), every=2, store=tmp_path / "a") as watch:
        train(watch, range(6), loss=float, lr=float)
        train(watch, range(3, 5), loss=lambda step: step + 10.0)
        assert watch.history("loss").values.tolist() == [0, 1, 2, 13, 14]
        assert watch.history("lr").values.tolist() == [0, 1, 2]
    with attemper.watch(Own(), every=2, store=tmp_path / "a") as watch:
        watch.step(3)  # of the checkpoint that training goes on from: its own loss stands
        train(watch, range(4, 7), accuracy=float)
        assert watch.history("loss").values.tolist() == [0, 1, 2, 13]
        assert watch.history("accuracy").steps.tolist() == [4, 5, 6]
    with attemper.open(tmp_path / "a") as run:
        assert run.history("loss").values.tolist() == [0, 1, 2, 13]


def test_numbers_of_unnumbered_steps_follow_the_count(tmp_path):
    for many in (3, 6):
        with warnings.catch_warnings(), attemper.watch(Own(), store=tmp_path / "a") as watch:
            warnings.simplefilter("ignore")  # that the run goes on without a number
            for _ in range(3):
                watch.model(torch.randn(1, 4, 32))
                watch.step(loss=1.0)
        assert attemper.open(tmp_path / "a").history("loss").steps.tolist() == [*range(many)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"loss": torch.ones(3)},
            r"watch\.step\(loss=\.\.\.\) must be one number, got the shape \[3\].*loss\.mean\(\)",
        ),
        ({"loss": torch.ones(0)}, r"got the shape \[0\]"),
        ({"loss": np.ones((2, 1))}, r"got the shape \[2, 1\]"),
        ({"loss": "1.0"}, "must be a real number or a tensor of one, got str"),
        ({"loss": 1j}, "got complex"),
        ({"loss": torch.tensor(1j)}, "got Tensor"),
        ({"loss": {"loss": 1.0}}, "got dict"),
        ({"entropy": 1.0}, "'entropy' is the name of a statistic or a column"),
        ({"max_logit": 1.0}, "'max_logit' is the name of a statistic"),
        ({"site": 1.0}, "'site' is the name of a statistic or a column"),
        ({"": 1.0}, "cannot be the name of a number"),
        ({"a\x00b": 1.0}, r"'a\\\\u0000b' cannot be the name"),
        ({"a" * 65: 1.0}, "1 to 64 printable"),
        ({f"n{place}": 1.0 for place in range(33)}, "at most 32 names of numbers over a run, got 33"),
    ],
)
def test_what_cannot_be_kept_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        ScalarsUnderway().check(given)


def test_a_step_with_what_is_refused_has_not_ended():
    with attemper.watch(Own()) as watch:
        watch.model(torch.randn(1, 4, 32))
        with pytest.raises(InputError, match="got the shape"):
            watch.step(loss=torch.ones(3))
        assert watch.steps == 0
        watch.step(loss=1.0)
        assert watch.history("loss").steps.tolist() == [0]


def test_names_are_counted_over_the_run():
    inbox = ScalarsUnderway()
    inbox.check({f"n{place}": 1.0 for place in range(32)})
    with pytest.raises(InputError, match="at most 32 names of numbers over a run, got 33"):
        inbox.check({"loss": 1.0})
    assert inbox.check({"n1": 1}) == {"n1": 1.0}


@pytest.mark.parametrize(
    "loss",
    [
        2.5,
        np.float64(2.5),
        np.full((1, 1), 2.5, np.float16),
        torch.tensor([2.5], requires_grad=True),
        torch.tensor(2.5, dtype=torch.bfloat16),
    ],
)
def test_a_loss_may_be_any_kind_of_one_number(loss):
    assert taken(loss) == 2.5


def taken(loss: Any) -> float:
    inbox = ScalarsUnderway()
    inbox.take(0, inbox.check({"loss": loss}))
    return next(inbox.ready())[1]["loss"]


def test_what_no_float_can_hold_is_infinite():
    assert [taken(loss) for loss in (10**400, -(10**400), math.inf, True)] == [math.inf, -math.inf, math.inf, 1.0]


class Away(Tensor):
    """A tensor that says it is on another device, and counts how often it is read."""

    reads: int = 0
    device = property(lambda self: torch.device("xpu"))  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Away.reads += function in (Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.numpy)
        return super().__torch_function__(function, types, args, kwargs or {})


def away(value: float) -> Tensor:
    return torch.tensor(value).as_subclass(Away)


def test_a_loss_on_a_device_is_read_a_step_later_and_never_waited_for():
    Away.reads = 0
    inbox = ScalarsUnderway()
    for step in range(3):
        loss = away(float(step))
        inbox.take(step, inbox.check({"loss": loss, "lr": 0.5}))
        loss.fill_(9.0)  # the loop goes on with it
        assert Away.reads == (0 if step < 2 else 2)  # a copy, and its numbers
        assert [*inbox.ready()] == ([] if step == 0 else [(step - 1, {"loss": step - 1.0, "lr": 0.5})])
    assert [*inbox.ready(wait=True)] == [(2, {"loss": 2.0, "lr": 0.5})]


def test_a_device_that_lags_far_behind_is_waited_for(monkeypatch):
    monkeypatch.setattr(scalars, "MOST_UNDERWAY", 2)
    inbox = ScalarsUnderway()
    waited: list[int] = []

    class Event:
        def __init__(self, step: int) -> None:
            self.step = step

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            waited.append(self.step)

    for step in range(4):
        monkeypatch.setattr(scalars, "_begin_copy", lambda tensors, step=step: (torch.ones(1), Event(step)))
        inbox.take(step, {"loss": away(1.0)})
        assert [*inbox.ready()] == ([] if step < 2 else [(step - 2, {"loss": 1.0})])
    assert waited == [0, 1]


def test_what_could_not_be_read_ends_no_training(monkeypatch):
    def fail(tensors: list[Tensor]) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(scalars, "_begin_copy", fail)
    with attemper.watch(Own()) as watch:
        watch.model(torch.randn(1, 4, 32))
        with pytest.warns(UserWarning, match="no memory"):
            watch.step(loss=away(1.0))
        assert watch.failures == 1


def test_numbers_wait_for_the_writer_at_most_a_second_or_some_thousand_steps(monkeypatch):
    monkeypatch.setattr(kept_run, "MOST_NUMBERS", 10)
    with attemper.watch(Own(), every=100) as watch:
        train(watch, range(25), loss=float)
        assert watch._recorder._kept.writer is not None
        assert len(watch._recorder._kept._numbers) <= 10
        assert watch.history("loss").values.tolist() == [*range(25)]
