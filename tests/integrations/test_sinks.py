"""``sink``: every kind of tracker as one function, and what happens when a tracker fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from attemper import InputError
from attemper.integrations.trackers import sink
from tests.support.trackers import Kept

VALUES = {"a/b": 1.5, "c": 2.0}


class LogMetrics(Kept):
    """Lightning's loggers, mlflow, Comet."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.got.append((metrics, step))


class Log(Kept):
    """Weights & Biases, trackio, accelerate's trackers."""

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.got.append((values, step))


class AddScalar(Kept):
    """SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.got.append((tag, scalar_value, global_step))


class Track(Kept):
    """Aim's Run, whose ``log`` is another thing."""

    def track(self, value: float, name: str, step: int | None = None) -> None:
        self.got.append((name, value, step))

    def log(self, level: int, message: str) -> None:
        raise AssertionError


class Both(LogMetrics, Log):
    """Something with several ways: the first of the documented order is taken."""

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", [LogMetrics, Log, Both])
def test_a_tracker_of_dicts_gets_one_dict_and_the_step(kind: type[Any]) -> None:
    tracker = kind()
    sink(tracker)(VALUES, 7)
    assert tracker.got == [(VALUES, 7)]


@pytest.mark.parametrize("kind", [AddScalar, Track])
def test_a_tracker_of_scalars_gets_each_with_its_name_and_the_step(kind: type[Any]) -> None:
    tracker = kind()
    sink(tracker)(VALUES, 7)
    assert tracker.got == [("a/b", 1.5, 7), ("c", 2.0, 7)]


def test_a_function_and_a_module_are_trackers_too() -> None:
    got: list[Any] = []
    sink(lambda values, step: got.append((values, step)))(VALUES, 7)
    sink(SimpleNamespace(log_metrics=lambda metrics, step: got.append((metrics, step))))(VALUES, 8)
    assert got == [(VALUES, 7), (VALUES, 8)]


def test_missing_and_infinite_values_are_left_out_and_nothing_is_sent_for_none() -> None:
    tracker = Log()
    write = sink(tracker)
    write({"a": None, "b": float("nan"), "c": float("inf"), "d": 1.0}, 0)
    write({"a": None}, 1)
    assert tracker.got == [({"d": 1.0}, 0)]


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        (3, r"int is not a known tracker\. Accepted: something with \.log_metrics\(dict, step=\)"),
        (logging.getLogger("x"), r"Logger is not a known tracker.*\.add_scalar\(name, value, step\)"),
        (
            SimpleNamespace(log=lambda name, value: None),
            r"not a known tracker.*\.track\(value, name=, step=\).*or a function",
        ),
        (lambda values: None, "function is not a known tracker"),
        (AddScalar, "AddScalar is a class. Pass an instance of it"),
    ],
)
def test_what_is_no_tracker_is_told_with_all_that_is(tracker: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sink(tracker)


def test_the_real_summary_writer_and_lightnings_loggers_are_known(tmp_path: Any) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "board")) as writer:
        sink(writer)(VALUES, 3)
    logger = CSVLogger(tmp_path)
    sink(logger)(VALUES, 3)
    logger.save()
    rows = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert rows == ["a/b,c,step", "1.5,2.0,3"]


def test_accelerates_own_tracker_is_known() -> None:
    accelerate = pytest.importorskip("accelerate.tracking")

    class Mine(Log, accelerate.GeneralTracker):
        name, requires_logging_directory, tracker = "mine", False, None

        def __init__(self) -> None:
            accelerate.GeneralTracker.__init__(self, _blank=True)
            self.got = []

    tracker = Mine()
    sink(tracker)(VALUES, 3)
    assert tracker.got == [(VALUES, 3)]
