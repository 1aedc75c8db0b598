"""A sample holds the numbers of the readings of its sites, all heads side by side."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import attemper
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.snapshot import sample_of
from attemper.readings.alarms import over_enough_keys
from attemper.readings.reading import FEWEST_KEYS, HeadReading
from attemper.readings.sample import QUANTITIES, Sample
from attemper.statistics import reading_names, rowwise_names

HEADS = {"layers.0.attention": 4, "layers.1.attention": 2}


def sites(fewest_keys: int, tokens: int = 48, **options: Any) -> list[SiteSums]:
    found = []
    for number, (name, heads) in enumerate(HEADS.items()):
        generator = torch.Generator().manual_seed(number)
        query, key, value = (2 * torch.randn(3, heads, tokens, 16, generator=generator) for _ in range(3))
        query[0, 0, 3:5] = torch.nan
        mask = torch.rand(tokens, tokens, generator=generator) > 0.3
        mask[:2] = False
        stats = attemper.attention(query, key, value, attn_mask=mask.tril(), **options).stats
        assert stats is not None
        site = SiteSums(name, "self", "train", heads, fewest_keys=fewest_keys)
        site.add(stats, tokens + number, tokens)
        found.append(site)
    return found


def expected(head: HeadReading, name: str, site: SiteSums, fewest_keys: int) -> float:
    if name.startswith("judged_"):
        rows = sum(bucket.rows for bucket in head.by_visible_keys if bucket.first >= fewest_keys)
        found = rows if name == "judged_rows" else over_enough_keys(head, name.removeprefix("judged_"), fewest_keys)
    else:
        found = getattr(site if name in ("queries", "keys") else head, name)
    return math.nan if found is None else float(found)


def check(sample: Sample, found: list[SiteSums], fewest_keys: int) -> None:
    assert set(sample.quantities) <= set(QUANTITIES)
    for site in found:
        heads = sample.places[site.name, "self", "train"]
        for head, values in zip(site.reading().heads, sample.values[:, heads].T, strict=True):
            want = [expected(head, name, site, fewest_keys) for name in sample.quantities]
            np.testing.assert_allclose(values, want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("fewest_keys", [FEWEST_KEYS, 2, 20])
@pytest.mark.parametrize("tokens", [48, 8, 1])
def test_values_are_those_of_readings_to_float32_rounding(fewest_keys: int, tokens: int) -> None:
    found = sites(fewest_keys, tokens, stats="all")
    sample = sample_of(7, 1.5, found, reading_names("watch", "all"), tokens=99)
    check(sample, found, fewest_keys)
    assert (sample.step, sample.time, sample.tokens) == (7, 1.5, 99)
    assert [site.layer for site in sample.sites] == [0, 1]
    assert [site.heads for site in sample.sites] == list(HEADS.values())


def test_counts_beyond_float32_are_exact() -> None:
    found = sites(FEWEST_KEYS, stats="all")
    for site in found:
        site._sums *= 14_348_907.0  # type: ignore[operator]
    sample = sample_of(0, 0.0, found, reading_names("watch", "all"), tokens=0)
    assert sample.values.dtype == np.float64
    check(sample, found, FEWEST_KEYS)
    rows = [head.rows for site in found for head in site.reading().heads]
    assert min(rows) > 2**24
    np.testing.assert_array_equal(sample.of("rows"), rows)


def test_statistics_by_name_are_quantities_of_a_sample() -> None:
    names = reading_names("watch", ("all", "gini", "mean_distance"))
    found = sites(FEWEST_KEYS, stats=names, backend="blocked")
    sample = sample_of(0, 0.0, found, names, tokens=0)
    check(sample, found, FEWEST_KEYS)
    assert {"gini", "mean_distance"} <= set(sample.quantities)
    assert "score_variance" not in sample.quantities


def test_a_sparse_site_beside_a_softmax_adds_its_support() -> None:
    names = reading_names("watch", "all")
    found = sites(FEWEST_KEYS, stats=names)[:1]
    found += sites(FEWEST_KEYS, stats=rowwise_names(names), normalizer="sparsemax", backend="blocked")[1:]
    sample = sample_of(0, 0.0, found, names, tokens=0)
    check(sample, found, FEWEST_KEYS)
    support = sample.of("support_size")
    assert support is not None
    assert np.isnan(support[:4]).all()
    assert not np.isnan(support[4:]).any()
