"""What a watch's first sample says about later ones: heads that fell, a model that is untrained, steps of alarms."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import InputError
from attemper.readings.alarms import LIMITS, WATCH_LIMITS
from attemper.readings.baseline import Baseline
from attemper.readings.reading import FEWEST_KEYS, HeadReading, SiteReading, VisibleKeyBucket
from attemper.report.verdict import verdict
from tests.sites.own_models import Own


def reading(*entropies: float, mode: str = "train", keys: int = 64, name: str = "layers.0") -> SiteReading:
    """A site whose heads have these normalised entropies over rows that see ``keys`` keys."""
    heads = tuple(
        HeadReading(
            head=head, entropy_nats=1.0, normalized_entropy=value, effective_tokens=None, max_weight=None,
            max_logit=0.0, logit_std=None, mass=None, first_token_mass=None, gini=None,
            normalized_entropy_histogram=(0,) * 32,
            by_visible_keys=(VisibleKeyBucket(keys, 2 * keys - 1, 10, 1.0, value, 0.0),),
            rows=10, empty_rows=0, nonfinite_rows=0,
        )
        for head, value in enumerate(entropies)
    )  # fmt: skip
    return SiteReading(name, "self", mode, keys, keys, heads)


def baseline(**limits: float) -> Baseline:
    return Baseline({**WATCH_LIMITS, **limits}, FEWEST_KEYS)


def kinds(alarms: tuple[attemper.readings.reading.Alarm, ...]) -> list[tuple[str, int | None, str]]:
    return [(alarm.kind, alarm.head, alarm.severity) for alarm in alarms]


def test_the_defaults_of_a_watch_are_these() -> None:
    defaults = {name: p.default for name, p in inspect.signature(attemper.watch).parameters.items() if name != "model"}
    assert defaults == {
        "every": 1, "rows": None, "stats": "all", "sites": None, "store": None, "observe": "beside", "backend": "auto",
        "limits": None, "fewest_keys": 32,
    }  # fmt: skip
    assert {**LIMITS, "fallen": 0.02} == WATCH_LIMITS


@pytest.mark.parametrize("share", [0.02, 0.5])
def test_a_head_has_fallen_below_its_share_of_the_first_sample_and_not_at_it(share: float) -> None:
    law = baseline(fallen=share, collapsed=0.0)
    assert law.alarms((reading(0.5, 0.9),)) == ()
    assert law.alarms((reading(share * 0.5, share * 0.9),)) == ()
    found = law.alarms((reading(math.nextafter(share * 0.5, 0), 0.9),))
    assert kinds(found) == [("fallen", 0, "warning")]
    assert (found[0].site, found[0].limit) == ("layers.0", share * 0.5)
    assert found[0].message.startswith(
        "layers.0 head 0: normalised entropy has fallen from 0.5 in the first sample to "
    )


def test_a_fall_is_measured_from_the_first_sample_and_not_from_the_one_before() -> None:
    law = baseline(fallen=0.5, collapsed=0.0)
    found = [law.alarms((reading(value),)) for value in (0.8, 0.6, 0.45, 0.35, 0.6)]
    assert [kinds(alarms) for alarms in found] == [[], [], [], [("fallen", 0, "warning")], []]


def test_a_site_that_appears_later_begins_with_its_own_first_sample() -> None:
    law = baseline(fallen=0.5)
    law.begin((reading(0.8),))
    assert kinds(law.alarms((reading(0.3, name="late"),))) == []
    assert kinds(law.alarms((reading(0.3), reading(0.1, name="late")))) == [
        ("fallen", 0, "warning"), ("fallen", 0, "warning"),
    ]  # fmt: skip


def test_rows_that_see_too_few_keys_fall_from_nothing() -> None:
    law = baseline(fallen=0.5)
    assert law.alarms((reading(0.9, keys=16),)) == law.alarms((reading(0.001, keys=16),)) == ()


def test_near_uniform_heads_are_not_told_while_more_than_half_of_them_are_so_since_the_first_sample() -> None:
    law = baseline()
    assert law.alarms((reading(0.99, 0.99, 0.99, 0.5),)) == ()
    assert law.untrained
    assert (law.near_uniform, law.judged) == (3, 4)
    half = law.alarms((reading(0.99, 0.99, 0.5, 0.5),))
    assert kinds(half) == [("diffuse", 0, "notice"), ("diffuse", 1, "notice")]
    again = law.alarms((reading(0.99, 0.99, 0.99, 0.99),))
    assert len(again) == 4, "the model was trained before"


def test_a_finished_model_in_eval_mode_is_told_of_each_of_its_heads() -> None:
    assert len(baseline().alarms((reading(0.99, 0.99, mode="eval"),))) == 2


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


def test_a_head_that_falls_is_a_warning_though_nobody_asked_for_the_first_sample() -> None:
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
    assert [(a.kind, a.head, a.severity, a.step) for a in scan.alarms if a.severity != "notice"] == [
        ("fallen", 1, "warning", 3)
    ]
    assert "warning fallen: 1 head, step 3" in str(scan)
    assert [alarm["step"] for alarm in scan.to_dict()["alarms"]] == [3] * len(scan.alarms)


def test_alarms_carry_the_loops_own_number_of_the_step() -> None:
    model, x = Own(), torch.randn(2, 64, 32)
    limits = {"logits": -1e9}

    def steps() -> set[int | None]:
        return {alarm.step for alarm in watch.alarms() if alarm.kind == "logits"}

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
        pytest.raises(InputError, match=r"watch\.step\(step\) must be an int, the loop's"),
    ):
        watch.step(number)


def test_a_limit_of_watches_alone_has_no_meaning_in_a_scan() -> None:
    with pytest.raises(InputError, match="limits must be one of 'collapsed', 'diffuse', 'logits', 'first_token'; got"):
        attemper.scan(Own(), [torch.randn(2, 8, 32)], limits={"fallen": 0.5})


def test_alarms_that_are_held_back_are_told_in_the_table_the_notes_and_the_verdict() -> None:
    model, x = Fresh().train(), torch.randn(2, 64, 32)
    with attemper.watch(model) as watch:
        model(x)
    table = watch.table()
    heads = len(table.reading.heads)
    assert table.alarms == ()
    assert table.reading.untrained_heads == heads
    sentence = f"the model looks untrained: {heads} of {heads} heads are near uniform, and not told one by one"
    assert [note for note in table.notes if note.startswith(sentence)]
    assert "no alarms" not in str(table)
    assert sentence in " ".join(str(table).split())
    assert verdict(table.reading).level == "untrained"
    assert attemper.Scan.from_json(table.to_json()).reading == table.reading
