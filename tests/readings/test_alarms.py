"""The list of alarms: what a record must be, and what follows from it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from attemper import InputError
from attemper.readings.alarms import ALARMS, DEFAULT_LIMITS, KINDS, LIMITS, OF_ONE_SAMPLE, SEVERITIES, by_kind, lines
from attemper.readings.laws import LAWS
from attemper.readings.reading import Alarm, HeadReading
from attemper.readings.sample import QUANTITIES


def test_an_alarm_that_judges_what_is_not_known_of_long_rows_is_refused() -> None:
    with pytest.raises(InputError, match=r"gini is not .* as normalized_entropy, first_token_mass are"):
        replace(KINDS["diffuse"], statistic="gini")
    assert replace(KINDS["diffuse"], statistic="gini", judged=False).statistic == "gini"


def test_every_record_names_what_there_is() -> None:
    numbers = {field.name for field in fields(HeadReading)}
    for kind in ALARMS:
        assert kind.statistic in numbers or kind.law == "lasting_level" or kind.of_loss  # which are not of one reading
        assert kind.quantity in QUANTITIES or kind.of_loss
        assert not kind.beside or kind.beside in QUANTITIES
        assert kind.law in LAWS
        assert kind.severity in SEVERITIES
        assert not kind.part_of or KINDS[kind.part_of].whole
        assert kind.release >= 0
        said = kind.message.format(value=1.0, now=1.0, before=1.0, total=1.0)
        assert all((said, kind.title, *kind.clause))
        assert kind.advice.endswith(".")
    assert len(KINDS) == len(ALARMS)


def test_a_level_or_a_nan_is_known_from_one_reading_and_all_else_needs_a_history() -> None:
    assert {kind.law for kind in ALARMS if not kind.needs_history} == set(OF_ONE_SAMPLE)
    assert {name for name in DEFAULT_LIMITS if not KINDS[name].needs_history} == set(LIMITS)


def test_a_level_of_sharpness_alone_is_a_notice_and_what_collapses_in_a_run_a_warning() -> None:
    severities = {kind.name: kind.severity for kind in ALARMS}
    assert severities == {
        **dict.fromkeys(("collapsed", "diffuse", "first_token", "spread_growth", "drift", "dead"), "notice"),
        **dict.fromkeys(("logits", "layer_fallen", "fallen", "falling", "logit_growth"), "warning"),
        **dict.fromkeys(("rank_differs", "loss_spike"), "warning"),
        **dict.fromkeys(("nonfinite", "nonfinite_loss"), "critical"),
    }


def test_alarms_are_grouped_by_kind_the_worst_first() -> None:
    def alarm(kind: str, severity: str) -> Alarm:
        return Alarm("a", 0, kind, severity, 1.0, 1.0, "", "")

    given = (alarm("diffuse", "notice"), alarm("logits", "warning"), alarm("diffuse", "notice"), alarm("new", "odd"))
    assert list(by_kind(given)) == [("warning", "logits"), ("odd", "new"), ("notice", "diffuse")]


def test_the_log_says_each_sentence_of_advice_once() -> None:
    def alarm(kind: str) -> Alarm:
        return KINDS[kind].alarm("a", 1, 0.01, 0.05, (0.4, 30), {"before": 0.5, "now": 0.1}, step=40, since=40)

    told: set[str] = set()
    first, second = (line for line, _ in lines([alarm("fallen"), alarm("falling")], told))
    assert first.startswith("warning fallen: a head 1: ")
    assert "The head has become much sharper than it was at first. If the loss suffers too" in first
    assert second.endswith("Within a few steps the head has become nearly one-hot.")
    ((again, heard),) = lines([alarm("fallen")], told)
    assert heard
    assert again.startswith("warning fallen: a head 1: ")
    assert not any(sentence in again for sentence in told)


def test_a_value_that_json_cannot_hold_is_none_and_its_message_says_it() -> None:
    found = KINDS["logits"].alarm("a", 3, float("inf"), 100.0)
    assert (found.value, found.message) == (None, "a head 3: largest logit inf")
    whole = KINDS["layer_fallen"].alarm(
        "a", None, 0.01, 0.05, (0.4, 30), {"before": 0.5, "total": 4.0}, step=40, since=40
    )
    assert whole.message == (
        "a: normalised entropy of all 4 heads has fallen, in the mean from 0.5 to 0.01 (it was 0.4 at step 30)"
    )
    assert (whole.head, whole.step, whole.since, whole.ended) == (None, 40, 40, None)
