"""Heads as columns: each keeps its own, whichever sites a sample has and in whichever order."""

from __future__ import annotations

from attemper.readings.head_columns import Columns
from attemper.readings.sample import SiteLabel


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
