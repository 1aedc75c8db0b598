"""A run that was stored is judged as its watch judged it, and again with other limits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attemper.errors import InputError
from attemper.readings.alarms import OF_HEADS
from attemper.readings.limits import AlarmLimits
from attemper.readings.sample import Sample
from attemper.results.run import open_run
from attemper.store.compaction import as_kept
from attemper.store.fragment import Fragment
from tests.support.runs import collapsing, restless, written
from tests.support.samples import judge


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Sample]]:
    """A run that collapses, and its samples."""
    folder = tmp_path_factory.mktemp("collapsing") / "a"
    return folder, written(folder, collapsing(260), bits=None)


def test_alarms_are_those_of_the_samples_with_step_and_end(taken: tuple[Path, list[Sample]]) -> None:
    alarms = open_run(taken[0]).alarms()
    assert alarms == list(judge(taken[1]))
    (layer,) = [alarm for alarm in alarms if alarm.kind == "layer_fallen"]
    assert (layer.site, layer.head, layer.severity) == ("layers.1.attn", None, "warning")
    assert layer.since is not None
    assert 200 < layer.since < 240
    (logits,) = [alarm for alarm in alarms if alarm.kind == "logits"]
    assert logits.ended is not None
    assert (logits.site, logits.head) == ("layers.0.attn", 0)


def test_a_run_is_judged_again_with_other_limits(taken: tuple[Path, list[Sample]]) -> None:
    run = open_run(taken[0])
    limits = AlarmLimits(logits=5.0, layer_fallen=None)
    assert run.alarms(limits) == list(judge(taken[1], limits))
    assert run.alarms({"logits": 5.0, "layer_fallen": None}) == run.alarms(limits)
    assert run.alarms(limits) != run.alarms()
    with pytest.raises(InputError, match="Did you mean 'logits'"):
        run.alarms({"logit": 5.0})


def test_the_limits_that_the_watch_noted_are_those_of_the_run(tmp_path: Path, taken: tuple[Path, list[Sample]]) -> None:
    shutil.copytree(taken[0], tmp_path / "a")
    with_limits = AlarmLimits(logits=5.0, sites={"layers.1.*": {"layer_fallen": None}})
    fragment = Fragment(tmp_path / "a" / "fragment-0.sqlite")
    fragment.describe({"limits": with_limits.to_dict() | {"of a later version": 3}, "fewest_keys": 8})
    fragment.close()
    assert open_run(tmp_path / "a").alarms() == list(judge(taken[1], with_limits, 8))


@pytest.mark.parametrize("bits", [15, None])
@pytest.mark.quick("15")
def test_a_stored_run_has_the_alarms_of_its_watch_in_every_field_and_of_every_kind(tmp_path: Path, bits: int) -> None:
    taken = written(tmp_path / "a", restless(220, 1), bits=bits)
    live = [as_kept(one, bits) for one in taken]
    assert open_run(tmp_path / "a").alarms() == list(judge(live))
    assert {alarm.kind for alarm in judge(live)} == {kind.name for kind in OF_HEADS}
    assert all(np.shares_memory(one.values, two.values) for one, two in zip(live, taken, strict=True)) == (bits is None)


def test_at_the_very_limit_numbers_of_15_bits_may_be_judged_otherwise_than_those_that_were_measured(
    tmp_path: Path,
) -> None:
    near = [100.0005 if 50 <= step < 60 else 99.9995 for step in range(100)]
    taken = [replace(one, values=one.values.copy()) for one in collapsing(100)]
    for one, logit in zip(taken, near, strict=True):
        one.values[one.quantities.index("max_logit"), 5] = logit
    raised = [(alarm.kind, alarm.since, alarm.head) for alarm in judge(taken) if alarm.kind == "logits"]
    assert raised == [("logits", 50, 2)]
    written(tmp_path / "all bits", taken, bits=None)
    assert open_run(tmp_path / "all bits").alarms() == list(judge(taken))
    written(tmp_path / "15 bits", taken)
    assert "logits" not in {alarm.kind for alarm in open_run(tmp_path / "15 bits").alarms()}
    again = open_run(tmp_path / "15 bits").alarms({"logits": 99.9})
    assert [(one.kind, one.since) for one in again] == [(one.kind, one.since) for one in judge(taken, {"logits": 99.9})]


def test_a_live_run_is_judged_as_it_grows(tmp_path: Path) -> None:
    fragment = Fragment(tmp_path / "fragment-0.sqlite", bits=None)
    run, fed = open_run(fragment.path or ""), []
    for place, one in enumerate(collapsing(300)):
        fragment.append(one)
        fragment.fold()
        fed.append(one)
        if place % 97 == 96:
            assert run.alarms() == list(judge(fed))
    first = run.judge
    assert run.judge is first
    fragment.close()


def test_what_a_later_segment_replaces_is_not_judged(tmp_path: Path) -> None:
    written(tmp_path / "a", collapsing(300))
    assert open_run(tmp_path / "a").alarms()
    run = open_run(tmp_path / "a")
    run.alarms()
    written(tmp_path / "a", (one for one in collapsing(300, falls=10_000) if one.step >= 100))
    assert "layer_fallen" not in {alarm.kind for alarm in open_run(tmp_path / "a").alarms()}
    assert run.alarms() == open_run(tmp_path / "a").alarms()


def test_a_step_has_the_alarms_that_stood_then(taken: tuple[Path, list[Sample]]) -> None:
    run = open_run(taken[0])
    kinds = {step: {alarm.kind for alarm in run.at(step).alarms} for step in (20, 120, 259)}
    assert "logits" not in kinds[20]
    assert "logits" in kinds[120]
    assert "layer_fallen" in kinds[259]
    assert "logits" not in kinds[259]
    assert {alarm.latest_step for alarm in run.at(120).alarms} == {120}
    assert {alarm.step for alarm in run.at(120).alarms} == {100, 101}
    assert not run.at(120, alarms=False).alarms
    assert run.reading.alarms == ()
