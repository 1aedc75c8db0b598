"""The demo: attention's alarm comes before the loss's where a collapse is injected, and none where it is not."""

from __future__ import annotations

import math

import pytest

from attemper.lab.model import ByteConfig
from attemper.lab.trained.demo import RAISED, DemoRun, Outcome, Progress, run_demo
from tests.support.small_runs import CONFIG, corpus

SHORT = DemoRun(steps=120, config=ByteConfig(layers=2, heads=2, width=32, context=64))
FULL = pytest.mark.slow("the demo at its full length")


def ended(run: DemoRun) -> Outcome:
    return run_demo(run, lambda progress: None)


# Another seed for the healthy one: until the middle both runs of a seed are the same training.
@pytest.mark.slow("trains for seconds; tests/cli/test_demo.py tells it by default")
@pytest.mark.parametrize(("run", "seed"), [(SHORT, 0), pytest.param(DemoRun(), 0, marks=FULL)])
def test_an_injected_collapse_is_heard_from_attention_before_the_loss(run: DemoRun, seed: int):
    outcome = ended(run.change(seed=seed, inject="collapse"))
    assert outcome.attention_alarm is not None
    assert outcome.attention_alarm.since is not None
    heard = math.inf if outcome.loss_alarm is None else outcome.loss_alarm.since
    assert heard is not None
    assert run.steps // 2 <= outcome.attention_alarm.since < heard


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize(("run", "seed"), [(SHORT, 0), (DemoRun(), 1)])
def test_a_healthy_training_is_told_no_warning(run: DemoRun, seed: int):
    outcome = ended(run.change(seed=seed))
    assert outcome.attention_alarm is None, outcome.attention_alarm
    assert [alarm for alarm in outcome.alarms if alarm.severity != "notice"] == []
    assert outcome.loss_alarm is None


def test_every_step_is_told_every_fifth_is_sampled_and_the_same_seed_gives_the_same_run():
    told: list[Progress] = []
    run = DemoRun(steps=12, batch=2, config=CONFIG)
    outcome = run_demo(run, told.append, corpus=corpus())
    again: list[Progress] = []
    run_demo(run, again.append, corpus=corpus())
    assert [progress.loss for progress in again] == [progress.loss for progress in told]
    assert [progress.step for progress in told] == list(range(12))
    assert [progress.step for progress in told if progress.scan is not None] == [0, 5, 10]
    assert outcome.steps == 12
    assert outcome.scan.reading.to_dict() == told[10].scan.reading.to_dict()  # type: ignore[union-attr]


def test_a_training_that_diverges_ends_with_its_loss_alarm():
    run = DemoRun(steps=40, batch=2, rate=1e30, clip=math.inf, config=CONFIG)
    outcome = run_demo(run, lambda progress: None, corpus=corpus())
    assert outcome.steps < 40
    assert outcome.loss_alarm is not None
    assert (outcome.loss_alarm.kind, outcome.loss_alarm.since) == ("nonfinite_loss", outcome.steps - 1)


def test_the_rate_rises_from_the_middle_on_to_thirty_times_its_peak():
    healthy, injected = DemoRun(steps=100), DemoRun(steps=100, inject="collapse")
    assert [healthy.learning_rate(step) for step in range(50)] == [injected.learning_rate(step) for step in range(50)]
    rates = [injected.learning_rate(step) for step in range(50, 100)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(RAISED * healthy.rate)
    assert max(rates[step + 1] - rates[step] for step in range(49)) < 0.03 * rates[-1]
