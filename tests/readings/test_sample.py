"""Samples: names of quantities, and where the heads of a site stand."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from attemper.errors import InputError
from attemper.readings.reading import HeadReading
from attemper.readings.sample import QUANTITIES, Sample, SiteLabel, quantity
from attemper.statistics import SHOWN


def label(name: str, heads: int, kind: str = "self", mode: str = "train") -> SiteLabel:
    return SiteLabel(name, kind, mode, None, "full", "softmax", heads)


def test_quantities_are_what_readings_show_then_counts_then_what_alarms_judge():
    names = list(QUANTITIES)
    assert names[: len(SHOWN)] == list(SHOWN)
    assert names[len(SHOWN) :] == [
        *("rows", "empty_rows", "nonfinite_rows", "queries", "keys", "judged_rows"),
        *("judged_normalized_entropy", "judged_first_token_mass", "rank_difference", "farthest_rank"),
        "surplus_keys",
    ]
    assert all(name == one.name for name, one in QUANTITIES.items())
    assert [name for name, one in QUANTITIES.items() if one.exact] == [
        *("rows", "empty_rows", "nonfinite_rows", "queries", "keys", "judged_rows", "farthest_rank")
    ]
    assert set(SHOWN) <= {field.name for field in fields(HeadReading)}


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("entropy", "entropy_nats"),
        ("entropy_nats", "entropy_nats"),
        ("entropy_with_sink", "entropy_with_sink_nats"),
        ("logit_std", "logit_std"),
        ("judged_first_token_mass", "judged_first_token_mass"),
    ],
)
def test_a_quantity_is_found_by_its_name_or_by_that_of_its_statistic(asked: str, name: str):
    assert quantity(asked) == name


def test_an_unknown_quantity_is_refused_with_the_nearest_name_and_a_square_with_its_root():
    with pytest.raises(InputError, match=r"statistic must be one of .*got 'entropi'\. Did you mean 'entropy'\?"):
        quantity("entropi")
    with pytest.raises(InputError, match="'logit_variance' is kept as 'logit_std', the root of its mean"):
        quantity("logit_variance")


def test_a_sample_says_where_the_heads_of_each_site_stand():
    sites = (label("a", 2), label("b", 3), label("b", 1, mode="eval"))
    sample = Sample(7, 0.0, sites, ("max_logit", "rows"), np.arange(12, dtype=np.float32).reshape(2, 6))
    assert sample.places == {
        ("a", "self", "train"): slice(0, 2),
        ("b", "self", "train"): slice(2, 5),
        ("b", "self", "eval"): slice(5, 6),
    }
    rows = sample.of("rows")
    assert rows is not None
    assert rows.tolist() == [6, 7, 8, 9, 10, 11]
    assert np.isnan(sample.of("gini")).all()


def test_values_of_another_shape_are_a_broken_invariant():
    with pytest.raises(AssertionError, match=r"values are \(1, 2\), expected \(1, 3\)"):
        Sample(0, 0.0, (label("a", 3),), ("rows",), np.zeros((1, 2), np.float32))
