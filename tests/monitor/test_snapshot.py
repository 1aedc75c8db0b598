"""A sample says on the host what it says on its devices, whatever calls and taps it joins."""

from __future__ import annotations

import torch

from attemper.backends.sums import WIDTH, empty_sums
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.options import Scope
from attemper.monitor.snapshot import SampleSums, Snapshot
from attemper.monitor.tap_sums import PADDED, TapSums
from attemper.sites.tap_buffers import TapBuffer
from attemper.statistics import reading_names


def buffer(name: str, heads: int = 2) -> TapBuffer:
    sums = torch.rand(heads, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(len(name)))
    flag, start = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.float64)
    sums[:, :3] = torch.tensor([12.0, 0.0, 0.0])
    return TapBuffer(name, 0, sums, empty_sums(heads, sums.device), flag, start, queries=6, keys=6, measured={None})


def site(name: str, heads: int = 2) -> SiteSums:
    found = SiteSums(name, "self", "eval", heads)
    found.add_sums(buffer(name, heads).sums, 6, 6)
    return found


def snapshot(taps: TapSums, *names: str, period: int = 0) -> Snapshot:
    return Snapshot(tuple(map(site, names)), period, torch.tensor(24), ("native",), taps.snapshot())


def same(one: SampleSums, two: SampleSums) -> None:
    assert (one.period, one.tokens, one.backends, one.reasons) == (two.period, two.tokens, two.backends, two.reasons)
    assert [a.label for a in one.sites] == [b.label for b in two.sites]
    assert all(torch.equal(a.sums, b.sums) for a, b in zip(one.sites, two.sites, strict=True))


def taps(period: int, *names: str) -> TapSums:
    found = TapSums(Scope(reading_names("watch", "all")))
    for name in names:
        one = buffer(name)
        found.add({one: name}, {one: one.sums}, period)
    return found


def check(one: Snapshot) -> SampleSums:
    assert one.on_host
    found = one.join()
    same(one.to_host().wait().join(), found)
    return found


def test_calls_alone() -> None:
    found = check(snapshot(taps(-1), "one", "other", period=4))
    assert [entry.name for entry in found.sites] == ["one", "other"]
    assert (found.period, found.tokens, found.backends) == (4, 24, ("native",))


def test_taps_alone_and_taps_that_are_newer_than_calls() -> None:
    for calls in ((), ("old",)):
        found = check(snapshot(taps(5, "tapped"), *calls, period=3))
        assert [entry.name for entry in found.sites] == ["tapped"]
        assert (found.period, found.tokens) == (5, 12)


def test_calls_and_taps_of_one_step_add_up() -> None:
    found = check(snapshot(taps(4, "shared"), "shared", "seen", period=4))
    assert [entry.name for entry in found.sites] == ["shared", "seen"]
    assert found.sites[0].sums[:, 0].tolist() == [24.0, 24.0]
    assert found.backends == ("native", "triton")


def test_taps_of_a_padded_batch_are_not_shown_and_that_is_said() -> None:
    padded = taps(4, "tapped")
    padded.note_padding(torch.tensor([[True, False]]), 4)
    found = check(snapshot(padded, "seen", period=4))
    assert [entry.name for entry in found.sites] == ["seen"]
    assert found.reasons == {"tapped": PADDED}


def test_what_is_added_later_is_not_in_a_snapshot() -> None:
    growing = taps(4, "one")
    before = snapshot(growing)
    later = buffer("later")
    growing.add({later: "later"}, {later: later.sums}, 4)
    assert [entry.name for entry in before.join().sites] == ["one"]
    assert {entry.name for entry in snapshot(growing).join().sites} == {"one", "later"}
