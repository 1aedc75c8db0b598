"""Where the heads of every site stand in the two packed tensors that ranks reduce, and one rank's part of them.

A sample of S sites with H heads in all, sums of C columns a head, all float64::

    added    [H C sums of heads | loss | ranks with a loss | tokens | failures | padded batches]
    largest  [H largest logits | S distances from the mean | S queries | S keys]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attemper.monitor.head_sums import SiteSums
from attemper.monitor.snapshot import DeviceSample, RankDifference, SampleSums, Snapshot
from attemper.monitor.tap_sums import PADDED
from attemper.readings.sample import SiteKey, SiteLabel, places_of
from attemper.readings.sums import LARGEST, places, width
from attemper.text import count

LOSS, LOSSES, TOKENS, FAILURES, PADDED_BATCHES = -5, -4, -3, -2, -1
"""Places in ``added``."""
RANK_BITS = 16
"""Of a distance: the lowest bits of its mantissa are the rank that has it, which costs 2^-36 of its value."""
RANKS = (1 << RANK_BITS) - 1
"""So many can be told apart."""


def identity(label: SiteLabel) -> SiteLabel:
    """What sites of two ranks must share for their rows to be added: all but the type of attention and the layer, which
    are names.
    """
    return replace(label, attention="full", layer=None)


@dataclass(frozen=True)
class Slots:
    """The sites of a sample, the same on every rank, in the order of their keys."""

    labels: tuple[SiteLabel, ...]
    fewest_keys: int

    @cached_property
    def heads(self) -> int:
        return sum(label.heads for label in self.labels)

    @cached_property
    def places(self) -> dict[SiteKey, slice]:
        """Where the heads of each site stand."""
        return places_of(self.labels)

    @cached_property
    def _numbers(self) -> dict[SiteLabel, int]:
        return {identity(label): number for number, label in enumerate(self.labels)}

    @cached_property
    def _site_of_head(self) -> Tensor:
        """[H]"""
        return torch.tensor([number for number, label in enumerate(self.labels) for _ in range(label.heads)])

    @property
    def added_size(self) -> int:
        return self.heads * width(self.fewest_keys) + 5

    @property
    def largest_size(self) -> int:
        return self.heads + 3 * len(self.labels)

    def pack(self, snapshot: Snapshot, period: int, failures: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """``added`` and ``largest`` of one rank's step of this number; distances are not known yet. Nothing waits."""
        added, largest = self.nothing(failures, device)
        sums, most = self._sums(added), largest[: self.heads]
        tapped, tapped_tokens, padded = snapshot.taps.of_step(period)
        seen = snapshot.sites if snapshot.period == period else ()
        sizes = torch.zeros((2, len(self.labels)), dtype=torch.float64)
        for site in (*seen, *tapped):
            number = self._numbers.get(identity(site.label))
            if number is None:
                continue  # not among those that all ranks agreed on
            own, place = site.sums.to(device), self.places[site.key]
            sums[place] += own
            torch.maximum(most[place], own[:, LARGEST], out=most[place])
            sizes[:, number] = torch.maximum(sizes[:, number], torch.tensor([site.queries, site.keys]))
        sums[:, LARGEST] = 0.0
        self._sizes(largest).copy_(sizes, non_blocking=True)
        added[TOKENS] = snapshot.tokens if seen else tapped_tokens
        for was_padded in padded:
            added[PADDED_BATCHES] += was_padded.to(device)
        return added, largest

    def lacking(self, snapshot: Snapshot) -> list[str]:
        """Names of sites that this rank has seen and that have no slot."""
        return [site.label.name for site in snapshot.sites if identity(site.label) not in self._numbers]

    def nothing(self, failures: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same of a rank that has seen no row."""
        added = torch.zeros(self.added_size, dtype=torch.float64, device=device)
        largest = torch.zeros(self.largest_size, dtype=torch.float64, device=device)
        added[FAILURES] = failures
        largest[: self.heads] = -math.inf
        return added, largest

    def put_loss(self, added: Tensor, loss: float | Tensor) -> None:
        """Puts in the loss of one rank. Nothing waits."""
        if isinstance(loss, Tensor):
            loss = loss.reshape(()).to(added.device, non_blocking=True)
        added[LOSS], added[LOSSES] = loss, 1.0

    def put_distances(self, largest: Tensor, own: Tensor, added: Tensor, rank: int) -> None:
        """Puts into ``largest`` how far the mean normalised entropy of each site on this rank, of which ``own`` are the
        sums before they were reduced, is from that of all ranks: |own - all|, 1 where none of its rows is finite, -1
        where it has no row that sees two keys. The lowest bits are the rank.
        """
        at = places(self.fewest_keys)
        columns = [at[name].start for name in ("normalized_entropy", "rows_of_normalized_entropy", "rows", "nonfinite")]
        total, rows, finite, nonfinite = self._of_sites(self._sums(own)[:, columns]).unbind(1)
        all_total, all_rows, _, _ = self._of_sites(self._sums(added)[:, columns]).unbind(1)
        apart = torch.where(rows > 0, (total / rows - all_total / all_rows).abs(), 1.0)
        tagged = (apart.view(torch.int64) >> RANK_BITS << RANK_BITS) | (rank & RANKS)
        known = (rows > 0) | ((finite == 0) & (nonfinite > 0))
        place = slice(self.heads, self.heads + len(self.labels))
        largest[place] = torch.where(known, tagged.view(torch.float64), -1.0)

    def _sums(self, added: Tensor) -> Tensor:
        """[H, C]"""
        return added[:LOSS].view(self.heads, -1)

    def _sizes(self, largest: Tensor) -> Tensor:
        """[2, S] queries and keys."""
        return largest[self.heads + len(self.labels) :].view(2, -1)

    def _of_sites(self, columns: Tensor) -> Tensor:
        """[S, ...] sums over the heads of each site of [H, ...]."""
        sums = columns.new_zeros((len(self.labels), *columns.shape[1:]))
        return sums.index_add_(0, self._site_of_head.to(columns.device, non_blocking=True), columns)


@dataclass(frozen=True)
class MergedSample(DeviceSample):
    """A sample of all ranks of a group, as it lies on this one's device."""

    slots: Slots
    period: int
    backends: tuple[str, ...]
    ranks: int
    added: Tensor
    largest: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.added, self.largest]

    def with_tensors(self, tensors: Iterator[Tensor]) -> MergedSample:
        added, largest = tensors
        return replace(self, added=added, largest=largest)

    @property
    def loss(self) -> Tensor:
        """[] the mean over the ranks that have one, on the device; NaN where none has."""
        return self.added[LOSS] / self.added[LOSSES]

    def join(self) -> SampleSums:
        """The sites of which any rank has seen rows. Waits for the device."""
        slots, added, largest = self.slots, self.added.cpu(), self.largest.cpu()
        sums = slots._sums(added).clone()
        sums[:, LARGEST] = largest[: slots.heads]
        distances = largest[slots.heads : slots.heads + len(slots.labels)]
        sizes = slots._sizes(largest).long().tolist()
        sites, differences = [], {}
        for number, (label, distance) in enumerate(zip(slots.labels, distances.tolist(), strict=True)):
            part = sums[slots.places[label.key]]
            if added[PADDED_BATCHES] or not part[:, :3].any():
                continue  # taps count rows of padding, too
            sites.append(_site(label, part, slots.fewest_keys, sizes[0][number], sizes[1][number]))
            if distance >= 0:
                rank = int(distances[number].view(torch.int64)) & RANKS
                differences[label.key] = RankDifference(distance, rank)
        return SampleSums(
            tuple(sites), self.period, round(float(added[TOKENS])), self.backends, self._reasons(added), differences
        )

    def _reasons(self, added: Tensor) -> dict[str, str]:
        reasons = {}
        if failures := int(added[FAILURES]):
            told = count(failures, "failure")
            reasons["ranks"] = f"{told} of ours on {self.ranks} ranks: this sample has what else they measured"
        if added[PADDED_BATCHES]:
            reasons |= {label.name: PADDED for label in self.slots.labels}
        return reasons


def _site(label: SiteLabel, sums: Tensor, fewest_keys: int, queries: int, keys: int) -> SiteSums:
    site = SiteSums(label, fewest_keys=fewest_keys).with_sums(sums)
    site.queries, site.keys = queries, keys
    return site
