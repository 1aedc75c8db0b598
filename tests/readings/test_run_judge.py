"""Many samples judged together raise the alarms that they raise one after another, in every field."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from attemper.readings import judge, run_judge
from attemper.readings.alarm_laws import VERSION
from attemper.readings.judge import Judge
from attemper.readings.memory import Columns
from attemper.readings.run_judge import RunJudge
from attemper.readings.sample import Sample, Samples, SiteLabel
from tests.support.runs import collapsing, in_turns, restless, with_gaps
from tests.support.samples import sites


def agree(taken: Iterable[Sample], limits: dict[str, Any] | None = None, fewest_keys: int = 32) -> Judge:
    """The judge of samples one by one, after it was compared with that of all of them together."""
    taken = list(taken)
    one, all_ = Judge(limits, fewest_keys), RunJudge(limits, fewest_keys)
    for sample in taken:
        one.feed(sample)
    all_.feed_all(map(Samples.of, taken))
    compare(one, all_)
    return one


def compare(one: Judge, all_: RunJudge) -> None:
    assert [str(alarm) for alarm in all_.alarms] == [str(alarm) for alarm in one.alarms]
    assert str(all_.standing) == str(one.standing)
    state = attrgetter("step", "untrained", "held_back", "notes")
    assert state(all_) == state(one)


@pytest.mark.slow("takes a second")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.quick("0")
def test_runs_with_gaps_infinite_numbers_and_few_rows_have_the_same_alarms(seed: int) -> None:
    assert len(agree(with_gaps(restless(220, seed), seed)).alarms) > 100


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.quick("0")
def test_so_have_runs_that_are_judged_by_limits_of_sites(seed: int) -> None:
    limits = {"logit_growth": 200, "falling": 0.05, "diffuse": None, "logits": float("inf"), "fallen": 0.5,
              "sites": {"layers.1.*": {"drift": 2, "layer_fallen": 0.6, "logits": 40}}}  # fmt: skip
    assert agree(with_gaps(restless(160, seed), seed), limits, 8).alarms


@pytest.mark.slow("takes a second")
def test_so_has_a_run_that_collapses_and_one_that_looks_untrained() -> None:
    assert agree(collapsing(300)).alarms
    entropy = "judged_normalized_entropy"

    def uniform() -> Iterator[Sample]:
        for one in collapsing(200, falls=130):
            values = one.values.copy()
            values[one.quantities.index(entropy)] = 0.99 if one.step < 90 else values[0]
            yield replace(one, values=values)

    assert agree(uniform()).alarms


@pytest.mark.slow("takes a second")
@pytest.mark.parametrize("apart", [1, 3])
@pytest.mark.quick("3")
def test_so_has_a_run_that_goes_back_and_steps_with_two_passes(apart: int) -> None:
    taken = [replace(one, step=one.step // 6 * apart) for one in restless(130, 3)]
    assert agree([*taken[:100], *taken[60:]]).alarms
    assert agree(in_turns(taken)).alarms


@pytest.mark.slow("takes a second")
def test_so_has_a_run_whose_sites_come_later_and_have_other_heads_and_calls() -> None:
    taken = list(restless(200, 5))
    wide = sites(2, 3)

    def changing() -> Iterator[Sample]:
        for place, one in enumerate(taken):
            if place < 50:
                yield Sample(one.step, 0.0, wide[:1], one.quantities, one.values[:, :3])
            elif place < 100:
                yield one
            elif place < 150:
                labels = (replace(wide[0], heads=2), wide[1])
                yield replace(one, sites=labels, values=one.values[:, 1:])
            else:
                labels = (wide[0], replace(wide[0], name=f"{wide[0].name}#2", layer=7))
                yield replace(one, sites=labels if place % 5 else wide)

    assert agree(changing()).alarms


def test_a_site_of_one_call_of_a_module_is_another_than_the_mean_over_its_calls():
    def call(name: str, layer: int | None) -> SiteLabel:
        return SiteLabel(name, "self", "train", layer, "full", "softmax", 1)

    columns, each = Columns(), (call("a", 0), call("a#2", 1), call("b", None))
    columns.find(each)
    assert columns.replaced.tolist() == [False] * 3
    columns.find((call("a", None), call("b", None)))
    assert columns.replaced.tolist() == [True, True, False, False]
    columns.find((call("b", None),))
    assert not columns.replaced.any()
    columns.find(each)
    assert columns.replaced.tolist() == [False, False, False, True]
    within = (call("c", None), call("c#2", None))
    columns.find(within)
    columns.find(within[:1])
    assert len(columns) == 6
    assert not columns.replaced.any()


def test_a_judge_of_runs_goes_on_sample_by_sample_and_with_more_of_them() -> None:
    taken = list(with_gaps(restless(170, 2), 2))
    one, all_ = Judge(), RunJudge()
    at = 0
    for many in (1, 2, 40, 3, 90, 17):
        all_.feed_all(map(Samples.of, taken[at : at + many]))
        for sample in taken[at : at + many]:
            one.feed(sample)
        compare(one, all_)
        at += many
    for sample in taken[at:]:
        assert str(all_.feed(sample)) == str(one.feed(sample))
        assert str(all_.feed(sample, again=True)) == str(one.feed(sample, again=True))
    compare(one, all_)


def test_no_sample_and_samples_without_heads_raise_nothing() -> None:
    assert agree([]).alarms == ()
    assert agree(Sample(step, 0.0, (), ("max_logit",), np.empty((1, 0), np.float32)) for step in range(30)).alarms == ()


def test_an_alarm_goes_on_where_its_layer_falls_while_its_head_has_too_few_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("judged_normalized_entropy", "rows", "judged_rows", "empty_rows", "nonfinite_rows")

    def taken() -> Iterator[Sample]:
        for step in range(80):
            entropy = [0.9 if step < 40 else 0.01, *[0.9 if step < 44 else 0.08] * 2]
            rows = [4.0 if 44 <= step < 50 else 256.0, 256.0, 256.0]
            values = np.array([entropy, [512.0] * 3, rows, [0.0] * 3, [0.0] * 3], np.float32)
            yield Sample(step, 0.0, sites(1, 3), names, values)

    followed: list[bool] = []
    one_by_one = run_judge._one_by_one
    monkeypatch.setattr(run_judge, "_one_by_one", lambda *given: followed.append(True) or one_by_one(*given))
    ends = {alarm.kind: alarm.ended for alarm in agree(taken()).alarms}
    assert followed
    assert ends["falling"] == 50


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.quick("0")
def test_a_judge_that_was_kept_goes_on_as_the_one_that_saw_the_samples(seed: int, full_size: bool) -> None:
    taken = list(with_gaps(restless(330, seed), seed))
    for cut in (1, 2, 7, 100, 329) if full_size else (7, 100):
        seen, found = RunJudge(), RunJudge()
        seen.feed_all(map(Samples.of, taken[:cut]))
        assert found.restore(dict.fromkeys(one.sites for one in taken[:cut]), seen.to_bytes())
        assert found.to_bytes() == seen.to_bytes()
        compare(seen, found)
        for one in (seen, found):
            one.feed_all(map(Samples.of, taken[cut:]))
        compare(seen, found)


def test_more_alarms_than_are_kept_are_kept_as_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "MOST_ENDED", 20)
    monkeypatch.setattr(run_judge, "MOST_ENDED", 20)
    seen, found = RunJudge(), RunJudge()
    seen.feed_all(map(Samples.of, restless(330, 1)))
    assert found.restore([sites(2, 3)], seen.to_bytes())
    compare(seen, found)
    assert len(found.alarms) >= 20


def test_no_bytes_make_a_judge_raise_anything(full_size: bool) -> None:
    seen, draw = RunJudge(), random.Random(0)
    seen.feed_all(map(Samples.of, restless(150, 2)))
    numbers = zlib.decompress(seen.to_bytes())
    more = list(map(Samples.of, islice(restless(60, 3), 30, None)))
    for _ in range(60 if full_size else 20):
        changed = bytearray(numbers)
        place, many = 8 * draw.randrange(len(numbers) // 8), 8 * draw.randint(1, 40)
        other = draw.choice((-1, 2**62, float("nan"), float("inf"), -1.5))
        changed[place : place + many] = np.array([other]).tobytes() * (len(changed[place : place + many]) // 8)
        found = RunJudge()
        if found.restore([sites(2, 3)], zlib.compress(bytes(changed))):
            assert isinstance(found.alarms, tuple)
            found.feed_all(more)
            assert found.notes is not None


def test_a_change_that_gives_runs_other_alarms_raises_the_version_of_the_laws() -> None:
    found = RunJudge()
    found.feed_all(map(Samples.of, with_gaps(restless(330, 1), 1)))
    told = str([(one.kind, one.site, one.head, one.since, one.ended) for one in found.alarms])
    assert (VERSION, hashlib.sha256(told.encode()).hexdigest()[:16]) == (5, "f8affa295b2c44c9")
