"""What taps have summed in buffers on their devices: where CUDA graphs are replayed, no pass and no call is seen.

Whether the model ran in a step is known to the device alone, so samples are kept apart there: each carries the number
of the step it is of, and one in which nothing ran does not take the place of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attemper.backends.sums import empty_sums, join
from attemper.call.sums import BACKEND
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.options import Scope
from attemper.readings.sums import fits_buckets
from attemper.sites.tap_buffers import TapBuffer
from attemper.statistics import BY_NAME

PADDED = "a batch was padded, which a tap in compiled code on a GPU cannot tell"


@dataclass(frozen=True)
class _Sample:
    name: str
    sums: Tensor
    """[H, WIDTH]"""
    period: Tensor
    """Of which step, as a number on the device; -1 of none."""


class TapSums:
    """The latest sample of every buffer of a watch."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._samples: dict[TapBuffer, _Sample] = {}
        self._padded: dict[torch.device, Tensor] = {}

    def refusal(self, buffer: TapBuffer) -> str | None:
        """Why the sums of a buffer are not what this watch measures; None where they are."""
        if buffer.refused is not None:
            return buffer.refused
        if self._scope.backend not in ("auto", BACKEND):
            return f"in compiled code on a GPU a tap is measured by {BACKEND}, not by backend={self._scope.backend!r}"
        if "gini" in self._scope.stats:
            return "in compiled code on a GPU a tap has no gini, which needs whole rows: leave it out of stats="
        if lacking := [name for name in self._scope.stats if name in BY_NAME]:
            return f"in compiled code on a GPU a tap has no {' and no '.join(lacking)}: leave it out of stats="
        if not fits_buckets(self._scope.fewest_keys):
            below = 1 << (self._scope.fewest_keys.bit_length() - 1)
            return (
                "in compiled code on a GPU a tap counts rows by powers of two of their keys, and "
                f"fewest_keys={self._scope.fewest_keys} is not one: take {below} or {2 * below}"
            )
        if buffer.measured != {self._scope.rows}:
            counts = ", ".join(sorted(map(str, buffer.measured)))
            return (
                f"its graph was captured for rows={counts}, and this watch has rows={self._scope.rows}: open the watch "
                "before the model first runs"
            )
        return None

    def add(self, named: Mapping[TapBuffer, str], sums: Mapping[TapBuffer, Tensor], period: int) -> None:
        """Adds the sums of buffers, by ``named``'s names: of a step that is new, or of which some are here already."""
        ran = {
            device: torch.stack([part[:, :3].sum() for part in sums.values() if part.device == device]).sum() > 0
            for device in {part.device for part in sums.values()}
        }
        for buffer, name in named.items():
            self._put(buffer, name, sums[buffer], ran[sums[buffer].device], period)

    def _put(self, buffer: TapBuffer, name: str, found: Tensor, ran: Tensor, period: int) -> None:
        """Adds what a buffer has of a step, where it ``ran`` in it."""
        before = self._samples.get(buffer)
        if before is None:
            self._samples[buffer] = _Sample(name, found, torch.where(ran, period, -1))
            return
        kept = torch.where(before.period == period, join(before.sums, found), found)
        self._samples[buffer] = _Sample(
            name, torch.where(ran, kept, before.sums), torch.where(ran, period, before.period)
        )

    def note_padding(self, tokens: Tensor, period: int) -> None:
        """Takes note, without waiting, of the real tokens [B, Q] of a pass in which taps cannot tell padding."""
        last = torch.where(tokens.all(), -1, period)
        before = self._padded.get(tokens.device)
        self._padded[tokens.device] = last if before is None else torch.maximum(before, last)

    @property
    def names(self) -> set[str]:
        """Of the taps that may have run."""
        return {sample.name for sample in self._samples.values()}

    def join_steps(self, steps: Sequence[tuple[TapSnapshot, int]]) -> None:
        """Makes the sums of steps, each with its number, those of the last number."""
        last = steps[-1][1]
        self.restore(TapSnapshot(self._scope, {}, {}))
        for snapshot, number in steps:
            for buffer, sample in snapshot._samples.items():
                self._put(buffer, sample.name, sample.sums, sample.period == number, last)
            for device, period in snapshot._padded.items():
                self._padded[device] = torch.where(period == number, last, self._padded.get(device, -1))

    def restore(self, snapshot: TapSnapshot) -> None:
        """Makes an earlier sample the latest."""
        self._samples, self._padded = dict(snapshot._samples), dict(snapshot._padded)

    def snapshot(self) -> TapSnapshot:
        """What is here now: what is added later does not change it."""
        return TapSnapshot(self._scope, dict(self._samples), dict(self._padded))


@dataclass(frozen=True)
class TapSnapshot:
    """The latest sample of every buffer at one moment, as tensors on their devices or on the host."""

    _scope: Scope
    _samples: Mapping[TapBuffer, _Sample]
    _padded: Mapping[torch.device, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """All of it, for ``with_tensors``."""
        samples = [tensor for sample in self._samples.values() for tensor in (sample.sums, sample.period)]
        return [*samples, *self._padded.values()]

    def with_tensors(self, tensors: Iterator[Tensor]) -> TapSnapshot:
        """The same with other tensors of the same numbers, say on the host."""
        samples = {
            buffer: replace(sample, sums=next(tensors), period=next(tensors))
            for buffer, sample in self._samples.items()
        }
        return TapSnapshot(self._scope, samples, {device: next(tensors) for device in self._padded})

    def of_step(self, period: int) -> tuple[list[SiteSums], Tensor, list[Tensor]]:
        """The sites of the step of this number, with sums of no rows where nothing ran in it; its tokens; and for each
        device whether a batch of it was padded. Nothing waits.
        """
        sites, tokens = [], torch.zeros((), dtype=torch.float64)
        for buffer, sample in self._samples.items():
            nothing = empty_sums(sample.sums.shape[0], sample.sums.device)
            sums = torch.where(sample.period == period, sample.sums, nothing)
            if not sites:
                tokens = sums[0, :3].sum() * max(1.0, buffer.queries / (self._scope.rows or buffer.queries))
            sites.append(_site(buffer, replace(sample, sums=sums), self._scope.fewest_keys))
        return sites, tokens, [last == period for last in self._padded.values()]

    def latest(self) -> tuple[int, list[SiteSums], int, dict[str, str]]:
        """The number of the latest step, its sites, its tokens, and what is not shown of it. Waits for the devices."""
        samples = {buffer: (sample, int(sample.period)) for buffer, sample in self._samples.items()}
        latest = max((period for _, period in samples.values()), default=-1)
        sites, tokens = [], 0
        padded = latest >= 0 and any(int(period) == latest for period in self._padded.values())
        for buffer, (sample, period) in samples.items():
            counted = int(sample.sums[0, :3].sum()) if period == latest >= 0 else 0
            if not counted:
                continue
            if not sites:
                rows = self._scope.rows or buffer.queries
                tokens = round(counted * buffer.queries / rows) if rows < buffer.queries else counted
            sites.append(_site(buffer, sample, self._scope.fewest_keys))
        if padded:
            return latest, [], 0, {site.name: PADDED for site in sites}
        return latest, sites, tokens, {}


def _site(buffer: TapBuffer, sample: _Sample, fewest_keys: int) -> SiteSums:
    heads, device = sample.sums.shape[0], sample.sums.device
    site = SiteSums(sample.name, "self", buffer.mode, heads=heads, device=device, fewest_keys=fewest_keys)
    site.first_head = buffer.first_head
    site.add_sums(sample.sums, buffer.queries, buffer.keys)
    return site
