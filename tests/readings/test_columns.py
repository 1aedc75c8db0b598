"""Heads as columns: each keeps its own, whichever sites a sample has and in whichever order."""

from __future__ import annotations

import numpy as np

from attemper.readings.head_columns import Columns
from attemper.readings.sample import Sample, SiteLabel


def label(name: str, heads: int, mode: str = "train") -> SiteLabel:
    return SiteLabel(name, "self", mode, None, "full", "softmax", heads)


def sample(*sites: SiteLabel) -> Sample:
    values = np.concatenate([np.arange(site.heads) + 10 * ord(site.name) for site in sites])
    return Sample(0, 0.0, sites, ("max_logit",), values[None].astype(np.float32))


def test_heads_keep_their_columns_and_missing_ones_are_nan():
    columns, a, b, c = Columns(), label("a", 2), label("b", 1), label("c", 2, "eval")
    assert columns.find((a, b))
    assert not columns.find((a, b))
    assert columns.find((c, a)), "a new site"
    np.testing.assert_array_equal(columns.spread(sample(c, a), "max_logit"), [970, 971, np.nan, 990, 991])
    assert not columns.find((b,))
    np.testing.assert_array_equal(columns.spread(sample(b), "max_logit"), [np.nan, np.nan, 980, np.nan, np.nan])
    assert columns.sites == [a, b, c]
    assert columns.starts.tolist() == [0, 2, 3]
    assert columns.in_training.tolist() == [True] * 3 + [False] * 2
    assert (columns.heads(1), columns.heads(4)) == (slice(0, 2), slice(3, 5))


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
