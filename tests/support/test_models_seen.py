"""docs/models.md is written from the rows that tests found; two runs are compared without their errors."""

from __future__ import annotations

from dataclasses import replace

from tests.support import models_seen
from tests.support.models_seen import Seen


def test_the_page_is_what_the_rows_say() -> None:
    rows = models_seen.load()
    text = models_seen.PAGE.read_text("utf-8")
    assert models_seen.written(rows, text) == text, "write it anew: pytest --all --write-models"
    assert models_seen.joined(rows) == rows


def test_models_that_are_read_alike_stand_in_one_row_below_their_largest_error() -> None:
    rows = [
        Seen("library", "one", "registry, eager", 1.2e-8, identical_steps=50),
        Seen("library", "one", "registry, sdpa", 3e-8),
        Seen("library", "two", "registry, eager", 5e-8, identical_steps=50),
        Seen("library", "two", "registry, sdpa", 2e-8),
        Seen("library", "two", "softmax by hand", skipped="its weights are changed (pow)"),
    ]
    assert models_seen.table(rows).splitlines() == [
        "### library (errors up to 5e-08 nats)",
        "",
        "| ways | models |",
        "|---|---|",
        "| registry: eager*, sdpa | one; two |",
        "",
        "| skipped, with the reason | models |",
        "|---|---|",
        "| its weights are changed | two |",
    ]


def test_a_row_is_missing_only_if_more_than_its_error_differs() -> None:
    row = Seen("library", "one", "registry", 1e-8, more=(("fold", "per head"), ("temper", "")))
    assert models_seen.differences([replace(row, error_nats=0.0, more=row.more[::-1])], [row]) == []
    assert models_seen.differences([], [row]) == ["written, but no test found it: library | one | registry"]
    assert models_seen.differences([replace(row, error_nats=None)], [row])[0] == "not written: library | one | registry"
