"""Alarms of the loss: what rings, what does not, and that judging step by step or all at once is the same."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attemper.readings.alarm_laws import LOSSES, spike
from attemper.readings.limits import AlarmLimits
from attemper.readings.loss_judge import LossJudge


def judged(losses, limits=None, steps=None, at_once: int | None = None) -> LossJudge:
    one = LossJudge(AlarmLimits.of(limits))
    values = np.asarray(losses, np.float32)
    steps = np.arange(len(values)) if steps is None else steps
    size = at_once or max(1, len(values))
    for first in range(0, len(values), size):
        if at_once == 1:
            one.feed_one(int(steps[first]), float(values[first]))
        else:
            one.feed(steps[first : first + size], values[first : first + size])
    return one


def healthy(many: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(2.0, 0.05, many)


def wild(many: int, seed: int) -> np.ndarray:
    """Spikes, levels, NaN and infinity."""
    rng = np.random.default_rng(seed)
    found = healthy(many, seed)
    for _ in range(many // 60):
        start, long = rng.integers(many), rng.integers(1, 80)
        found[start : start + long] += rng.choice([0.1, 0.3, 5.0, -1.0])
    found[rng.integers(many, size=many // 100)] = rng.choice([math.nan, math.inf, -math.inf])
    return found


def test_the_law_is_the_third_largest_of_five_or_a_third_of_the_last():
    losses = np.concatenate([np.tile([1.0, 3.0], 25), [2.0, 9.0, 2.0, 7.0, 5.0]])[:, None]
    measure, mean = spike(losses)
    assert (measure[0], mean[0]) == (3.0, 2.0)
    losses[-1] = 2.0 + 3 * 3.5
    assert spike(losses)[0][0] == 5.0
    losses[-4:-1] = 2.0
    assert spike(losses)[0][0] == 3.5
    losses[-1] = 2.0 - 3 * 3.5
    assert spike(losses)[0][0] == 3.5, "below alike"
    losses[-5:-1] = 2.0 - 9
    assert spike(losses)[0][0] == 3.5, "three that are low are no trouble"


@pytest.mark.parametrize("rise", [0.3, 1.0])
def test_a_loss_that_rises_to_another_level_rings_within_five_steps(rise: float):
    losses = healthy(300)
    losses[200:] += rise
    (alarm,) = judged(losses).alarms
    assert (alarm.kind, alarm.site, alarm.head, alarm.severity, alarm.limit) == (
        "loss_spike",
        "loss",
        None,
        "warning",
        3.0,
    )
    assert alarm.since is not None
    assert 200 <= alarm.since < 205
    assert alarm.ended is not None, "it is over once that is the level"
    assert alarm.message.startswith(f"loss: {losses[alarm.since]:.4g} is far from its mean over the 50 steps before, ")
    assert alarm.worst is not None
    assert alarm.value is not None
    assert alarm.worst >= alarm.value


@pytest.mark.parametrize("sign", [1, -1])
def test_one_step_rings_if_it_is_very_far_and_not_if_it_may_be_a_hard_batch(sign: int):
    hard, broken = healthy(200), healthy(200)
    hard[150] += sign * 6 * 0.05
    broken[150] += sign * 20 * 0.05
    assert judged(hard).alarms == []
    (alarm,) = judged(broken).alarms
    assert alarm.since == 150


def test_healthy_losses_do_not_ring_be_they_noisy_skewed_or_falling():
    rng = np.random.default_rng(0)
    falling = 2 + 6 * np.exp(-np.arange(20_000) / 3000) + rng.normal(0, 0.05, 20_000)
    assert judged(falling).alarms == []
    assert len(judged(rng.gamma(8, 0.3, 20_000)).alarms) <= 1
    assert judged(np.ones(500)).alarms == []
    assert judged(np.where(np.arange(500) < 300, 1.0, 1.001)).alarms == [], "less than the least noise"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_rings_at_once_and_ends_with_the_next_number(number: float):
    losses = healthy(100)
    losses[10:13] = number
    (alarm,) = judged(losses).alarms
    assert (alarm.kind, alarm.severity, alarm.since, alarm.ended) == ("nonfinite_loss", "critical", 10, 13)
    assert alarm.message == "loss: it is NaN or infinite"
    assert (alarm.value, alarm.worst, alarm.latest, alarm.latest_step) == (None, None, None, 12)
    assert judged([number]).standing[0].since == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("at_once", [1, 7])
@pytest.mark.turns(2)
def test_step_by_step_and_all_at_once_give_the_same_alarms_in_every_field(seed: int, at_once: int):
    losses = wild(1500, seed)
    one, all_ = judged(losses, at_once=at_once), judged(losses)
    assert one.alarms == all_.alarms
    assert one.standing == all_.standing
    assert {alarm.kind for alarm in all_.alarms} == {"loss_spike", "nonfinite_loss"}


def test_an_alarm_is_told_when_it_begins_and_when_it_ends():
    losses = healthy(200)
    losses[150] += 5
    one = LossJudge(AlarmLimits())
    changed = [alarm for step, loss in enumerate(losses) for alarm in one.feed_one(step, float(loss))]
    assert [(alarm.since, alarm.ended is None) for alarm in changed] == [(150, True), (150, False)]


def test_a_limit_of_none_never_rings_and_another_rings_earlier():
    losses = healthy(200)
    losses[150:] += 0.12
    assert judged(losses, {"loss_spike": None}).alarms == []
    assert judged(losses, {"loss_spike": 1.0}).alarms
    assert judged(losses, {"sites": {"loss": {"loss_spike": None}}, "loss_spike": 1.0}).alarms == []


def test_gaps_and_long_runs_are_judged_by_losses_and_not_by_steps():
    losses = healthy(LOSSES + 5)
    losses[-1] += 5
    (alarm,) = judged(losses, steps=10 * np.arange(len(losses))).alarms
    assert alarm.since == 10 * (len(losses) - 1)
