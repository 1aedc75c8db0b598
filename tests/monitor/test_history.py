"""A watch keeps every sample of every head, on disk or in memory, and tells of alarms; none of it touches training."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode  # pyright: ignore[reportAttributeAccessIssue]

import attemper
from attemper import Store
from attemper.monitor import recorder
from attemper.monitor.snapshot import Snapshot, Transfer
from attemper.monitor.watch import Watch
from attemper.readings.alarms import urgency
from attemper.readings.reading import Alarm
from attemper.store import process
from attemper.store.fragment import Fragment
from attemper.store.ranks import Ranks
from tests.report.test_page import data_of
from tests.sites.own_models import Own
from tests.support.identical_training import assert_identical_training

STATISTICS = ("entropy", "max_logit", "first_token_mass", "rows")


class Stack(nn.Module):
    """Two attentions of four heads, one of which can be made to collapse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Own() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).transpose(1, 2).flatten(2)
        return x


def train(
    steps: range, watch: attemper.types.Watch, optimizer: torch.optim.Optimizer | None = None, numbered: bool = True
) -> Iterator[int]:
    """Trains the watched model by one batch a step; yields after each."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = watch.model(torch.randn(2, 40, 32, generator=generator)).square().mean()
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        watch.step(step if numbered else None)
        yield step


def run(steps: range, numbered: bool = True, **options: Any) -> attemper.types.Watch:
    model = Stack().train()
    with attemper.watch(model, **options) as watch:
        list(train(steps, watch, torch.optim.SGD(model.parameters(), lr=0.1), numbered))
    assert watch.failures == 0
    return watch


def same(one: Any, two: Any) -> None:
    assert one.sites == two.sites
    np.testing.assert_array_equal(one.steps, two.steps)
    for name in STATISTICS:
        np.testing.assert_array_equal(one.history(name).values, two.history(name).values)


def test_the_history_holds_what_the_table_showed_at_each_step(tmp_path: Path) -> None:
    model, shown = Stack().train(), []
    with attemper.watch(model, store=Store(tmp_path / "run", bits=None)) as watch:
        for _ in train(range(5), watch):
            shown.append([[head.entropy_nats for head in site.heads] for site in watch.table().sites])
    found = watch.history("entropy")
    assert found.steps.tolist() == list(range(5))
    np.testing.assert_array_equal(found.values, np.array(shown, np.float32))
    assert watch.history("entropy", site="layers.1", head=3).values.tolist() == found.values[:, 1, 3].tolist()
    assert [head.max_logit for head in watch.run.at(4).sites[0].heads] == pytest.approx(
        [head.max_logit for head in watch.table().sites[0].heads], rel=1e-6
    )
    assert watch.mean("entropy").shape == watch.std("entropy").shape == watch.trend("entropy").slope.shape == (2, 4)


def test_a_history_in_memory_is_that_of_a_store(tmp_path: Path, full_size: bool) -> None:
    steps = range(140 if full_size else 12)  # more samples than one block has, or fewer
    stored = run(steps, store=tmp_path / "run")
    same(run(steps).run, stored.run)
    same(attemper.open(tmp_path / "run"), stored.run)


@pytest.mark.parametrize("options", [{}, {"rows": 8}])
def test_training_that_is_stored_is_bit_identical(tmp_path: Path, options: dict[str, Any]) -> None:
    def made() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        model = Stack()
        for layer in model.layers:
            layer.dropout = 0.1  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        return model, lambda root: root(torch.randn(2, 40, 32)).square().mean()

    assert_identical_training(made, 4, store=tmp_path / "run", **options)


def test_every_process_writes_a_fragment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        run(range(rank, 4), store=tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").glob("*.sqlite")} == {"fragment-0.sqlite", "fragment-1.sqlite"}
    both = attemper.open(tmp_path / "run")
    assert both.steps.tolist() == list(range(4))
    assert {segment.rank for segment in both.segments} == {0, 1}


def test_what_is_known_of_the_run_is_kept(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"hidden_size": 32, "_name_or_path": "/home/ada/secret", "dtype": torch.float32}

    model = Stack().train()
    model.config = Config()  # type: ignore[assignment]
    with attemper.watch(
        model, every=3, rows=8, store=Store(tmp_path / "run", name="mine"), limits={"logits": 7}
    ) as one:
        model(torch.randn(1, 40, 32))
    about = attemper.open(tmp_path / "run").about
    assert about["configuration"] == {"hidden_size": 32, "dtype": "torch.float32"}
    assert (about["name"], about["model"], about["every"], about["rows"]) == ("mine", "Stack", 3, 8)
    assert (about["dtype"], about["fewest_keys"], about["limits"]["logits"]) == ("float32", 32, 7.0)
    assert about["backend"] in ("native", "blocked")
    assert "secret" not in str(about)
    run = attemper.open(tmp_path / "run")
    pages = one.report(tmp_path / "page.html"), run.to_html(tmp_path / "again.html")
    assert [data_of(path.read_text("utf-8"))["details"] for path in pages] == [True, False]
    with attemper.watch(model, every=3, rows=8, store=tmp_path / "run") as again:
        page = again.report(tmp_path / "resumed.html")  # a run that goes on, before its first new sample
    assert data_of(page.read_text("utf-8"))["details"] is False


def collapse(model: nn.Module) -> None:
    """Makes the scores of the second layer large."""
    with torch.no_grad():
        for parameter in model.layers[1].parameters():  # type: ignore[union-attr, index]
            parameter.mul_(40.0)


def test_alarms_go_to_the_log_once_and_to_on_alarm_in_the_training_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[Alarm, bool]] = []
    model = Stack().train()
    with (
        caplog.at_level(logging.WARNING, "attemper"),
        attemper.watch(
            model,
            store=tmp_path / "run",
            limits={"logits": 500.0},
            on_alarm=lambda alarm: told.append((alarm, threading.current_thread() is threading.main_thread())),
        ) as watch,
    ):
        list(train(range(3), watch))
        assert told == []
        collapse(model)
        list(train(range(3, 6), watch))
        standing = watch.alarms()
    assert standing == watch.table().alarms
    logits = [alarm for alarm, _ in told if alarm.kind == "logits"]
    assert {(alarm.site, alarm.since) for alarm in logits} == {("layers.1", 3)}
    assert all(in_training_thread for _, in_training_thread in told)
    assert {alarm.since for alarm in standing if alarm.kind == "logits"} == {3}
    assert {alarm.step for alarm in standing if alarm.kind == "logits"} == {3}
    assert {alarm.latest_step for alarm in standing if alarm.kind == "logits"} == {5}
    stored = attemper.open(tmp_path / "run").alarms()
    assert [alarm for alarm in stored if alarm.ended is None] == sorted(standing, key=urgency)
    said = {(one.site, one.head, one.kind, one.since): (one.value, one.limit, one.message, one.step) for one in stored}
    for alarm, _ in told:
        assert said[alarm.site, alarm.head, alarm.kind, alarm.since] == (
            alarm.value, alarm.limit, alarm.message, alarm.step,
        )  # fmt: skip
    lines = [record.getMessage() for record in caplog.records if record.name == "attemper"]
    assert len(lines) == len({(alarm.step, alarm.kind) for alarm, _ in told})
    assert any("step 3: warning logits: layers.1 head " in line and "and 1 more" in line for line in lines)


def test_what_on_alarm_raises_does_not_end_training(tmp_path: Path) -> None:
    model = Stack().train()

    def broken(alarm: Alarm) -> None:
        raise RuntimeError(f"no pager for {alarm.kind}")

    with attemper.watch(model, store=tmp_path / "run", limits={"logits": 500.0}, on_alarm=broken) as watch:
        list(train(range(2), watch))
        collapse(model)
        with pytest.warns(UserWarning, match="no pager for .*Training goes on"):
            list(train(range(2, 5), watch))
    assert watch.failures >= 1
    assert watch.history("entropy").steps.tolist() == list(range(5))


def test_a_table_within_a_step_takes_part_of_its_sample_and_leaves_one(tmp_path: Path) -> None:
    model = Stack().train()
    with attemper.watch(model, store=tmp_path / "run") as watch:
        watch.step(0)
        for _ in range(2):
            model(torch.randn(1, 40, 32))
            watch.table()
        watch.step(1)
        rows = watch.history("rows", site="layers.0", head=0)
    assert rows.values.tolist() == [80]


def test_watches_that_nobody_holds_leave_nothing(tmp_path: Path) -> None:
    def left() -> tuple[int, int, int]:
        hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
        files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        return threading.active_count(), files, hooks

    model, gc_was = Stack().train(), gc.isenabled()
    before = left()
    gc.disable()  # each ends with its last name, and not when Python looks for cycles
    try:
        for number in range(8):
            watch = attemper.watch(model, store=tmp_path / str(number))
            list(train(range(2), watch))
            del watch
        assert left() == before
    finally:
        if gc_was:
            gc.enable()


def test_a_watch_that_is_dropped_in_the_middle_of_a_pass_leaves_the_pass_as_it_is() -> None:
    class Dropping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held.clear()
            return super().forward(x)

    model, x = Dropping().eval(), torch.randn(1, 40, 32)
    held: list[Any] = []
    expected = model(x)
    held.append(attemper.watch(model))
    assert torch.equal(model(x), expected)
    gc.collect()
    assert _get_current_function_mode() is None
    assert torch.equal(model(x), expected)


def test_a_watch_that_nobody_ever_held_says_so(caplog: pytest.LogCaptureFixture) -> None:
    attemper.watch(Stack())
    (record,) = caplog.records
    assert "a watch of Stack has ended before a pass, because nothing refers to it" in record.message


def test_a_cell_that_is_run_again_ends_the_watch_before_it_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Stack().train()
    watch = first = attemper.watch(model, store=tmp_path / "run")
    list(train(range(3), watch))
    watch = attemper.watch(model, store=tmp_path / "run")
    list(train(range(3, 5), watch))
    assert len(model._forward_hooks) == 1
    watch.close()
    assert (first.failures, watch.failures) == (0, 0)
    assert attemper.open(tmp_path / "run").steps.tolist() == [0, 1, 2, 3, 4]
    (told,) = (record.message for record in caplog.records if "watch" in record.message)
    assert "an earlier watch of this process wrote to run. It has ended, and this one replaces it" in told
    third = attemper.watch(model, store=tmp_path / "run")
    with attemper.watch(model, store=Store(tmp_path / "run", new=True)) as fourth:  # while the one before is open
        list(train(range(2), fourth))
    assert third.failures == 0
    assert [len(attemper.open(tmp_path / name)) for name in ("run-1", "run")] == [5, 2]


def test_what_a_dropped_watch_still_holds_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Stack().eval()
    watch = attemper.watch(model, store=tmp_path / "run")
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(1, 40, 32))
    del watch, model
    gc.collect()
    found = attemper.open(tmp_path / "run")
    # Until the first step() passes are held back: whether they are steps of their own was not known yet.
    assert (found.live, found.steps.tolist(), sum(lost.samples for lost in found.lost)) == (False, [], 3)
    assert "the watch was dropped without watch.close()" in caplog.text


ENDING = """
import os, signal, sys
import torch
import attemper
from tests.monitor.test_history import Stack

model = Stack().eval()
watch = attemper.watch(model, store=sys.argv[1])
with torch.no_grad():
    for _ in range(5):
        model(torch.randn(1, 40, 32))
if sys.argv[2] == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
@pytest.mark.slow("a process of its own")
@pytest.mark.parametrize("end", ["SIGTERM", "exit"])
def test_the_last_pass_is_kept_when_the_process_ends_without_close(tmp_path: Path, end: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ENDING, str(tmp_path / "run"), end]
    done = subprocess.run(command, env=environment, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGTERM if end == "SIGTERM" else 0), done.stderr
    found = attemper.open(tmp_path / "run")
    assert (found.steps.tolist(), found.lost) == ([0, 1, 2, 3, 4], ())
    assert os.listdir(tmp_path / "run") == ["fragment-0.sqlite"]
    assert "Traceback" not in done.stderr


def test_samples_on_their_way_from_a_device_are_waited_for_at_the_end_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = iter([False] * 20)
    monkeypatch.setattr(Snapshot, "on_host", property(lambda _: False))
    for store, done in (("slow", lambda _: next(arrived, True)), ("never", lambda _: False)):
        monkeypatch.setattr(Transfer, "done", property(done))
        model = Stack().train()
        with attemper.watch(model, store=tmp_path / store) as watch:
            list(train(range(3), watch))
            monkeypatch.setattr(process, "FLUSH_SECONDS", 1.0)
            process._end_all()
    assert attemper.open(tmp_path / "slow").steps.tolist() == [0, 1, 2]
    never = attemper.open(tmp_path / "never")
    assert (len(never), [lost.samples for lost in never.lost]) == (0, [3])
    assert "the device was too slow" in never.lost[0].reason


class Deep(Stack):
    def __init__(self, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Own() for _ in range(layers))
        for layer in self.layers:
            layer.heads = heads  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


@pytest.mark.parametrize("another", [lambda: Deep(), lambda: Deep(3), lambda: Deep(1)])
@pytest.mark.quick("1")
def test_another_model_in_the_same_folder_is_told_once_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, another: Callable[[], Deep]
) -> None:
    first = Stack() if len(another().layers) == 2 else Deep()
    with attemper.watch(first.train(), store=tmp_path / "run") as watch:
        list(train(range(5), watch))
    caplog.clear()
    with (
        attemper.watch(another().train(), store=tmp_path / "run") as watch,
        pytest.warns(UserWarning, match="run holds steps 0 to 4, which are no longer shown"),
    ):
        list(train(range(3), watch))
    told = [record.getMessage() for record in caplog.records if "another model" in record.getMessage()]
    assert len(told) == 1
    assert f"run holds a run of another model: {type(first).__name__} with 2 sites and 8 heads, up to step 4" in told[0]
    assert "Give each run a separate folder" in told[0]
    assert len(watch.run.segments) == 2
    with sqlite3.connect(tmp_path / "run" / "fragment-0.sqlite") as file:
        assert file.execute("SELECT count(*) FROM sample").fetchone() == (8,)


def test_a_resumed_training_of_the_same_model_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ways: list[dict[str, Any]] = [{}, {"sites": ["layers.1"]}, {"every": 2}, {}]
    for place, options in enumerate(ways):
        model = Stack().train(place != 2)
        with attemper.watch(model, store=tmp_path / "run", **options) as watch:
            list(train(range(5 * place, 5 * place + 5), watch))
    assert "another model" not in caplog.text


def told(alarms: Any) -> list[Any]:
    return sorted(
        ((a.kind, a.site, a.head, a.since, a.step) for a in alarms if a.ended is None), key=lambda one: str(one)
    )


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.quick("True")
def test_alarms_after_the_loop_went_back_are_those_of_the_run_that_is_left(tmp_path: Path, store: bool) -> None:
    model = Stack().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options: dict[str, Any] = {"store": Store(tmp_path / "run", bits=None)} if store else {}
    with attemper.watch(model, limits={"logits": 500.0}, **options) as watch:
        list(train(range(6), watch))
        collapse(model)
        list(train(range(6, 9), watch))
        assert {alarm.since for alarm in watch.alarms() if alarm.kind == "logits"} == {6}
        model.load_state_dict(before)
        list(train(range(4, 7), watch))
        assert told(watch.alarms()) == told(watch.run.alarms())
        assert not [alarm for alarm in watch.alarms() if alarm.kind == "logits"]
        collapse(model)
        list(train(range(7, 10), watch))
        assert {alarm.since for alarm in watch.alarms() if alarm.kind == "logits"} == {7}
        assert told(watch.alarms()) == told(watch.run.alarms()) != []


@pytest.mark.parametrize("start", [3, None])
@pytest.mark.quick("3")
def test_alarms_of_a_resumed_run_are_those_of_the_run_that_is_left(tmp_path: Path, start: int | None) -> None:
    store = Store(tmp_path / "run", bits=None)
    model = Stack().train()
    with attemper.watch(model, store=store, limits={"logits": 500.0}) as watch:
        list(train(range(3), watch))
        collapse(model)
        list(train(range(3, 6), watch))
    model = Stack().train()
    with Watch(model, store=store, limits={"logits": 500.0}, start=start) as watch:
        list(train(range(4, 6), watch))
        assert told(watch.alarms()) == told(watch.run.alarms())
    assert told(watch.alarms()) == told(attemper.open(tmp_path / "run").alarms())


def test_of_a_long_run_the_first_and_the_last_samples_are_judged_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_JUDGED", 6)
    monkeypatch.setattr(recorder, "FIRST_JUDGED", 2)
    run(range(10), store=tmp_path / "run")
    steps: list[int] = []
    blocks = Ranks.blocks

    def note(ranks: Ranks, moments: Any, names: Any) -> Any:
        steps.extend(moments[0]["step"].tolist())
        return blocks(ranks, moments, names)

    monkeypatch.setattr(Ranks, "blocks", note)
    run(range(10, 11), store=tmp_path / "run")
    assert steps == [0, 1, 6, 7, 8, 9]


def test_a_print_of_the_watch_tells_what_was_dropped(tmp_path: Path) -> None:
    assert re.fullmatch(r"Watch\('Stack': 2 samples in memory, \d+ alarms\)", repr(run(range(2))))
    assert "2 samples in a, 0 dropped" in repr(run(range(2), store=tmp_path / "a"))


def test_a_print_of_the_watch_tells_what_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Fragment, "append", fail)
    with attemper.watch(Stack().train(), store=tmp_path / "a") as watch:
        list(train(range(3), watch))
        until = time.monotonic() + 5
        while "waiting" not in repr(watch) and time.monotonic() < until:
            time.sleep(0.01)
        assert "3 samples in a, 0 dropped, 3 waiting for the disk" in repr(watch)
    assert "3 samples in a, 3 dropped, " in repr(watch)
    assert watch.failures == 3


def test_samples_that_come_from_a_device_later_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(range(6)).run
    monkeypatch.setattr(Snapshot, "on_host", property(lambda _: False))
    same(run(range(6)).run, plain)
