"""What a watch says of a sample after others: heads that fell, a model that is untrained, steps of alarms."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import InputError
from attemper.report.headline import verdict
from tests.sites.own_models import Own


def test_the_defaults_of_a_watch_are_these() -> None:
    defaults = {name: p.default for name, p in inspect.signature(attemper.watch).parameters.items() if name != "model"}
    assert defaults == {
        "every": 1, "rows": None, "stats": "all", "sites": None, "store": None, "observe": "auto", "backend": "auto",
        "limits": None, "fewest_keys": 32, "on_alarm": None, "reduce": None, "shadow_batch": None,
    }  # fmt: skip


def test_the_table_of_a_watch_says_which_alarms_have_nothing_to_judge_yet() -> None:
    model, x = Own().train(), torch.randn(2, 64, 32)
    with attemper.watch(model) as watch:
        model(x)
        watch.step()
        table = watch.table()
    assert table.not_judged == (
        "not judged yet: drift (still changing: 4 of 4 heads).",
        "not judged: loss_spike, nonfinite_loss (needs loss).",
    )
    assert table.not_judged[0] in str(table)


class Fresh(nn.Module):
    """Many heads as they are before training: near uniform."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Own() for _ in range(layers))
        for layer in self.layers:
            layer.qkv.weight.data *= 0.01  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def test_a_fresh_model_in_training_raises_no_alarm_and_a_scan_of_it_tells_every_head() -> None:
    model, x = Fresh().train(), torch.randn(2, 64, 32)
    with attemper.watch(model) as watch:
        model(x)
        watch.step()
        assert watch.alarms() == ()
    assert [alarm.kind for alarm in attemper.scan(model, [x]).alarms] == ["diffuse"] * 8


def test_a_head_that_falls_is_told_though_nobody_asked_for_the_first_sample() -> None:
    model, x = Own().train(), torch.randn(2, 64, 32)
    model.qkv.weight.data *= 0.5
    with attemper.watch(model, limits={"logits": 1e9}) as watch:
        for _ in range(3):
            model(x)
            watch.step()
        model.qkv.weight.data[8:16] *= 1000  # queries of head 1
        model(x)
        watch.step()
        scan = watch.table()
    assert [(a.kind, a.head, a.severity, a.step) for a in scan.alarms if a.kind == "fallen"] == [
        ("fallen", 1, "notice", 3)
    ]
    assert "notice fallen: 1 head, since step 3" in str(scan)
    assert [alarm["step"] for alarm in scan.to_dict()["alarms"]] == [3] * len(scan.alarms)


def test_alarms_carry_the_loops_own_number_of_the_step() -> None:
    model, x = Own(), torch.randn(2, 64, 32)
    limits = {"logits": -1e9}

    def steps() -> set[int | None]:
        return {alarm.latest_step for alarm in watch.alarms() if alarm.kind == "logits"}

    with attemper.watch(model, every=2, limits=limits) as watch:
        model(x)
        assert steps() == {0}
        watch.step(1000)
        assert steps() == {1000}
        model(x)
        watch.step()
        assert steps() == {1000}, "1001 was not sampled"
        model(x)
        assert steps() == {1002}
        watch.step()
        assert steps() == {1002}
    with attemper.watch(model, every=2, limits=limits) as watch:
        for _ in range(4):
            model(x)
        assert steps() == {2}, "passes are counted where no step is"
    assert {alarm.step for alarm in attemper.scan(model, [x], limits=limits).alarms} == {None}


@pytest.mark.parametrize("number", [1.0, "3", True])
def test_a_step_that_is_no_number_is_an_error(number: Any) -> None:
    with (
        attemper.watch(Own()) as watch,
        pytest.raises(InputError, match=r"watch\.step\(step\) must be an int of 64 bits, the loop's"),
    ):
        watch.step(number)


def test_a_loss_in_the_place_of_a_step_gets_the_line_that_stores_it() -> None:
    with attemper.watch(Own()) as watch:
        with pytest.raises(InputError, match=r"got tensor\(4\.5700\)\. For the loss: watch\.step\(loss=loss\)\.$"):
            watch.step(torch.tensor(4.57))  # pyright: ignore[reportArgumentType]
        with pytest.raises(InputError, match=r"number of a step, got 9+\.$"):
            watch.step(int("9" * 20))


def test_a_limit_of_watches_alone_has_no_meaning_in_a_scan() -> None:
    with pytest.raises(InputError, match=r"limits must be one of 'collapsed', .*, 'first_token', 'leak'; got"):
        attemper.scan(Own(), [torch.randn(2, 8, 32)], limits={"fallen": 0.5})


def test_alarms_that_are_held_back_are_told_in_the_table_the_notes_and_the_verdict() -> None:
    model, x = Fresh().train(), torch.randn(2, 64, 32)
    with attemper.watch(model) as watch:
        model(x)
    table = watch.table()
    heads = len(table.reading.heads)
    assert table.alarms == ()
    assert table.reading.untrained_heads == heads
    sentence = f"the model looks untrained: {heads} of {heads} heads are near uniform. Until this changes, they"
    assert [note for note in table.notes if note.startswith(sentence)]
    assert "no alarms" not in str(table)
    assert sentence in " ".join(str(table).split())
    assert verdict(table.reading).level == "untrained"
    assert attemper.Scan.from_json(table.to_json()).reading == table.reading
