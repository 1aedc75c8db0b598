"""A watch keeps every sample of every head, on disk or in memory, and tells of alarms; none of it touches training."""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import InputError, Store
from attemper.monitor.snapshot import Snapshot
from attemper.readings.judge import judge
from attemper.readings.reading import Alarm
from tests.sites.own_models import Own

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
    steps: range, watch: attemper.Watch, optimizer: torch.optim.Optimizer | None = None, numbered: bool = True
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


def run(steps: range, numbered: bool = True, **options: Any) -> attemper.Watch:
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


def test_a_history_in_memory_is_that_of_a_store(tmp_path: Path) -> None:
    stored = run(range(300), every=2, store=tmp_path / "run")
    same(run(range(300), every=2).run, stored.run)
    same(attemper.open_run(tmp_path / "run"), stored.run)


def test_outputs_gradients_and_random_numbers_are_bit_identical_with_a_store(tmp_path: Path) -> None:
    def trained(watched: Callable[[nn.Module], Any]) -> list[Tensor]:
        model = Stack().train()
        for layer in model.layers:
            layer.dropout = 0.1  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        torch.manual_seed(1)
        output = torch.empty(0)
        with watched(model) as watch:
            for step in range(4):
                output = model(torch.randn(2, 40, 32))
                output.square().mean().backward()
                if isinstance(watch, attemper.Watch):
                    watch.step(step)
        grads = [parameter.grad for parameter in model.parameters()]
        return [output, *(grad for grad in grads if grad is not None), torch.get_rng_state()]

    plain = trained(lambda _: nullcontext())
    ways: list[dict[str, Any]] = [{"store": tmp_path / "run"}, {"store": tmp_path / "rows", "rows": 8}, {}]
    for options in ways:
        found = trained(lambda model, options=options: attemper.watch(model, **options))
        assert all(map(torch.equal, found, plain))


def test_forward_passes_are_steps_until_the_first_step(tmp_path: Path) -> None:
    model = Stack().eval()
    with torch.no_grad(), attemper.watch(model, store=tmp_path / "run") as watch:
        for _ in range(3):
            model(torch.randn(1, 40, 32))
        assert watch.history("entropy").steps.tolist() == [0, 1, 2]
        model(torch.randn(1, 40, 32))
    assert watch.history("entropy").steps.tolist() == [0, 1, 2, 3]
    assert {site.mode for site in watch.run.sites} == {"eval"}


def test_passes_of_the_first_step_are_of_that_step(tmp_path: Path) -> None:
    model = Stack().train()
    with attemper.watch(model, store=tmp_path / "run") as watch:
        for step in range(700, 703):
            for _ in range(3):
                model(torch.randn(1, 40, 32))
            watch.step(step)
        rows = watch.history("rows", site="layers.0", head=0)
    assert rows.steps.tolist() == [0, 1, 700, 701, 702]
    assert rows.values.tolist() == [40, 40, 40, 120, 120]


def test_a_lower_number_replaces_the_history_from_there_on(tmp_path: Path) -> None:
    model = Stack().train()
    with attemper.watch(model, every=2, store=tmp_path / "run") as watch:
        list(train(range(10), watch))
        list(train(range(5, 9), watch))
        assert watch.history("entropy").steps.tolist() == [0, 2, 4, 6, 8]
    assert [segment.samples for segment in watch.run.segments] == [3, 2]


def test_a_run_that_goes_on_without_numbers_counts_on(tmp_path: Path) -> None:
    run(range(5), numbered=False, every=2, store=tmp_path / "run")
    watch = run(range(5), numbered=False, every=2, store=tmp_path / "run")
    assert watch.history("entropy").steps.tolist() == [0, 2, 4, 6, 8]


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
    about = attemper.open_run(tmp_path / "run").about
    assert about["configuration"] == {"hidden_size": 32, "dtype": "torch.float32"}
    assert (about["name"], about["model"], about["every"], about["rows"]) == ("mine", "Stack", 3, 8)
    assert (about["dtype"], about["fewest_keys"], about["limits"]["logits"]) == ("float32", 32, 7.0)
    assert about["backend"] in ("native", "blocked")
    assert "secret" not in str(about)
    one.report(tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()


def test_sites_that_are_not_read_are_kept_with_the_reason(tmp_path: Path) -> None:
    class Nothing(Own):
        def forward(self, x: Tensor) -> Tensor:
            return self.split(x)[0]

    model = Stack().train()
    model.layers.append(Nothing())
    with attemper.watch(model, store=tmp_path / "run") as watch:
        list(train(range(2), watch))
    coverage = watch.run.coverage
    assert coverage.seen == (("layers.0", "self", "train"), ("layers.1", "self", "train"))
    assert coverage.expected == coverage.seen


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
    assert {alarm.step for alarm in standing if alarm.kind == "logits"} == {5}
    lines = [record.getMessage() for record in caplog.records if record.name == "attemper"]
    assert len(lines) == len({(alarm.step, alarm.kind) for alarm, _ in told})
    assert any("step 3: warning logits: layers.1 head 0: " in line and "and 1 more" in line for line in lines)


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


def test_alarms_of_a_live_run_are_those_of_the_finished_one(tmp_path: Path) -> None:
    model = Stack().train()
    with attemper.watch(model, store=Store(tmp_path / "run", bits=None), limits={"logits": 500.0}) as watch:
        list(train(range(6), watch))
        watch.table()
        collapse(model)
        for step in train(range(6, 12), watch):
            if step == 8:
                watch.table()
    found = [(alarm.kind, alarm.site, alarm.head, alarm.since) for alarm in watch._recorder.judge.alarms]
    assert found
    stored = attemper.open_run(tmp_path / "run")
    again = judge((stored.ranks.sample(step) for step in stored.steps), {"logits": 500.0})
    assert [(alarm.kind, alarm.site, alarm.head, alarm.since) for alarm in again] == found


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


def test_a_watch_that_is_dropped_ends_its_file(tmp_path: Path) -> None:
    model = Stack().train()
    watch = attemper.watch(model, store=tmp_path / "run")
    list(train(range(3), watch))
    del watch, model
    gc.collect()
    assert not attemper.open_run(tmp_path / "run").live
    assert len(attemper.open_run(tmp_path / "run")) == 3


def test_a_print_of_the_watch_tells_what_was_dropped(tmp_path: Path) -> None:
    assert re.fullmatch(r"Watch\('Stack': 2 samples in memory, \d+ alarms\)", repr(run(range(2))))
    assert "2 samples in a, 0 dropped" in repr(run(range(2), store=tmp_path / "a"))


def test_a_path_that_is_a_file_is_refused_when_the_watch_opens(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match=r"file is a file\. A run is stored in a folder"):
        attemper.watch(Stack(), store=tmp_path / "file")


def test_a_second_writer_of_a_run_trains_on_and_counts_what_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = attemper.watch(Stack().train(), store=tmp_path / "run")
    with attemper.watch(Stack().train(), store=tmp_path / "run") as second:
        list(train(range(3), second))
        assert second.history("entropy").steps.tolist() == [0, 1, 2]
    first.close()
    assert "another watch is writing to it" in caplog.text
    assert "3 samples are not in the store" in caplog.text
    assert "3 dropped" in repr(second)


def test_samples_that_come_from_a_device_later_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run(range(6)).run
    monkeypatch.setattr(Snapshot, "on_host", property(lambda _: False))
    same(run(range(6)).run, plain)
