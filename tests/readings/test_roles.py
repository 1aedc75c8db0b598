"""The table of roles, and which one a head has."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from attemper import InputError, Scan
from attemper.readings.reading import HEAD_COLUMNS, HeadReading, head_rows
from attemper.readings.roles import OF_REPEATS, ROLES, SHARP, role_of
from tests.report.readings import head, reading, site


def test_the_roles_of_the_field_are_there_each_once() -> None:
    names = [role.name for role in ROLES]
    assert names == [
        *("previous token", "next token", "own token", "first token", "separator", "duplicate token", "induction"),
        *("local", "diffuse"),
    ]
    assert set(SHARP) == set(names) - {"local", "diffuse"}
    assert set(OF_REPEATS) < set(SHARP)


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
        HeadReading.from_dict(head(0, roles={}).to_dict() | {"roles": {"separator": "high"}}, "sites[0].heads[0]")


def test_sites_with_scores_hash() -> None:
    assert hash(head(0, roles={"own token": 0.5})) == hash(head(0, roles={"own token": 0.5}))
