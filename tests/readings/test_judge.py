"""Alarms on history: what rings, since when, when it ends, and what does not ring."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attemper.readings.alarm_laws import LASTING, RECENT, outside
from attemper.readings.alarms import (
    KINDS,
    NO_THRESHOLD,
    OF_HEADS,
    AlarmKind,
    by_kind,
    urgency,
    with_course,
    with_shared_advice,
)
from attemper.readings.judge import Judge
from attemper.readings.limits import AlarmLimits
from attemper.readings.reading import Alarm
from attemper.readings.sample import Sample, SiteLabel
from tests.support.runs import restless, with_gaps
from tests.support.samples import judge

HEALTHY = {
    "max_logit": 12.0,
    "logit_std": 1.0,
    "judged_normalized_entropy": 0.5,
    "judged_first_token_mass": 0.1,
    "rows": 512.0,
    "judged_rows": 256.0,
    "empty_rows": 0.0,
    "nonfinite_rows": 0.0,
}
ENTROPY = "judged_normalized_entropy"


def label(name: str, heads: int, mode: str = "train") -> SiteLabel:
    return SiteLabel(name, "self", mode, None, "full", "softmax", heads)


def sample(step: int, sites: dict[str, dict[str, Any]], mode: str = "train") -> Sample:
    """Site -> what is not healthy there: a number of every head, or one for each."""
    labels, columns = [], []
    for name, given in sites.items():
        heads = max((len(value) for value in given.values() if isinstance(value, list)), default=2)
        labels.append(label(name, heads, mode))
        columns.append(np.array([np.broadcast_to(given.get(q, value), heads) for q, value in HEALTHY.items()]))
    return Sample(step, 0.0, tuple(labels), tuple(HEALTHY), np.concatenate(columns, 1).astype(np.float32))


def series(quantity: str, values: Iterable[Any], apart: int = 10) -> Iterator[Sample]:
    """Samples of one site with two heads: the first has these values, the second is healthy."""
    for place, value in enumerate(values):
        yield sample(apart * place, {"layers.0": {quantity: [value, HEALTHY[quantity]]}})


def told(alarms: Iterable[Alarm], *kinds: str) -> list[tuple[str, int | None, int | None, int | None]]:
    return [(one.kind, one.head, one.since, one.ended) for one in alarms if not kinds or one.kind in kinds]


def noise(samples: int, heads: int, every: int = 10, seed: int = 0) -> Iterator[Sample]:
    """Healthy heads of all sorts: sharp ones and wide ones, on the first token or not, each with noise of its own."""
    rng = np.random.default_rng(seed)
    entropy, first, logit = rng.uniform(0.08, 0.93, heads), rng.uniform(0, 0.7, heads), rng.lognormal(2.5, 0.6, heads)
    wander = np.zeros(heads)
    labels = tuple(label(f"layers.{layer}", heads // 8) for layer in range(8))
    for place in range(samples):
        wander = 0.9 * wander + 0.01 * rng.normal(size=heads)
        numbers = {
            "max_logit": np.minimum(logit, 60) * rng.lognormal(0, 0.1, heads),
            "logit_std": rng.lognormal(0, 0.15, heads),
            ENTROPY: np.clip(entropy + wander * entropy + 0.04 * entropy * rng.normal(size=heads), 0, 1),
            "judged_first_token_mass": np.clip(first + 0.03 * rng.normal(size=heads), 0, 1),
        }
        values = np.array([np.broadcast_to(numbers.get(q, value), heads) for q, value in HEALTHY.items()])
        yield Sample(every * place, 0.0, labels, tuple(HEALTHY), values.astype(np.float32))


# --- each law rings when it must, not before, and ends ---


def test_a_level_rings_while_the_value_is_beyond_it_and_ends_only_well_below():
    found = judge(series("max_logit", [90, 101, 99, 130, 55, 49, 40]))
    (alarm,) = [one for one in found if one.kind == "logits"]
    assert (alarm.since, alarm.ended, alarm.step, alarm.value, alarm.limit) == (10, 50, 10, 101.0, 100.0)
    assert alarm.message == "layers.0 head 0: largest logit 101.0 (it was 90 at step 0)"
    assert (alarm.worst, alarm.worst_step, alarm.latest, alarm.latest_step) == (130.0, 30, 55.0, 40)
    assert told(judge(series("max_logit", [90, 100, 90])), "logits") == []


def clips(alarms: Iterable[Alarm]) -> list[float]:
    """The thresholds that their advice names."""
    return [float(value) for one in alarms for value in re.findall(r"QKClip\(model, threshold=([\d.]+)\)", one.advice)]


def test_each_line_names_a_threshold_that_acts_on_its_head_and_on_all_before_it_live_as_later():
    """A head that joins later with smaller logits is clipped, too. What was said before stays, and a table has one."""
    one, live = Judge({"logits": 30.0, "logit_growth": None}), list[Alarm]()
    for place, logits in enumerate([[200.0, 12, 12], [200.0, 36, 12], [12, 36, 90.0], [200.0, 36, 90]]):
        live += one.feed(sample(10 * place, {"layers.0": {"max_logit": logits}}))
    assert told(one.alarms) == [
        ("logits", 0, 0, 20),
        ("logits", 1, 10, None),
        ("logits", 2, 20, None),
        ("logits", 0, 30, None),
    ]
    assert clips(one.alarms) == [100.0, 18.0, 18.0, 18.0]
    assert clips(alarm for alarm in live if alarm.ended is None) == [100.0, 18.0, 18.0, 18.0]
    assert {*clips(one.standing)} == {*clips(with_shared_advice(one.alarms, one.alarms))} == {18.0}


def test_the_lines_of_all_kinds_name_one_threshold_in_a_table():
    """Heads that fall with small logits, beside one with large logits: two numbers would contradict each other."""
    fall, logits = [0.8] * 10 + [0.01] * 4, [30.0] * 8 + [300.0] * 6
    found = judge(
        sample(10 * place, {"a": {ENTROPY: [value, 0.5], "max_logit": [22.0, 1.0]}, "b": {"max_logit": [logit]}})
        for place, (value, logit) in enumerate(zip(fall, logits, strict=True))
    )
    shown = with_shared_advice(found, found)
    assert {one.kind for one in shown if "QKClip" in one.advice} == {"logits", "logit_growth", "falling"}
    assert {*clips(found)} == {100.0, 11.0}
    assert {*clips(shown)} == {11.0}
    assert with_shared_advice(shown, ()) == shown


@pytest.mark.parametrize(("logits", "threshold"), [([math.nan, 300.0], [100.0, 100.0]), ([30.0, math.nan], [15.0] * 2)])
def test_a_threshold_is_of_the_logits_that_are_known(logits: list[float], threshold: list[float]):
    fall = [0.8] * 10 + [0.01] * 4
    given = [sample(10 * place, {"a": {ENTROPY: [value] * 2, "max_logit": logits}}) for place, value in enumerate(fall)]
    found = [one for one in judge(given, {"layer_fallen": None, "logits": None}) if one.kind == "falling"]
    assert clips(found) == threshold


@pytest.mark.parametrize("logit", [math.nan, 0.0, -3.0, 9.0])
def test_without_a_logit_that_a_clip_can_act_on_the_advice_says_why_it_names_no_threshold(logit: float):
    fall = [0.8] * 10 + [0.01] * 4
    given = [sample(10 * place, {"a": {ENTROPY: [value], "max_logit": [logit]}}) for place, value in enumerate(fall)]
    (found,) = [one for one in judge(given, {"layer_fallen": None}) if one.kind == "falling"]
    assert clips([found]) == []
    assert "..." not in found.advice
    assert found.advice.endswith(NO_THRESHOLD)


def test_growth_is_a_warning_before_the_level_with_its_doubling_time():
    """From 5 the value doubles every 12 steps: from 50 on that is alarming, and past 100 the level is."""
    values = [5.0] * 10 + [5.0 * 2 ** (step / 12) for step in range(0, 80, 4)]
    found = {one.kind: one for one in judge(series("max_logit", values, apart=4))}
    growth, level = found["logit_growth"], found["logits"]
    assert growth.severity == "warning"
    assert (growth.since or 0) <= (level.since or 0) - 8
    assert growth.latest == pytest.approx(12, rel=0.05)
    assert f"doubles in {growth.value:.1f} steps" in growth.message
    assert growth.message.endswith(")")


@pytest.mark.parametrize(("quantity", "kind"), [("max_logit", "logit_growth"), ("logit_std", "spread_growth")])
def test_growth_ends_when_the_value_has_stood_still(quantity: str, kind: str):
    start, end = (8.0, 90.0) if quantity == "max_logit" else (1.0, 12.0)
    found = judge(series(quantity, [start] * 5 + [end] * 60, apart=5))
    ((_, head, since, ended),) = told(found, kind)
    assert (head, since) == (0, 30), "one wild reading is not growth: the second counts"
    assert 50 < (ended or 0) < 230


@pytest.mark.parametrize(
    "values", [[1] * 5 + [49.0] * 20, [8.0] * 5 + [200.0] + [8.0] * 10, [60 + step for step in range(60)]]
)
def test_growth_of_small_values_one_wild_value_and_slow_growth_ring_nothing(values: list[float]):
    assert told(judge(series("max_logit", values, apart=5)), "logit_growth") == []


def test_a_head_has_fallen_below_its_share_of_the_baseline_and_not_at_it():
    limits = {"fallen": 0.25, "collapsed": None, "falling": None}
    assert judge(series(ENTROPY, [0.5, 0.5, 0.125]), limits) == ()
    below = float(np.nextafter(np.float32(0.125), np.float32(0)))
    (alarm,) = judge(series(ENTROPY, [0.5, 0.5, below, 0.34, 0.36]), limits)
    assert (alarm.kind, alarm.head, alarm.severity, alarm.since, alarm.ended) == ("fallen", 0, "notice", 20, 40)
    assert (alarm.value, alarm.limit) == (below, 0.125)
    found = "layers.0 head 0: normalised entropy has fallen from 0.5 at first to 0.12 (it was 0.5 at step 10)"
    assert alarm.message == found


def test_the_baseline_is_the_median_of_the_first_five_healthy_readings():
    limits = {"fallen": 0.5, "collapsed": None, "falling": None}
    values = [0.9, 0.4, 0.6, 0.8, 0.7, 0.5, 0.5, 0.5, 0.34]
    found = judge(series(ENTROPY, values), limits)
    assert told(found) == [("fallen", 0, 10, 30), ("fallen", 0, 80, None)], "against the first until there are five"
    assert [one.limit for one in found] == [pytest.approx(0.45), pytest.approx(0.35)], "of 0.9, 0.8, 0.7, 0.5, 0.5"
    found = judge(series(ENTROPY, [0.6, 0.6, 0.62, 0.58, 0.9, 0.31, 0.29]), limits)
    assert [(one.since, one.limit) for one in found if one.kind == "fallen"] == [(60, pytest.approx(0.3))]


def test_a_head_that_collapses_at_once_does_not_become_its_own_baseline():
    found = judge(series(ENTROPY, [0.6] + [0.005] * 60))
    assert told(found, "fallen") == [("fallen", 0, 10, None)]


def test_falling_is_a_fast_fall_to_almost_nothing():
    fast = [0.6] * 5 + [0.4, 0.2, 0.04, 0.03, 0.03] + [0.03] * 30
    found = [one for one in judge(series(ENTROPY, fast, apart=5)) if one.kind == "falling"]
    ((_, head, since, ended),) = told(found)
    assert (head, since) == (0, 40)
    assert ended is not None
    assert "(it was 0.4 at step 30)" in found[0].message
    slow = list(np.linspace(0.6, 0.03, 100))
    assert told(judge(series(ENTROPY, slow, apart=5)), "falling") == []
    wide = [0.9] * 5 + [0.5, 0.2, 0.1] + [0.1] * 20
    assert told(judge(series(ENTROPY, wide, apart=5)), "falling") == [], "sharp, and not one-hot"


def test_a_head_drifts_from_where_it_had_settled():
    rng = np.random.default_rng(0)
    values = [*(0.5 + 0.01 * rng.normal(size=40)), *np.linspace(0.5, 0.85, 30), *([0.85] * 10), *([0.52] * 5)]
    ((_, head, since, ended),) = told(judge(series(ENTROPY, values)), "drift")
    assert head == 0
    assert 500 < (since or 0) < 700
    assert (ended or 0) >= 800
    (alarm,) = [one for one in judge(series(ENTROPY, values)) if one.kind == "drift"]
    assert alarm.severity == "notice"
    assert "has drifted from 0.5" in alarm.message


def test_a_head_that_never_settles_does_not_drift_and_that_is_said():
    one = Judge()
    for given in series(ENTROPY, np.linspace(0.9, 0.2, 60)):
        one.feed(given)
    assert told(one.alarms, "drift") == []
    assert "not judged yet: drift (still changing: 1 of 2 heads)." in one.notes
    assert not any("rank" in note for note in one.notes), "of one process"


def test_a_head_is_dead_that_is_uniform_in_twenty_readings():
    one = Judge()
    values = [0.5] * 3 + [0.9999] * 25 + [0.9]
    for given in series(ENTROPY, values):
        one.feed(given)
    assert told(one.alarms, "dead") == [("dead", 0, 220, 280)]
    broken = [0.5] * 3 + ([0.9999] * 19 + [0.998]) * 3
    assert told(judge(series(ENTROPY, broken)), "dead") == []


def test_rows_that_are_not_finite_are_critical_at_once_and_end_when_they_are_gone():
    found = judge(series("nonfinite_rows", [0, 0, 3, 1, 0]))
    assert told(found) == [("nonfinite", 0, 20, 40)]
    assert (found[0].severity, found[0].value, found[0].limit, found[0].step) == ("critical", 3.0, None, 20)
    assert "rows with a NaN or infinite score: 3 of 515" in found[0].message
    nothing_else = sample(0, {"a": {"nonfinite_rows": 512.0, "rows": 0.0, "max_logit": np.nan, ENTROPY: np.nan}})
    assert told(judge([nothing_else])) == [("nonfinite", 0, 0, None), ("nonfinite", 1, 0, None)]


# --- nothing begins on the way back ---


def toward(kind: AlarmKind, one: Judge, values: np.ndarray, heads: slice) -> np.ndarray:
    """How far readings of heads are on the way to an alarm of this kind."""
    window = one._memories[kind.quantity].window
    if kind.law == "drift":
        return np.abs(values - window.centre[heads])
    if kind.law == "apart":
        return np.abs(values)
    shares = values / window.baseline[heads] if kind.law == "fall_from_baseline" else values
    return -shares if kind.side == "below" else shares


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.quick("0")
def test_no_alarm_begins_in_a_sample_in_which_its_statistic_moves_away_from_its_limit(seed: int):
    one, begun = Judge(), Counter[str]()
    before: dict[str, np.ndarray] = {}
    for given in restless(250, seed):
        for alarm in one.feed(given):
            if alarm.ended is not None:
                continue
            kind = KINDS[alarm.kind]
            place = given.places[alarm.site, "self", "train"]
            heads = place if alarm.head is None else slice(place.start + alarm.head, place.start + alarm.head + 1)
            if kind.of_mean:
                recent = one._memories[kind.quantity].window.recent[:, place.start]
                was, is_ = (outside(recent[-RECENT:-LASTING], recent[at]) > 0 for at in (-2, -1))
                assert is_ >= was, alarm
                begun[alarm.kind] += 1
                continue
            now = given.of(kind.quantity)
            assert now is not None
            was = before.get(kind.quantity, np.full(6, np.nan))[heads]
            pair = np.array([toward(kind, one, was, heads), toward(kind, one, now[heads].astype(float), heads)])
            known = pair[:, ~np.isnan(pair).any(0)]
            if known.size:
                assert known[1].min() >= known[0].min(), alarm
                begun[alarm.kind] += 1
        for name, values in zip(given.quantities, given.values.astype(float), strict=True):
            before[name] = np.asarray(np.where(np.isnan(values), before.get(name, values), values))
    assert set(begun) == {kind.name for kind in OF_HEADS}, "every kind begins somewhere"


# --- whole layers ---


def collapsing(shares: Iterable[float], apart: int = 10, heads: int = 4) -> Iterator[Sample]:
    """Two layers of which the first goes through these shares of 0.6."""
    for place, share in enumerate(shares):
        sick = {ENTROPY: [0.6 * share * (1 + 0.01 * head) for head in range(heads)]}
        yield sample(apart * place, {"layers.0": sick, "layers.1": {ENTROPY: [0.6] * heads}})


def test_a_layer_that_collapses_is_one_alarm_with_its_step_and_speed():
    found = judge(collapsing([1, 1, 1, 1, 0.5, 0.02, 0.01, 0.008]))
    assert [one for one in found if one.severity != "notice"] == list(found)
    (alarm,) = found
    assert (alarm.kind, alarm.site, alarm.head, alarm.severity) == ("layer_fallen", "layers.0", None, "warning")
    assert (alarm.since, alarm.step, alarm.worst_step, alarm.ended) == (50, 50, 70, None)
    assert alarm.message == (
        "layers.0: normalised entropy of all its heads has fallen, in the mean from 0.61 to 0.012 "
        "(it was 0.609 at step 40)"
    )


def test_heads_that_fell_before_their_layer_end_in_its_alarm_and_ring_again_if_it_ends():
    values = [(0.6, 0.6)] * 3 + [(0.005, 0.6), (0.005, 0.01), (0.005, 0.01), (0.005, 0.5)]
    one = Judge(limits={"collapsed": None, "falling": None})
    events = [
        told(one.feed(sample(10 * place, {"a": {ENTROPY: [first, others, others]}})))
        for place, (first, others) in enumerate(values)
    ]
    assert events[3:] == [
        [("fallen", 0, 30, None)],
        [("layer_fallen", None, 40, None)],
        [],
        [("layer_fallen", None, 40, 60), ("fallen", 0, 60, None)],
    ]
    assert told(one.alarms) == [("fallen", 0, 30, 40), ("layer_fallen", None, 40, 60), ("fallen", 0, 60, None)]
    goes_on = [(alarm.continues_as, alarm.continues_since) for alarm in one.alarms]
    assert goes_on == [("layer_fallen", 40), (None, None), (None, None)]
    assert with_course(one.alarms[0]).endswith("; steps 30 to 40, continues as layer_fallen since step 40")


@pytest.mark.parametrize(("limit", "end"), [(0.1, 0.7), (0.3, 0.7), (0.6, 0.9)])
def test_a_layer_that_stays_near_its_limit_rings_once_until_it_is_back(limit: float, end: float):
    near = [limit * share for share in (0.9, 1.1) * 20] + [end - 0.05, end + 0.05]
    found = judge(collapsing([1] * 5 + near), limits={"layer_fallen": limit, "fallen": None, "falling": None})
    ours = told(found, "layer_fallen")
    assert ours == [("layer_fallen", None, 50, 10 * (5 + len(near) - 1))]


def test_a_site_with_one_head_has_no_alarm_of_the_layer():
    given = [sample(10 * place, {"a": {ENTROPY: [value]}}) for place, value in enumerate([0.6, 0.6, 0.005])]
    assert told(judge(given), "fallen", "layer_fallen") == [("fallen", 0, 20, None)]


# --- what does not ring ---


@pytest.mark.parametrize(("every", "seed"), [(1, 0), (50, 1)])
@pytest.mark.quick("1-0")
def test_a_thousand_healthy_heads_raise_no_warning_in_500_samples(every: int, seed: int):
    found = judge(noise(500, 1000, every, seed))
    assert [one.message for one in found if one.severity != "notice"] == []
    assert Counter(one.kind for one in found)["drift"] <= 2


def test_a_fresh_model_that_learns_rings_nothing():
    """Near uniform at first, then each head sharpens at a pace of its own, and logits grow to 30."""
    rng = np.random.default_rng(0)
    final, pace = rng.uniform(0.15, 0.8, 64), rng.uniform(30, 120, 64)

    def samples() -> Iterator[Sample]:
        for step in range(0, 600, 5):
            done = 1 - np.exp(-max(0, step - 40) / pace)
            numbers = {
                "max_logit": 0.2 + 30 * done * rng.lognormal(0, 0.05, 64),
                "logit_std": 0.1 + done,
                ENTROPY: 0.999 + (final - 0.999) * done,
                "judged_first_token_mass": 0.02 + 0.1 * done,
            }
            values = np.array([np.broadcast_to(numbers.get(q, value), 64) for q, value in HEALTHY.items()])
            yield Sample(step, 0.0, (label("a", 32), label("b", 32)), tuple(HEALTHY), values.astype(np.float32))

    one = Judge()
    for place, given in enumerate(samples()):
        begun = one.feed(given)
        assert not [alarm for alarm in begun if alarm.severity != "notice"]
        if place < 8:
            assert begun == ()
            assert (one.untrained, one.held_back) == (True, 64)
    assert not one.untrained
    assert one.held_back is None
    assert [alarm for alarm in one.standing if alarm.kind != "drift"] == []


def test_a_fresh_model_whose_attention_collapses_is_reported_from_its_first_state():
    given = [0.99] * 3 + [0.6, 0.1, 0.02, 0.01, 0.01]
    found = judge(sample(10 * i, {"a": {ENTROPY: [value] * 4}}) for i, value in enumerate(given))
    assert told(found, "layer_fallen") == [("layer_fallen", None, 50, None)]


@pytest.mark.parametrize("goal", [0.3, 0.7])
def test_a_layer_whose_entropy_leaves_its_range_is_told_in_the_second_sample_and_a_slow_one_is_not(goal: float):
    rng = np.random.default_rng(0)

    def taken(values: Iterable[float]) -> Iterator[Sample]:
        for place, value in enumerate(values):
            heads = (value * (1 + 0.02 * rng.normal(size=4))).tolist()
            yield sample(10 * place, {"layers.0": {ENTROPY: heads}, "layers.1": {ENTROPY: [0.5] * 4}})

    (alarm,) = (one for one in judge(taken([0.5] * 40 + [goal] * 40)) if one.kind == "entropy_shift")
    assert (alarm.kind, alarm.site, alarm.head, alarm.severity) == ("entropy_shift", "layers.0", None, "warning")
    assert (alarm.since, alarm.limit) == (410, 5.0)
    assert alarm.ended is not None
    assert alarm.ended <= 430, "what follows is the range"
    assert alarm.message.startswith("layers.0: normalised entropy has left its range within three readings")
    assert not told(judge(taken(np.linspace(0.5, goal, 80))), "entropy_shift")
    assert not told(judge(taken([0.5] * 40 + [goal] + [0.5] * 40)), "entropy_shift"), "one batch is no shift"
    assert not told(judge(taken([0.5] * 12 + [goal] * 40)), "entropy_shift"), "too few readings to know a range"


def test_too_few_rows_are_not_judged_and_leave_an_alarm_as_it_was():
    few = {"judged_rows": 4.0}
    one = Judge({"collapsed": None, "falling": None})
    for place, (value, more) in enumerate([(0.6, {}), (0.6, {}), (0.001, few), (0.001, {}), (0.6, few), (0.6, {})]):
        one.feed(sample(place, {"a": {ENTROPY: [value, 0.5], **more}}))
    assert told(one.alarms) == [("fallen", 0, 3, 5)]


# --- a run, live and again ---


def gapped(samples: int, seed: int) -> list[Sample]:
    return list(with_gaps(restless(samples, seed), seed))


AFTER = dict.fromkeys(
    ("ended", "worst", "worst_step", "latest", "latest_step", "continues_as", "continues_since"), None
)
"""What an alarm does not know when it begins."""


@pytest.mark.slow("takes seconds")
def test_an_alarm_has_one_set_of_numbers_from_its_beginning_on():
    """What was told when it began, what stood meanwhile, and what a finished run says agree in every field, but for
    the end, the worst and the latest, which are those of the samples so far.
    """
    one, told_then, over = Judge(), dict[tuple[Any, ...], Alarm](), list[Alarm]()
    for given in restless(250, 1):
        for alarm in one.feed(given):
            over += [alarm] if alarm.ended is not None else []
            if KINDS[alarm.kind].law == "fall_from_baseline" and alarm.worst is not None and alarm.latest is not None:
                assert alarm.worst <= alarm.latest
            if alarm.ended is None:
                assert (alarm.value, alarm.step) == (alarm.worst, alarm.worst_step) == (alarm.latest, alarm.latest_step)
                assert alarm.step == alarm.since == given.step
                told_then[_begin(alarm)] = replace(alarm, **AFTER)
        for alarm in one.standing:
            assert replace(alarm, **AFTER) == told_then[_begin(alarm)]
    found = [replace(alarm, **AFTER) for alarm in one.alarms]
    assert found == [told_then[_begin(alarm)] for alarm in one.alarms]
    assert len(told_then) == len(found), "each is told when it begins"
    assert set(map(str, over)) <= {str(alarm) for alarm in one.alarms if alarm.ended is not None}
    assert {alarm.kind for alarm in found} == {kind.name for kind in OF_HEADS}


def test_the_worst_and_the_latest_are_named_with_their_steps_and_unit():
    units = (
        *("visible_keys", "entropy_shift", "falling", "logit_growth"),
        *("spread_growth", "drift", "rank_differs", "loss_spike"),
    )
    for kind in KINDS.values():
        alarm = Alarm("a", 0, kind.name, "notice", 13.4, 1.0, "a head 0: it rings", "", 98, 98)
        unit = f" {kind.unit}" if kind.name in units else ""
        assert with_course(replace(alarm, since=None)) == "a head 0: it rings", "of a scan"
        same = replace(alarm, worst=13.4, worst_step=98, latest=13.4, latest_step=98)
        assert with_course(same) == "a head 0: it rings; since step 98"
        later = replace(same, worst=8.21, worst_step=1000, latest=None, latest_step=1001)
        assert with_course(later) == (
            f"a head 0: it rings; since step 98, worst 8.21{unit} at step 1,000, latest –{unit} at step 1,001"
        )
        assert with_course(replace(later, ended=1002)).startswith("a head 0: it rings; steps 98 to 1,002, worst 8.21")


def _begin(alarm: Alarm) -> tuple[Any, ...]:
    return alarm.kind, alarm.site, alarm.head, alarm.since


def test_a_sample_that_is_fed_again_takes_the_place_of_the_one_before():
    samples, one = gapped(80, 0), Judge()
    rng = np.random.default_rng(0)
    for given in samples:
        for _ in range(rng.integers(0, 3)):
            part = replace(given, values=given.values * rng.uniform(0.1, 3, given.values.shape).astype(np.float32))
            one.feed(part if rng.random() < 0.7 else given, again=_ > 0)
        one.feed(given, again=one.step == given.step)
    assert list(map(str, one.alarms)) == list(map(str, judge(samples)))


def test_an_alarm_of_a_sample_that_is_fed_again_is_told_once():
    one = Judge()
    calm, wild = sample(0, {"a": {}}), sample(1, {"a": {"max_logit": 500.0}})
    one.feed(calm)
    assert [alarm.kind for alarm in one.feed(wild)] == ["logits"] * 2, "a second reading says nothing of speed"
    assert one.feed(wild, again=True) == ()
    assert one.feed(sample(1, {"a": {}}), again=True) == ()
    assert one.alarms == ()


def test_a_head_is_judged_alike_alone_and_beside_others():
    """Where the state of the whole model does not matter: a level of 2 is never beyond, so it never looks untrained."""
    limits = AlarmLimits(diffuse=2.0, layer_fallen=None)
    samples = gapped(120, 0)
    together = judge(samples, limits)
    for one in {label.key: label for given in samples for label in given.sites}.values():
        mine = list(map(_unclipped, judge((_only(given, one) for given in samples if one in given.sites), limits)))
        assert mine
        assert [text for alarm in together if alarm.site == one.name and (text := _unclipped(alarm)) in mine] == mine


def _unclipped(alarm: Alarm) -> str:
    """All of it but the threshold, which is one for all heads."""
    return re.sub(r"threshold=[\d.]+", "", str(alarm))


def _only(given: Sample, one: SiteLabel) -> Sample:
    return replace(given, sites=(one,), values=given.values[:, given.places[one.key]])


def test_the_memory_does_not_grow_with_the_samples():
    def size(one: Judge) -> int:
        arrays = (array for memory in one._memories.values() for array in vars(memory).values())
        return sum(array.nbytes for array in arrays if hasattr(array, "nbytes"))

    one, sizes = Judge(), set[int]()
    for given in noise(300, 64):
        one.feed(given)
        sizes.add(size(one))
    assert len(sizes) == 1


def test_other_limits_for_the_same_run_and_for_single_sites():
    samples = [sample(10 * i, {"a": {"max_logit": 70.0}, "b": {"max_logit": 70.0}}) for i in range(3)]
    assert judge(samples) == ()
    assert {one.site for one in judge(samples, {"logits": 60})} == {"a", "b"}
    at_b = judge(samples, AlarmLimits(sites={"b": {"logits": 60}}))
    assert [(one.site, one.limit) for one in at_b] == [("b", 60.0)] * 2
    assert judge(samples, AlarmLimits(logits=60, sites={"*": {"logits": None}})) == ()


def test_a_run_that_goes_back_is_judged_on():
    one = Judge()
    for step, value in [(0, 10), (100, 10), (200, 20), (150, 40), (160, 80), (170, 160)]:
        one.feed(sample(step, {"a": {"max_logit": [value, 10.0]}}))
    assert told(one.alarms) == [("logit_growth", 0, 170, None), ("logits", 0, 170, None)]


def test_a_site_that_comes_back_with_other_heads_is_another_one():
    one = Judge({"collapsed": None, "falling": None})
    for step, values in enumerate([[0.6, 0.6], [0.6, 0.6], [0.01] * 4, [0.01] * 4]):
        one.feed(sample(step, {"a": {ENTROPY: values}}))
    assert one.alarms == ()


def test_what_the_samples_do_not_hold_is_not_judged_and_that_is_said():
    given = sample(0, {"a": {"max_logit": 500.0}})
    part = replace(given, quantities=given.quantities[1:], values=given.values[1:])
    one = Judge()
    assert one.feed(part) == ()
    assert "not judged: logits, logit_growth (needs max_logit)." in one.notes


# --- a model that is untrained, and sites that are late ---


def entropies(step: int, *values: float, name: str = "layers.0", mode: str = "train") -> Sample:
    return sample(step, {name: {ENTROPY: list(values)}}, mode)


def test_a_site_that_appears_later_begins_with_its_own_first_sample() -> None:
    one = Judge({"fallen": 0.5})
    one.feed(entropies(0, 0.8))
    one.feed(entropies(1, 0.3, name="late"))
    assert one.standing == ()
    one.feed(sample(2, {"layers.0": {ENTROPY: [0.3]}, "late": {ENTROPY: [0.1]}}))
    assert told(one.standing) == [("fallen", 0, 2, None), ("fallen", 0, 2, None)]


def test_near_uniform_heads_are_not_told_while_more_than_half_of_them_are_so_since_the_first_sample() -> None:
    one = Judge({"drift": None})
    assert one.feed(entropies(0, 0.99, 0.99, 0.99, 0.5)) == ()
    assert (one.untrained, one.held_back) == (True, 3)
    assert told(one.feed(entropies(1, 0.99, 0.99, 0.5, 0.5))) == [("diffuse", 0, 1, None), ("diffuse", 1, 1, None)]
    assert (one.untrained, one.held_back) == (False, None)
    assert one.standing[0].message == "layers.0 head 0: normalised entropy 0.990 is near uniform", "as it was before"
    one.feed(entropies(2, 0.99, 0.99, 0.99, 0.99))
    assert len(one.standing) == 4, "the model was trained before"
    assert len(judge([entropies(0, 0.99, 0.99, mode="eval")])) == 2, "a finished model"


def test_evaluation_between_training_steps_changes_nothing_for_the_heads_in_training():
    values = [5.0] * 8 + [5.0 * 2 ** (step / 12) for step in range(0, 80, 4)]
    training = list(series("max_logit", values, apart=4))
    both = [one for given in training for one in (given, sample(given.step, {"layers.0": {}}, mode="eval"))]
    assert judge(both) == judge(training)
    assert {one.kind for one in judge(both)} == {"logits", "logit_growth"}


# --- ranks ---


def merged(differences: Iterable[float], ranks: Iterable[int], heads: int = 2) -> Iterator[Sample]:
    """Samples of one site of several ranks: how far apart they are, and which rank is farthest."""
    for place, (difference, rank) in enumerate(zip(differences, ranks, strict=True)):
        own = sample(10 * place, {"layers.0": {"max_logit": [12.0] * heads}})
        beside = np.broadcast_to(np.array([[difference], [rank]], np.float32), (2, heads))
        names = (*own.quantities, "rank_difference", "farthest_rank")
        yield replace(own, quantities=names, values=np.concatenate([own.values, beside]))


@pytest.mark.parametrize("heads", [1, 4])
def test_a_rank_that_differs_in_three_readings_in_a_row_is_one_alarm_of_the_site_that_names_it(heads: int):
    found = judge(merged([0.3, 0.02, 0.3, 0.25, 0.2, 0.4, 0.01], [1, 2, 5, 5, 5, 5, 0], heads))
    (alarm,) = [one for one in found if one.kind == "rank_differs"]
    assert (alarm.head, alarm.since, alarm.ended, alarm.severity) == (None, 50, 60, "warning")
    assert alarm.message == (
        "layers.0: normalised entropy on rank 5 is 0.2 from the mean of all ranks, in three readings"
    )


def test_ranks_that_differ_now_and_then_or_have_another_limit_raise_nothing():
    apart = [0.3, 0.3, 0.01] * 4
    assert told(judge(merged(apart, [3] * 12)), "rank_differs") == []
    assert told(judge(merged([0.3] * 5, [3] * 5), {"rank_differs": 0.5}), "rank_differs") == []


def test_of_alarms_that_begin_together_the_worst_comes_first_and_every_group_has_that_order():
    """The head furthest beyond its limit, whichever kind of view lists it, and whether it has ended or stands."""
    one = Judge()
    for place, logits in enumerate([[20.0] * 3, [110.0, 120.0, 300.0], [110.0, 120.0, 10.0]]):
        sites = {"layers.0": {"max_logit": logits}, "layers.1": {"max_logit": logits[::-1]}}
        one.feed(sample(10 * place, sites))
    found = [(alarm.site, alarm.head) for alarm in one.alarms if alarm.kind == "logits"]
    first = ["layers.0", "layers.1"]
    assert found == [(first[0], 2), (first[1], 0), (first[0], 1), (first[1], 1), (first[0], 0), (first[1], 2)]
    for alarms in (one.alarms, one.alarms[::-1]):
        (group,) = (group for (_, kind, _), group in by_kind(alarms).items() if kind == "logits")
        assert [alarm.value for alarm in group] == [300, 300, 120, 120, 110, 110]
    slow, fast = (Alarm("a", 0, "logit_growth", "warning", days, 20.0, "", "", since=3) for days in (19.0, 2.0))
    assert urgency(fast) < urgency(slow), "a short doubling time is the worst"
