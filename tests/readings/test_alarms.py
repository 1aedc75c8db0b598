"""Every limit of an alarm at its boundary: a default that moves is seen, and so is a comparison that turns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from attemper import InputError
from attemper.readings.alarms import KINDS, alarms, check_limits
from attemper.readings.reading import Alarm, HeadReading, SiteReading, VisibleKeyBucket
from tests.report.readings import head, site

DEFAULTS = {"collapsed": 0.05, "diffuse": 0.95, "logits": 100.0, "first_token": 0.8}
SEVERITIES = {"collapsed": "notice", "diffuse": "notice", "logits": "warning", "first_token": "notice"}
BELOW = ("collapsed",)
"""Kinds that ring below their limit; the others ring above."""


def measured(kind: str, value: float, keys: int = 32) -> HeadReading:
    """A healthy head all of whose rows see ``keys`` keys, with one number as told."""
    numbers = {"normalized_entropy": 0.5, "first_token_mass": 0.1, "max_logit": 10.0}
    field = {"logits": "max_logit", "first_token": "first_token_mass"}.get(kind, "normalized_entropy")
    numbers[field] = value
    bucket = VisibleKeyBucket(keys, 2 * keys - 1, 8, 1.0, numbers["normalized_entropy"], numbers["first_token_mass"])
    return head(0, max_logit=numbers["max_logit"], by_visible_keys=(bucket,))


def raised(one: HeadReading, **options: Any) -> tuple[Alarm, ...]:
    return alarms((replace(site("layers.0.attn", 1), heads=(one,)),), **options)


def test_the_default_limits_are_these() -> None:
    assert check_limits(None) == DEFAULTS


@pytest.mark.parametrize("kind", DEFAULTS)
def test_an_alarm_rings_just_beyond_its_default_limit_and_not_at_it(kind: str) -> None:
    limit = DEFAULTS[kind]
    beyond = math.nextafter(limit, -math.inf if kind in BELOW else math.inf)
    (alarm,) = raised(measured(kind, beyond))
    assert (alarm.kind, alarm.severity, alarm.value, alarm.limit) == (kind, SEVERITIES[kind], beyond, limit)
    assert (alarm.site, alarm.head, alarm.step) == ("layers.0.attn", 0, None)
    assert raised(measured(kind, limit)) == ()


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_limit_that_is_given_takes_the_place_of_its_default_alone(kind: str) -> None:
    limit = {"collapsed": 0.4, "diffuse": 0.6, "logits": 50.0, "first_token": 0.3}[kind]
    value = (limit + DEFAULTS[kind]) / 2
    assert raised(measured(kind, value)) == ()
    (alarm,) = raised(measured(kind, value), limits={kind: limit})
    assert (alarm.kind, alarm.limit) == (kind, limit)
    assert check_limits({kind: limit}) == {**DEFAULTS, kind: limit}


@pytest.mark.parametrize("kind", ["collapsed", "diffuse", "first_token"])
@pytest.mark.parametrize(("keys", "judged"), [(16, False), (32, True)])
def test_sharpness_is_judged_from_32_keys_on(kind: str, keys: int, judged: bool) -> None:
    beyond = 0.0 if kind in BELOW else 1.0
    assert len(raised(measured(kind, beyond, keys))) == judged
    assert len(raised(measured(kind, beyond, 16), fewest_keys=16)) == 1


def test_large_logits_need_no_keys() -> None:
    assert [alarm.kind for alarm in raised(measured("logits", 101.0, 1))] == ["logits"]


def test_one_row_that_is_not_finite_is_critical() -> None:
    one = replace(measured("diffuse", 0.5), nonfinite_rows=1)
    (alarm,) = raised(one)
    assert (alarm.kind, alarm.severity, alarm.value, alarm.limit) == ("nonfinite", "critical", 1.0, None)
    assert "1 of 101 rows" in alarm.message


@pytest.mark.parametrize("value", [float("nan"), True, "high", None])
def test_a_limit_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"limits\['diffuse'\] must be a number, got"):
        check_limits({"diffuse": value})


def test_every_head_of_every_site_is_looked_at() -> None:
    sick = measured("logits", 200.0)
    sites: tuple[SiteReading, ...] = tuple(
        replace(site(name, 1), heads=(replace(sick, head=0), replace(sick, head=1))) for name in ("a", "b")
    )
    assert [(alarm.site, alarm.head) for alarm in alarms(sites)] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_an_alarm_that_judges_what_buckets_do_not_hold_is_refused() -> None:
    with pytest.raises(InputError, match=r"gini is not .* as entropy_nats, normalized_entropy, first_token_mass are"):
        replace(KINDS["diffuse"], statistic="gini")
    assert replace(KINDS["diffuse"], statistic="gini", judged=False).statistic == "gini"
