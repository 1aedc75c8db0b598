"""Every limit of a scan's alarm at its boundary; the list of alarms: what a record must be, and what follows."""

from __future__ import annotations

import copy
import inspect
import json
import math
import pickle
import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

import attemper
from attemper import InputError
from attemper.readings.alarm_laws import LAWS
from attemper.readings.alarms import (
    ALARMS,
    DEFAULT_LIMITS,
    KINDS,
    LIMITS,
    MEAN_OF,
    NO_THRESHOLD,
    SEVERITIES,
    VERDICT_FIELDS,
    AlarmKind,
    by_kind,
    lines,
    with_shared_advice,
)
from attemper.readings.limits import AlarmLimits, alarms
from attemper.readings.reading import Alarm, HeadReading, VisibleKeyBucket
from attemper.readings.sample import QUANTITIES
from attemper.report.texts import Message, advice, say
from research import RESULTS
from tests.report.readings import head, site
from tests.sites.own_models import Own

BELOW = ("collapsed",)
"""Kinds that ring below their limit; the others ring above."""


def measured(kind: str, value: float, keys: int = 32) -> HeadReading:
    """A healthy head all of whose rows see ``keys`` keys, with one number as told."""
    numbers = {"normalized_entropy": 0.5, "first_token_mass": 0.1, "max_logit": 10.0}
    fields = {"logits": "max_logit", "first_token": "first_token_mass", "leak": "leaked_keys"}
    field = fields.get(kind, "normalized_entropy")
    numbers[field] = value
    bucket = VisibleKeyBucket(keys, 2 * keys - 1, 8, 1.0, numbers["normalized_entropy"], numbers["first_token_mass"])
    return head(0, max_logit=numbers["max_logit"], by_visible_keys=(bucket,), leaked_keys=numbers.get("leaked_keys"))


def raised(one: HeadReading, **options: Any) -> tuple[Alarm, ...]:
    return alarms((replace(site("layers.0.attn", 1), heads=(one,)),), **options)


@pytest.mark.parametrize("kind", LIMITS)
def test_an_alarm_rings_just_beyond_its_default_limit_and_not_at_it(kind: str) -> None:
    limit = LIMITS[kind]
    beyond = math.nextafter(limit, -math.inf if kind in BELOW else math.inf)
    (alarm,) = raised(measured(kind, beyond))
    assert (alarm.kind, alarm.severity, alarm.value, alarm.limit) == (kind, KINDS[kind].severity, beyond, limit)
    assert (alarm.site, alarm.head, alarm.step) == ("layers.0.attn", None if KINDS[kind].whole else 0, None)
    assert raised(measured(kind, limit)) == ()


@pytest.mark.parametrize("kind", LIMITS)
def test_a_limit_that_is_given_takes_the_place_of_its_default_alone(kind: str) -> None:
    limit = {"collapsed": 0.4, "diffuse": 0.6, "logits": 50.0, "first_token": 0.3, "leak": 0.001}[kind]
    value = (limit + LIMITS[kind]) / 2
    assert raised(measured(kind, value)) == ()
    (alarm,) = raised(measured(kind, value), limits={kind: limit})
    assert (alarm.kind, alarm.limit) == (kind, limit)
    assert AlarmLimits.of({kind: limit}).everywhere == {**DEFAULT_LIMITS, kind: limit}
    assert raised(measured(kind, value), limits={kind: None}) == ()


def test_one_row_that_is_not_finite_is_critical() -> None:
    one = replace(measured("diffuse", 0.5), nonfinite_rows=1, empty_rows=2)
    (alarm,) = raised(one)
    assert (alarm.kind, alarm.severity, alarm.value, alarm.limit) == ("nonfinite", "critical", 1.0, None)
    assert alarm.message.endswith("rows with a NaN or infinite score: 1 of 103")


# --- limits as a record ---


def test_limits_are_a_record_that_shows_what_differs_from_the_defaults() -> None:
    limits = AlarmLimits(logits=50, drift=None, sites={"*.layers.0.*": {"first_token": 0.95}})
    assert repr(limits) == "AlarmLimits(logits=50.0, drift=None, sites={'*.layers.0.*': {'first_token': 0.95}})"
    assert eval(repr(limits)) == limits != AlarmLimits()
    assert (limits.logits, limits.drift, limits.diffuse) == (50.0, None, 0.95)
    assert copy.deepcopy(limits) == limits == pickle.loads(pickle.dumps(limits))
    with pytest.raises(FrozenInstanceError):
        limits.sites = {}  # type: ignore[misc]
    with pytest.raises(AttributeError, match="AlarmLimits has no limit 'colapsed'"):
        _ = limits.colapsed


def test_the_record_its_document_and_a_mapping_are_the_same_limits() -> None:
    limits = AlarmLimits(logits=50, drift=None, sites={"a*": {"diffuse": 0.9}})
    assert AlarmLimits.of(limits) is limits
    assert AlarmLimits.of(json.loads(json.dumps(limits.to_dict()))) == limits
    assert AlarmLimits.of({"logits": 50, "drift": None, "sites": {"a*": {"diffuse": 0.9}}}) == limits
    assert AlarmLimits.of(None) == AlarmLimits()


def test_limits_of_a_site_are_those_of_the_last_pattern_that_matches() -> None:
    limits = AlarmLimits(logits=50, sites={"layers.*": {"logits": 60, "diffuse": 0.9}, "*.1.attn": {"logits": None}})
    found = [limits.at(name) for name in ("head", "layers.0.attn", "layers.1.attn")]
    assert [one["logits"] for one in found] == [50.0, 60.0, None]
    assert [one["diffuse"] for one in found] == [0.95, 0.9, 0.9]
    sick = replace(measured("logits", 200.0), head=0)
    sites = tuple(replace(site(f"layers.{layer}.attn", 1), heads=(sick,)) for layer in (0, 1))
    assert [(alarm.site, alarm.limit) for alarm in alarms(sites, limits)] == [("layers.0.attn", 60.0)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limits": {"colapsed": 1.0}}, "limits must be one of .*Did you mean 'collapsed'"),
        ({"limits": {"nonfinite": 1.0}}, "limits must be one of"),
        ({"limits": {"sites": {"a": {"logit": 1.0}}}}, "limits must be one of .*Did you mean 'logits'"),
        ({"limits": {"sites": {"a": {"logits": "x"}}}}, r"limits.sites\['a'\]\['logits'\] must be a number"),
        ({"limits": {"sites": ["a"]}}, "limits\\['sites'\\] must map patterns of site names to limits, got"),
        ({"limits": {"sites": {"a": 1.0}}}, "limits\\['sites'\\] must map patterns of site names to limits, got"),
        ({"limits": 0.5}, "limits must be attemper.AlarmLimits or a mapping, got float"),
        *(
            (
                {"limits": {"diffuse": value}},
                r"limits\['diffuse'\] must be a number, or None if it is never to ring; got",
            )
            for value in (float("nan"), True, "high", [1.0])
        ),
    ],
)
def test_a_mistake_in_limits_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AlarmLimits.of(**given)
    with pytest.raises(InputError, match=message):
        attemper.watch(Own(), **given)


def test_the_record_takes_the_names_of_the_list_and_says_their_units() -> None:
    signature = inspect.signature(AlarmLimits)
    assert {name: one.default for name, one in signature.parameters.items()} == {"sites": None, **DEFAULT_LIMITS}
    for kind in ALARMS:
        assert kind.limit is None or f"{kind.name} ({kind.limit:g} {kind.unit})" in str(AlarmLimits.__doc__)
        assert (kind.limit is None) == (not kind.unit)
    with pytest.raises(InputError, match=r"limits must be one of .*Did you mean 'collapsed'"):
        AlarmLimits(colapsed=1.0)


def test_every_record_names_what_there_is() -> None:
    numbers = {field.name for field in fields(HeadReading)}
    words = {"message", "clause", "title", "advice", "line", "unit", "worst", "others", "alone"}
    assert {field.name for field in fields(AlarmKind)} == words | {*VERDICT_FIELDS} - {"judged"}
    for kind in ALARMS:
        elsewhere = kind.law in ("lasting_level", "apart") or kind.of_loss  # which are not of one reading
        assert kind.statistic in numbers or elsewhere
        assert kind.quantity.removeprefix(MEAN_OF * kind.of_mean) in QUANTITIES or kind.of_loss
        assert not kind.beside or kind.beside in QUANTITIES
        assert kind.law in LAWS
        assert kind.severity in SEVERITIES
        assert not kind.part_of or KINDS[kind.part_of].whole
        assert kind.release >= 0
        said = kind.message.format(value=1.0, now=1.0, before=1.0, total=1.0)
        assert all((said, kind.title, *kind.clause))
        assert kind.advice.endswith(".")
    assert len(KINDS) == len(ALARMS)


REMEDIED = ("logits", "layer_fallen", "falling", "logit_growth")
"""What the runs began with that were gone on with remedies, but for notices."""


@pytest.mark.parametrize("kind", ALARMS, ids=lambda kind: kind.name)
def test_each_warning_of_a_run_ends_with_the_line_that_holds_it_or_says_that_none_does(kind: AlarmKind) -> None:
    figures = {"now": 1.0, "before": 1.0, "total": 1.0}
    given = kind.alarm("a", None, 1.0, kind.limit, figures={**figures, "threshold": 27.46}, step=40, since=40)
    if kind.severity == "notice":
        assert given.advice == kind.advice
    elif kind.name in REMEDIED:
        assert given.advice.endswith("QKClip(model, threshold=27.5), and call its step() after the optimizer's.")
        unknown = kind.alarm("a", None, 1.0, kind.limit, figures={**figures, "threshold": math.nan}, step=40, since=40)
        assert unknown.advice == f"{kind.advice} {NO_THRESHOLD}"
    else:
        assert re.search(r"attemper has no line that helps: .* step 40\.$", given.advice)
    assert kind.alarm("a", 0, 1.0, kind.limit, figures=figures).advice == kind.advice, "a scan trains nothing"


def test_no_line_is_a_remedy_that_ended_higher_where_the_fault_did_no_harm() -> None:
    content = json.loads((RESULTS / "early-warning.json").read_text("utf-8"))
    harmful = {one["remedy"] for one in content["branches"] if one["remedied"] - one["unchanged"] > one["floor"]}
    assert harmful == {"learning rate / 3", "roll-back"}
    clip = {kind.name for kind in ALARMS if "QKClip" in kind.line}
    assert clip == set(REMEDIED)
    for kind in ALARMS:
        assert "learning rate / 3" not in kind.line
        assert "ower the" not in re.sub(r"If (the loss|alarms of heads start) .*", "", f"{kind.advice} {kind.line}"), (
            "the rate, with no if"
        )


def test_alarms_are_grouped_by_kind_the_worst_first() -> None:
    def alarm(kind: str, severity: str) -> Alarm:
        return Alarm("a", 0, kind, severity, 1.0, 1.0, "", "")

    given = (alarm("diffuse", "notice"), alarm("logits", "warning"), alarm("diffuse", "notice"), alarm("new", "odd"))
    assert [found[:2] for found in by_kind(given)] == [("warning", "logits"), ("odd", "new"), ("notice", "diffuse")]


def test_the_log_says_each_sentence_of_advice_once() -> None:
    def alarm(kind: str) -> Alarm:
        return KINDS[kind].alarm("a", 1, 0.01, 0.05, (0.4, 30), {"before": 0.5, "now": 0.1}, step=40, since=40)

    told: set[str] = set()
    first, second = (line for line, _ in lines([alarm("falling"), alarm("fallen")], told))
    assert first.startswith("warning falling: a head 1: ")
    assert "The head became nearly one-hot within a few steps. If the loss suffers" in first
    assert second.endswith("The head is much sharper than at first.")
    ((again, heard),) = lines([alarm("falling")], told)
    assert heard
    assert again.startswith("warning falling: a head 1: ")
    assert not any(sentence in again for sentence in told)


def test_a_value_that_json_cannot_hold_is_none_and_its_message_says_it() -> None:
    found = KINDS["logits"].alarm("a", 3, float("inf"), 100.0)
    assert (found.value, found.message) == (None, "a head 3: largest logit inf")
    whole = KINDS["layer_fallen"].alarm(
        "a", None, 0.01, 0.05, (0.4, 30), {"before": 0.5, "total": 4.0}, step=40, since=40
    )
    assert whole.message == (
        "a: normalised entropy of all its heads has fallen, in the mean from 0.5 to 0.01 (it was 0.4 at step 30)"
    )
    assert (whole.head, whole.step, whole.since, whole.ended) == (None, 40, 40, None)


@pytest.mark.parametrize("kind", [one for one in ALARMS if one.others], ids=lambda kind: kind.name)
def test_what_to_do_beside_other_alarms_is_said_in_a_table_that_has_some(kind: AlarmKind) -> None:
    figures = {"now": 1.0, "before": 1.0, "total": 1.0}
    own = kind.alarm("a", None, 1.0, kind.limit, figures=figures, step=40, since=40)
    assert " as well" in own.advice or own.advice.startswith("If ")
    for other in ALARMS:
        beside = other.alarm("b", 0, 1.0, other.limit, figures=figures, step=40, since=40)
        (shown,) = with_shared_advice([own], [own, beside])
        expected = kind.advice if other.name in kind.others else kind.alone
        assert shown.advice == f"{expected} {kind.line.format(step=40)}"
        assert say(advice(shown)) == shown.advice
        assert isinstance(advice(shown), Message)
    assert not re.search(r"If (not|heads|an? alarm)", kind.alone)
