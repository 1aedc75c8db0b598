"""The table of statistics: records, pages and the list in the docs hold what its rows say."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch

from attemper.call.result import AttentionStats
from attemper.readings.reading import HeadReading
from attemper.statistics import (
    BY_NAME,
    OF_CALLS,
    OF_SCANS,
    ONE_PASS,
    ROWWISE_BASE,
    ROWWISE_ONE_PASS,
    SHOWN,
    SOFTMAX_BASE,
    STATISTICS,
    TABLE,
    Column,
    Statistic,
    add_kept,
    asked_names,
    rowwise_names,
    state_columns,
)
from tests.support.calls import attended

MATHS = Path(__file__).parents[1] / "docs" / "maths.md"


def listed(row: Statistic) -> str:
    return f"| `{row.name}` | {row.definition} | {row.unit} |"


def test_the_list_in_the_docs_is_the_table():
    by_name = ["| *by name only:* | | |"]
    lines = [*(listed(row) for row in TABLE if row.name in ONE_PASS), *by_name]
    lines += [listed(row) for row in TABLE if row.name in BY_NAME]
    assert "\n".join(lines) in MATHS.read_text()


def test_names_stand_once_and_what_all_means_comes_first():
    assert len(STATISTICS) == len(TABLE) + len(OF_SCANS) + len(OF_CALLS)
    assert (*ONE_PASS, *BY_NAME, *(row.name for row in (*OF_SCANS, *OF_CALLS))) == tuple(STATISTICS)


def test_the_typed_record_has_each_statistic():
    assert AttentionStats.__annotations__ == dict.fromkeys((row.name for row in TABLE), "Tensor")


def test_a_reading_has_no_number_that_the_table_does_not_show():
    of_rows = {"head", "rows", "empty_rows", "nonfinite_rows", "normalized_entropy_histogram", "by_visible_keys"}
    others = {"layer", "judged", "roles", "batches", "standard_errors"}
    assert {field.name for field in fields(HeadReading)} - of_rows - others == set(SHOWN)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_columns_come_in_their_order_with_the_ones_that_are_always_left(row: Statistic):
    columns = state_columns((row.name,))
    assert columns == tuple(sorted(columns))
    assert set(columns) == {*SOFTMAX_BASE, *row.softmax}
    if row.rowwise is not None:
        columns = state_columns((row.name,), rowwise=True)
        assert columns == tuple(sorted(columns))
        assert set(columns) == {*ROWWISE_BASE, *row.rowwise, Column.MASS}


def test_all_of_one_pass_is_the_union_of_its_statistics_and_none_needs_the_least_state():
    assert state_columns(()) == SOFTMAX_BASE
    assert state_columns((), rowwise=True) == ROWWISE_BASE
    together = {column for name in ONE_PASS for column in state_columns((name,))}
    assert state_columns(ONE_PASS) == state_columns([*ONE_PASS]) == tuple(sorted(together))


def test_all_means_the_support_only_where_weights_can_be_zero():
    assert "support_size" not in ONE_PASS
    assert set(asked_names("f", "all", rowwise="entmax")) == set(ROWWISE_ONE_PASS)
    assert set(ROWWISE_ONE_PASS) == {*ONE_PASS, "support_size"} - {"lse"}
    assert rowwise_names(ONE_PASS) == ROWWISE_ONE_PASS
    assert rowwise_names(()) == ()


def test_softmax_keeps_what_merging_needs():
    assert add_kept(("entropy",)) == ("lse", "entropy", "max_logit")
    assert add_kept(ONE_PASS) is ONE_PASS
    assert add_kept(()) == ()


def test_a_spread_beside_a_large_logit_says_that_it_is_under_the_weights():
    assert SHOWN["logit_std"].title == "Logit spread under the weights"
    assert "0 where one key takes all" in SHOWN["logit_std"].meaning
    # The reading that the name must not mislead about: a largest logit of 77, all the weight on its key.
    scores = torch.randn(1, 1, 1, 64)
    scores[..., 7] = 77.25
    query, key = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 64, 1)
    stats = attended("blocked", query, key, key, scores, stats=("logit_variance", "score_variance")).stats
    assert stats.max_logit.item() == 77.25
    assert stats.logit_variance.sqrt().item() < 1e-6
    assert stats.score_variance.sqrt().item() > 9
