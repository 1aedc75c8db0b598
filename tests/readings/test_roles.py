"""The table of roles, and which one a head has."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attemper import InputError, Scan
from attemper.file_schema import load_record
from attemper.readings.alarms import KINDS, by_kind, is_by_job
from attemper.readings.limits import alarms
from attemper.readings.reading import HEAD_COLUMNS, Alarm, HeadReading, Reading, head_rows
from attemper.readings.roles import ROLES, role_of
from attemper.report.headline import verdict
from attemper.report.page import scan_page
from attemper.report.texts import advice, said, say
from tests.report.readings import head, reading, site


@pytest.mark.parametrize(
    ("scores", "role"),
    [
        ({"previous token": 0.9, "own token": 0.05, "local": 0.98}, "previous token"),
        ({"previous token": 0.45, "first token": 0.5}, "first token"),
        ({"previous token": 0.4, "separator": 0.6}, None),  # above its threshold, not at it
        ({"previous token": 0.3, "local": 0.9}, "local"),
        ({"local": 0.85, "diffuse": 0.96}, "diffuse"),
        ({"separator": None, "first token": 0.8}, "first token"),
        ({"of a later version": 1.0}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_head_has_the_role_with_the_highest_score_beyond_its_threshold(
    scores: dict[str, float | None] | None, role: str | None
) -> None:
    assert role_of(scores) == role
    assert head(0, roles=scores).role == role


def test_scores_and_role_go_through_json_and_into_columns() -> None:
    scores = {"previous token": 0.75, "separator": None}
    one = replace(site("h.0.attn", 2), heads=(head(0, roles=scores), head(1)))
    document = json.loads(Scan(reading(one), {}).to_json())
    first, second = document["sites"][0]["heads"]
    assert (first["role"], first["roles"]) == ("previous token", scores)
    assert "role" not in second
    assert "roles" not in second
    again = Scan.from_json(json.dumps(document))
    assert again.reading == reading(one)
    rows = head_rows(again.reading.placed_heads)
    assert [row["role"] for row in rows] == ["previous token", None]
    assert [row["previous_token_score"] for row in rows] == [0.75, None]
    assert rows[0]["separator_score"] is None
    assert HEAD_COLUMNS[-len(ROLES) :] == tuple(role.column for role in ROLES)


def test_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(InputError, match=r"sites\[0\].heads\[0\].roles.separator must be"):
        load_record(HeadReading, head(0, roles={}).to_dict() | {"roles": {"separator": "high"}}, "sites[0].heads[0]")


def test_sites_with_scores_hash() -> None:
    assert hash(head(0, roles={"own token": 0.5})) == hash(head(0, roles={"own token": 0.5}))


def sharp_site(**scores: float | None) -> tuple[Alarm, ...]:
    """Alarms of a site with a sharp head of these scores beside one without."""
    heads = (head(0, 0.01, roles=scores), head(1, 0.02, roles={}))
    return alarms((replace(site("h.0.attn", 2), heads=heads),))


def test_a_sharp_head_whose_role_is_sharp_is_a_notice_that_advises_nothing() -> None:
    found = [one for one in sharp_site(**{"previous token": 0.9}) if one.kind == "collapsed"]
    of_role, plain = found
    assert of_role.message == (
        "h.0.attn head 0: normalised entropy 0.010 is very low (previous-token head: sharp by its job)"
    )
    assert of_role.severity == "notice"
    assert is_by_job(of_role)
    assert "temperature" not in of_role.advice
    assert not is_by_job(plain)
    assert plain.advice == KINDS["collapsed"].advice
    assert list(by_kind((of_role, plain))) == [("notice", "collapsed", False), ("notice", "collapsed", True)]


@pytest.mark.parametrize("scores", [{"local": 0.99}, {"previous token": 0.2}, {"previous token": None}])
def test_a_sharp_head_without_such_a_role_is_advised_as_before(scores: dict[str, float | None]) -> None:
    found = [one for one in sharp_site(**scores) if one.kind == "collapsed"]
    assert not any(map(is_by_job, found))


def test_what_is_said_of_a_role_is_said_in_chinese() -> None:
    (of_role, *_) = sharp_site(**{"duplicate token": 0.9})
    assert say(said(of_role), "zh") == "归一化熵 0.010，非常低（重复 token 头：本来就该尖锐）"
    assert say(advice(of_role), "zh").startswith("不需要处理")


def test_a_role_that_is_not_known_has_its_reason_in_the_document_and_on_the_page_too() -> None:
    known = dict.fromkeys((role.name for role in ROLES), 0.1)
    found = reading(replace(site("h.3.attn", 2), heads=(head(0, roles=known | {"separator": None}), head(1))))
    needs = {"separator": "tokenizer=, and 8 rows that see punctuation or separators"}
    assert found.unknown_roles == found.to_dict()["unknown_roles"] == needs
    assert Reading.from_dict(found.to_dict()) == found
    shown = scan_page(found)
    assert f"Not known: separator (needs {needs['separator']})." in shown
    for one in ROLES:
        every = reading(replace(site("h.3.attn", 1), heads=(head(0, roles={**known, one.name: None}),)))
        assert every.unknown_roles == {one.name: one.needs}
    assert "unknown_roles" not in reading(site("h.3.attn")).to_dict()
    assert reading(site("h.3.attn")).unknown_roles == {}


def test_the_verdict_tells_heads_that_are_sharp_by_their_job_from_others() -> None:
    found = tuple(one for one in sharp_site(induction=0.9) if one.kind == "collapsed")
    sentence = say(verdict(reading(site("h.0.attn", 2), alarms=found)).said)
    assert "1 head is nearly one-hot, 1 head is sharp by its job, and" in sentence


def test_the_table_names_the_heads_of_each_role() -> None:
    heads = (head(0, roles={"previous token": 0.6, "separator": None}), head(1, roles={"previous token": 0.8}))
    others = (head(2, roles={"previous token": 0.1}), head(3, roles={}))
    text = str(Scan(reading(replace(site("h.3.attn"), heads=(*heads, *others))), {}))
    assert "previous token  2  3.1 0.80, 3.0 0.60" in text
    assert "no role         2" in text
    assert "not known: separator (needs tokenizer=, and 8 rows that see punctuation or separators)" in text
    assert "not known: previous token" not in text
    assert "roles" not in str(Scan(reading(site("h.3.attn")), {}))
