"""A sample says on the host what it says on its devices, whatever calls and taps it joins; it holds the numbers of the
readings of its sites, all heads side by side.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import attemper
from attemper.backends.sums import WIDTH, empty_sums
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.options import Scope
from attemper.monitor.snapshot import SampleSums, Snapshot, sample_of
from attemper.monitor.tap_sums import PADDED, TapSums
from attemper.readings.alarms import over_enough_keys
from attemper.readings.reading import FEWEST_KEYS, HeadReading
from attemper.readings.sample import QUANTITIES, Sample, SiteLabel
from attemper.sites.tap_buffers import TapBuffer
from attemper.statistics import reading_names, rowwise_names


def buffer(name: str, heads: int = 2) -> TapBuffer:
    sums = torch.rand(heads, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(len(name)))
    flag, start = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.float64)
    sums[:, :3] = torch.tensor([12.0, 0.0, 0.0])
    return TapBuffer(name, 0, sums, empty_sums(heads, sums.device), flag, start, queries=6, keys=6, measured={None})


def site(name: str, heads: int = 2) -> SiteSums:
    found = SiteSums(SiteLabel(name, "self", "eval", None, "full", "softmax", heads))
    found.add_sums(buffer(name, heads).sums, 6, 6)
    return found


def snapshot(taps: TapSums, *names: str, period: int = 0) -> Snapshot:
    return Snapshot(tuple(map(site, names)), period, torch.tensor(24), ("native",), taps)


def same(one: SampleSums, two: SampleSums) -> None:
    assert (one.period, one.tokens, one.backends, one.reasons) == (two.period, two.tokens, two.backends, two.reasons)
    assert [a.label for a in one.sites] == [b.label for b in two.sites]
    assert all(torch.equal(a.sums, b.sums) for a, b in zip(one.sites, two.sites, strict=True))


def taps(period: int, *names: str) -> TapSums:
    found = TapSums(Scope(reading_names("watch", "all")))
    for name in names:
        one = buffer(name)
        found = found.plus({one: name}, {one: one.sums}, period)
    return found


def check(one: Snapshot) -> SampleSums:
    assert one.on_host
    found = one.join()
    same(one.to_host().wait().join(), found)
    return found


def test_calls_alone() -> None:
    found = check(snapshot(taps(-1), "one", "other", period=4))
    assert [entry.label.name for entry in found.sites] == ["one", "other"]
    assert (found.period, found.tokens, found.backends) == (4, 24, ("native",))


def test_taps_alone_and_taps_that_are_newer_than_calls() -> None:
    for calls in ((), ("old",)):
        found = check(snapshot(taps(5, "tapped"), *calls, period=3))
        assert [entry.label.name for entry in found.sites] == ["tapped"]
        assert (found.period, found.tokens) == (5, 12)


def test_calls_and_taps_of_one_step_add_up() -> None:
    found = check(snapshot(taps(4, "shared"), "shared", "seen", period=4))
    assert [entry.label.name for entry in found.sites] == ["shared", "seen"]
    assert found.sites[0].sums[:, 0].tolist() == [24.0, 24.0]
    assert found.backends == ("native", "triton")


def test_taps_of_a_padded_batch_are_not_shown_and_that_is_said() -> None:
    padded = taps(4, "tapped").with_padding(torch.tensor([[True, False]]), 4)
    found = check(snapshot(padded, "seen", period=4))
    assert [entry.label.name for entry in found.sites] == ["seen"]
    assert found.reasons == {"tapped": PADDED}


def test_what_is_added_later_is_not_in_a_snapshot() -> None:
    growing = taps(4, "one")
    before = snapshot(growing)
    later = buffer("later")
    growing = growing.plus({later: "later"}, {later: later.sums}, 4)
    assert [entry.label.name for entry in before.join().sites] == ["one"]
    assert {entry.label.name for entry in snapshot(growing).join().sites} == {"one", "later"}


# --- its numbers ---

HEADS = {"layers.0.attention": 4, "layers.1.attention": 2}


def read_sites(fewest_keys: int, tokens: int = 48, **options: Any) -> list[SiteSums]:
    found = []
    for number, (name, heads) in enumerate(HEADS.items()):
        generator = torch.Generator().manual_seed(number)
        query, key, value = (2 * torch.randn(3, heads, tokens, 16, generator=generator) for _ in range(3))
        query[0, 0, 3:5] = torch.nan
        mask = torch.rand(tokens, tokens, generator=generator) > 0.3
        mask[:2] = False
        stats = attemper.attention(query, key, value, attn_mask=mask.tril(), **options).stats
        assert stats is not None
        site = SiteSums(SiteLabel(name, "self", "train", number, "full", "softmax", heads), fewest_keys=fewest_keys)
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


def check_values(sample: Sample, found: list[SiteSums], fewest_keys: int) -> None:
    assert set(sample.quantities) <= set(QUANTITIES)
    for site in found:
        heads = sample.places[site.key]
        for head, values in zip(site.reading().heads, sample.values[:, heads].T, strict=True):
            want = [expected(head, name, site, fewest_keys) for name in sample.quantities]
            np.testing.assert_allclose(values, want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("fewest_keys", [FEWEST_KEYS, 2, 20])
@pytest.mark.parametrize("tokens", [48, 8, 1])
def test_values_are_those_of_readings_to_float32_rounding(fewest_keys: int, tokens: int) -> None:
    found = read_sites(fewest_keys, tokens, stats="all")
    sample = sample_of(7, 1.5, found, reading_names("watch", "all"), tokens=99)
    check_values(sample, found, fewest_keys)
    assert (sample.step, sample.time, sample.tokens) == (7, 1.5, 99)
    assert [site.layer for site in sample.sites] == [0, 1]
    assert [site.heads for site in sample.sites] == list(HEADS.values())


def test_counts_beyond_float32_are_exact() -> None:
    found = read_sites(FEWEST_KEYS, stats="all")
    for site in found:
        site.sums *= 14_348_907.0  # type: ignore[operator]
    sample = sample_of(0, 0.0, found, reading_names("watch", "all"), tokens=0)
    assert sample.values.dtype == np.float64
    check_values(sample, found, FEWEST_KEYS)
    rows = [head.rows for site in found for head in site.reading().heads]
    assert min(rows) > 2**24
    np.testing.assert_array_equal(sample.of("rows"), rows)


def test_statistics_by_name_are_quantities_of_a_sample() -> None:
    names = reading_names("watch", ("all", "gini", "mean_distance"))
    found = read_sites(FEWEST_KEYS, stats=names, backend="blocked")
    sample = sample_of(0, 0.0, found, names, tokens=0)
    check_values(sample, found, FEWEST_KEYS)
    assert {"gini", "mean_distance"} <= set(sample.quantities)
    assert "score_variance" not in sample.quantities


def test_a_sparse_site_beside_a_softmax_adds_its_support() -> None:
    names = reading_names("watch", "all")
    found = read_sites(FEWEST_KEYS, stats=names)[:1]
    found += read_sites(FEWEST_KEYS, stats=rowwise_names(names), normalizer="sparsemax", backend="blocked")[1:]
    sample = sample_of(0, 0.0, found, names, tokens=0)
    check_values(sample, found, FEWEST_KEYS)
    support = sample.of("support_size")
    assert support is not None
    assert np.isnan(support[:4]).all()
    assert not np.isnan(support[4:]).any()
