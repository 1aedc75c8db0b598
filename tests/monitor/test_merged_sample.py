"""The packed tensors that ranks reduce, by simulated ranks: what their sum and their maximum give."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.distributed.merged_sample import MergedSample, Slots
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.options import Scope
from attemper.monitor.snapshot import SampleSums, Snapshot
from attemper.monitor.tap_sums import TapSums
from attemper.readings.reading import FEWEST_KEYS
from attemper.readings.sample import SiteLabel

SITES, HEADS, KEYS, STEP = ("b.attn", "a.attn"), (2, 4), 40, 7
CPU = torch.device("cpu")


def calls(rank: int, scale: float = 1.0) -> list[Tensor]:
    """Queries and keys of every site, as one rank has them."""
    generator = torch.Generator().manual_seed(rank)
    return [scale * torch.randn(2, 3, heads, KEYS, 8, generator=generator, dtype=torch.float64) for heads in HEADS]


def snapshot(parts: list[list[Tensor]], period: int = STEP, fewest_keys: int = FEWEST_KEYS) -> Snapshot:
    """What one process has seen of these calls."""
    sites = [
        SiteSums(SiteLabel(name, "self", "train", None, "full", "softmax", heads), fewest_keys=fewest_keys)
        for name, heads in zip(SITES, HEADS, strict=True)
    ]
    for part in parts:
        for site, (query, key) in zip(sites, part, strict=True):
            site.add(attemper.attention_statistics(query, key, is_causal=True), KEYS, KEYS)
    taps = TapSums(Scope(("entropy",)))
    return Snapshot(tuple(sites), period, 3 * KEYS * len(parts), ("native",), taps)


def slots_of(snapshots: list[Snapshot], fewest_keys: int = FEWEST_KEYS) -> Slots:
    labels = sorted((site.label for site in snapshots[0].sites), key=lambda label: label.key)
    return Slots(tuple(labels), fewest_keys)


def reduced(snapshots: list[Snapshot], slots: Slots | None = None, failures: tuple[int, ...] = ()) -> SampleSums:
    """What the two collectives make of several ranks."""
    slots = slots or slots_of(snapshots, snapshots[0].sites[0].fewest_keys)
    told = failures or (0,) * len(snapshots)
    packed = [slots.pack(one, STEP, failed, CPU) for one, failed in zip(snapshots, told, strict=True)]
    added = torch.stack([own for own, _ in packed]).sum(0)
    for rank, (own, largest) in enumerate(packed):
        slots.put_distances(largest, own, added, rank)
    largest = torch.stack([most for _, most in packed]).amax(0)
    return MergedSample(slots, STEP, ("native",), len(snapshots), added, largest).join()


def close(one: Any, two: Any) -> None:
    for mine, other in zip(one.sites, sorted(two.sites, key=lambda site: site.key), strict=True):
        assert mine.label == other.label
        assert (mine.queries, mine.keys) == (other.queries, other.keys)
        assert torch.allclose(mine.sums, other.sums, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("fewest_keys", [32, 30])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_reduce_to_the_sums_of_one_process_that_saw_everything(ranks: int, fewest_keys: int):
    parts = [calls(rank) for rank in range(ranks)]
    found = reduced([snapshot([part], fewest_keys=fewest_keys) for part in parts])
    whole = snapshot(parts, fewest_keys=fewest_keys)
    close(found, whole)
    assert found.tokens == whole.tokens == 3 * KEYS * ranks
    assert [site.label.name for site in found.sites] == ["a.attn", "b.attn"], "in the order of their keys"
    assert found.reasons == {}


def test_a_rank_with_no_rows_or_of_another_step_is_the_identity():
    one, stale = snapshot([calls(0)]), snapshot([calls(1)], period=STEP - 1)
    close(reduced([one, stale]), one)
    close(reduced([stale, one]), one)
    slots = slots_of([one])
    added, largest = slots.nothing(0, CPU)
    assert not added.any()
    assert (largest[: slots.heads] == -math.inf).all()
    assert not largest[slots.heads :].any()


def test_a_site_of_which_no_rank_has_rows_is_not_there():
    one = snapshot([calls(0)])
    found = reduced([Snapshot(one.sites[:1], STEP, one.tokens, one.backends, one.taps)], slots_of([one]))
    assert [site.label.name for site in found.sites] == ["b.attn"]


def test_a_site_that_has_changed_since_the_slots_were_agreed_on_is_left_out():
    one = snapshot([calls(0)])
    slots = slots_of([one])
    one.sites[0].tell(normalizer="sparsemax")
    assert [site.label.name for site in reduced([one], slots).sites] == ["a.attn"]
    assert slots.lacking(one) == ["b.attn"]


def test_the_rank_that_is_farthest_from_the_mean_comes_with_its_distance():
    parts = [calls(rank, scale=1.0 if rank != 3 else 2.5) for rank in range(5)]
    found = reduced([snapshot([part]) for part in parts])
    assert found.differences is not None

    def mean(sums: SiteSums) -> float:
        heads = sums.reading().heads
        return sum(head.normalized_entropy or 0.0 for head in heads) / len(heads)

    for number, name in enumerate(SITES):
        own = snapshot([parts[3]]).sites[number]
        (whole,) = (site for site in found.sites if site.label.name == name)
        difference = found.differences[whole.key]
        assert difference.rank == 3
        assert difference.value == pytest.approx(abs(mean(own) - mean(whole)), rel=1e-9)


def test_a_rank_none_of_whose_rows_is_finite_is_as_far_as_can_be_and_one_without_rows_is_not_far():
    broken = [part * torch.nan for part in calls(2)]
    found = reduced([snapshot([part]) for part in (calls(0), calls(1), broken)])
    assert found.differences is not None
    assert {(one.rank, round(one.value, 6)) for one in found.differences.values()} == {(2, 1.0)}
    nothing = snapshot([calls(1)], period=STEP - 1)
    found = reduced([nothing, snapshot([calls(0)])])
    assert found.differences is not None
    assert {one.rank for one in found.differences.values()} == {1}
    assert all(one.value < 1e-6 for one in found.differences.values())


def test_failures_of_any_rank_are_counted_and_told():
    found = reduced([snapshot([calls(rank)]) for rank in range(3)], failures=(0, 2, 1))
    assert found.reasons == {"ranks": "3 failures of ours on 3 ranks: this sample has what else they measured"}


def test_ranks_beyond_16_bits_are_no_error_and_distances_keep_their_digits():
    one, other = (snapshot([calls(rank)]) for rank in range(2))
    slots = slots_of([one])
    own, largest = slots.pack(one, STEP, 0, CPU)
    added = own + slots.pack(other, STEP, 0, CPU)[0]
    values = []
    for rank in (0, 65_535, 65_536 + 12):
        slots.put_distances(largest, own, added, rank)
        joined = MergedSample(slots, STEP, (), 2, added, largest).join()
        assert joined.differences is not None
        values.append(joined.differences["a.attn", "self", "train"])
    assert [found.rank for found in values] == [0, 65_535, 12]
    assert max(found.value for found in values) == pytest.approx(values[0].value, rel=2**-36)
