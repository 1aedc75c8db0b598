"""What taps have summed in buffers on their devices: where CUDA graphs are replayed, no pass and no call is seen.

Whether the model ran in a step is known to the device alone, so samples are kept apart there: each carries the number
of the step it is of, and one in which nothing ran does not take the place of the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attemper.backends.sums import empty_sums, join
from attemper.call.call_sums import BACKEND
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.options import Scope
from attemper.readings.labels import layer_of
from attemper.readings.sample import SiteLabel
from attemper.readings.sums import fits_buckets
from attemper.sites.tap_buffers import TapBuffer
from attemper.statistics import BY_NAME

PADDED = "a batch was padded, which a tap in compiled code on a GPU cannot tell"


@dataclass(frozen=True)
class _Sample:
    """The latest sample of all taps of one device: one tensor, so that what a step costs does not grow with them."""

    rows: Mapping[TapBuffer, slice]
    """Where the heads of each buffer stand."""
    sums: Tensor
    """[all heads, WIDTH]"""
    period: Tensor
    """Of which step, as a number on the device; -1 of none."""

    def with_rows(self, buffers: Iterable[TapBuffer]) -> _Sample:
        """The same with room for more buffers, which hold nothing yet."""
        rows, end = dict(self.rows), self.sums.shape[0]
        for buffer in buffers:
            if buffer not in rows:
                rows[buffer] = slice(end, end := end + buffer.sums.shape[0])
        if end == self.sums.shape[0]:
            return self
        more = empty_sums(end - self.sums.shape[0], self.sums.device)
        return replace(self, rows=rows, sums=torch.cat((self.sums, more)))


@dataclass(frozen=True)
class TapSums:
    """The latest sample of every buffer of a watch, as tensors on their devices or on the host. What comes later makes
    another one.
    """

    _scope: Scope
    _names: Mapping[TapBuffer, str] = field(default_factory=dict)
    _samples: Mapping[torch.device, _Sample] = field(default_factory=dict)
    _padded: Mapping[torch.device, Tensor] = field(default_factory=dict)
    """The last step in which a batch was padded, as a number on the device; -1 for none."""

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

    def plus(self, named: Mapping[TapBuffer, str], sums: Mapping[TapBuffer, Tensor], period: int) -> TapSums:
        """With the sums of buffers, by ``named``'s names: of a step that is new, or of which some are here already."""
        samples = dict(self._samples)
        for device in {part.device for part in sums.values()}:
            own = {buffer: part for buffer, part in sums.items() if part.device == device}
            ran = torch.cat(list(own.values()))[:, :3].sum() > 0
            own = {buffer: part for buffer, part in own.items() if buffer in named}
            if own:
                samples[device] = _plus(samples.get(device), device, own, ran, period)
        return replace(self, _names={**self._names, **named}, _samples=samples)

    def with_padding(self, tokens: Tensor, period: int) -> TapSums:
        """With a note of the real tokens [B, Q] of a pass in which taps cannot tell padding. Nothing waits."""
        last = torch.where(tokens.all(), -1, period)
        before = self._padded.get(tokens.device)
        last = last if before is None else torch.maximum(before, last)
        return replace(self, _padded={**self._padded, tokens.device: last})

    @classmethod
    def of_steps(cls, steps: Sequence[tuple[TapSums, int]]) -> TapSums:
        """The sums of steps, each with its number, as those of the last number."""
        names, samples, padded, last = {}, {}, {}, steps[-1][1]
        for own, number in steps:
            names |= own._names
            for device, sample in own._samples.items():
                found = {buffer: sample.sums[rows] for buffer, rows in sample.rows.items()}
                samples[device] = _plus(samples.get(device), device, found, sample.period == number, last)
            for device, period in own._padded.items():
                padded[device] = torch.where(period == number, last, padded.get(device, -1))
        return cls(steps[-1][0]._scope, names, samples, padded)

    @property
    def names(self) -> set[str]:
        """Of the taps that may have run."""
        return set(self._names.values())

    @property
    def tensors(self) -> list[Tensor]:
        """All of it, for ``with_tensors``."""
        samples = [tensor for sample in self._samples.values() for tensor in (sample.sums, sample.period)]
        return [*samples, *self._padded.values()]

    def with_tensors(self, tensors: Iterator[Tensor]) -> TapSums:
        """The same with other tensors of the same numbers, say on the host."""
        samples = {
            device: replace(sample, sums=next(tensors), period=next(tensors))
            for device, sample in self._samples.items()
        }
        return replace(self, _samples=samples, _padded={device: next(tensors) for device in self._padded})

    def of_step(self, period: int) -> tuple[list[SiteSums], Tensor, list[Tensor]]:
        """The sites of the step of this number, with sums of no rows where nothing ran in it; its tokens; and for each
        device whether a batch of it was padded. Nothing waits.
        """
        sites, tokens, of_device = [], torch.zeros((), dtype=torch.float64), {}
        for device, sample in self._samples.items():
            nothing = empty_sums(len(sample.sums), sample.sums.device)
            of_device[device] = torch.where(sample.period == period, sample.sums, nothing)
        for buffer, name, place in self._places():
            sums = of_device[place][self._samples[place].rows[buffer]]
            if not sites:
                tokens = sums[0, :3].sum() * max(1.0, buffer.queries / (self._scope.rows or buffer.queries))
            sites.append(_site(buffer, name, sums, self._scope.fewest_keys))
        return sites, tokens, [last == period for last in self._padded.values()]

    def latest(self) -> tuple[int, list[SiteSums], int, dict[str, str]]:
        """The number of the latest step, its sites, its tokens, and what is not shown of it. Waits for the devices."""
        periods = {device: int(sample.period) for device, sample in self._samples.items()}
        latest = max(periods.values(), default=-1)
        sites, tokens = [], 0
        padded = latest >= 0 and any(int(period) == latest for period in self._padded.values())
        for buffer, name, device in self._places():
            sums = self._samples[device].sums[self._samples[device].rows[buffer]]
            counted = int(sums[0, :3].sum()) if periods[device] == latest >= 0 else 0
            if not counted:
                continue
            if not sites:
                rows = self._scope.rows or buffer.queries
                tokens = round(counted * buffer.queries / rows) if rows < buffer.queries else counted
            sites.append(_site(buffer, name, sums, self._scope.fewest_keys))
        if padded:
            return latest, [], 0, {site.label.name: PADDED for site in sites}
        return latest, sites, tokens, {}

    def _places(self) -> Iterator[tuple[TapBuffer, str, torch.device]]:
        """Every buffer with its site's name and its device, in the order in which they were first seen."""
        for buffer, name in self._names.items():
            device = buffer.sums.device
            if device in self._samples and buffer in self._samples[device].rows:
                yield buffer, name, device


def _plus(
    before: _Sample | None, device: torch.device, found: Mapping[TapBuffer, Tensor], ran: Tensor, period: int
) -> _Sample:
    """The sample of a device with what its buffers have of a step, where anything ``ran`` in it."""
    if before is None:
        before = _Sample({}, empty_sums(0, device), torch.full((), -1, device=device))
    before = before.with_rows(found)
    parts = [found.get(buffer, buffer.nothing) for buffer in before.rows]
    sums = parts[0] if len(parts) == 1 else torch.cat(parts)
    kept = torch.where(before.period == period, join(before.sums, sums), sums)
    return _Sample(before.rows, torch.where(ran, kept, before.sums), torch.where(ran, period, before.period))


def _site(buffer: TapBuffer, name: str, sums: Tensor, fewest_keys: int) -> SiteSums:
    label = SiteLabel(name, "self", buffer.mode, layer_of(name), "full", "softmax", len(sums), buffer.first_head)
    site = SiteSums(label, sums.device, fewest_keys)
    site.add_sums(sums, buffer.queries, buffer.keys)
    return site
