"""A sample on its devices, how it comes to the host without waiting, and the sample of all heads that it becomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from attemper.call.call_sums import BACKEND, CallSums
from attemper.call.normalizer import is_rowwise
from attemper.call.result import AttentionStats
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.tap_sums import TapSums
from attemper.readings.reading import SiteReading, Skipped
from attemper.readings.sample import FARTHEST_RANK, RANK_DIFFERENCE, Sample, SiteKey
from attemper.readings.sums import plan_of
from attemper.statistics import COUNTED, rowwise_names


class RankDifference(NamedTuple):
    """The rank whose mean normalised entropy of a site is farthest from that of all ranks."""

    value: float
    """Distance of its mean, of log n; 1 where none of its rows is finite."""
    rank: int
    """Its number among all processes."""


@dataclass(frozen=True)
class SampleSums:
    """A sample with calls and taps joined, and what is known of it beside its sites."""

    sites: tuple[SiteSums, ...]
    period: int
    """Which of the watch's samples it is."""
    tokens: int
    backends: tuple[str, ...]
    reasons: Mapping[str, str]
    """Name -> why a tap is not shown."""
    differences: Mapping[SiteKey, RankDifference] | None = None
    """How far apart the ranks are that the sample is of; None for one process."""


@dataclass(frozen=True)
class SampleReadings:
    """What there is to show of the latest sample."""

    sites: tuple[SiteReading, ...]
    skipped: tuple[Skipped, ...]
    tokens: int
    """Real tokens: query rows of the first site of each pass."""
    backend: str
    """The backends that computed it, joined by commas."""
    last: Mapping[str, AttentionStats | CallSums]
    """Rows of the last call of a site, where they were kept."""
    period: int
    """Which of the watch's samples it is."""


class DeviceSample:
    """A sample as it lies on its devices."""

    done = True
    """Whether ``wait`` would not wait."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that has to come to the host."""
        raise NotImplementedError

    def with_tensors(self, tensors: Iterator[Tensor]) -> Self:
        """The same sample with other ``tensors`` of the same shapes."""
        raise NotImplementedError

    def join(self) -> SampleSums:
        """What it holds. Waits for the devices."""
        raise NotImplementedError

    def wait(self) -> Self:
        """The sample itself: as a :class:`Transfer`, which waits."""
        return self

    @property
    def on_host(self) -> bool:
        """Whether nothing has to be copied."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors)

    def to_host(self) -> Transfer:
        """Begins to copy the sample to the host, behind all that its devices have to do; nothing waits."""
        tensors = self.tensors
        copied = {
            device: _Copy.of([t for t in tensors if t.device == device]) for device in {t.device for t in tensors}
        }
        return Transfer(self, tensors, copied)


@dataclass(frozen=True)
class Snapshot(DeviceSample):
    """What one process has seen: its calls, and what its taps have summed."""

    sites: tuple[SiteSums, ...]
    period: int
    """Of ``sites``."""
    tokens: Tensor | int
    backends: tuple[str, ...]
    taps: TapSums

    def join(self) -> SampleSums:
        """Calls and taps together. Waits for the devices."""
        period, tapped, tokens, reasons = self.taps.latest()
        fresh = period <= self.period
        sites = {site.key: site for site in self.sites if fresh}
        backends = self.backends if fresh else ()
        # Tokens of a pass that was seen count those of its taps, too.
        tokens = round(float(self.tokens)) if sites else tokens
        if period >= self.period and tapped:
            backends = tuple(dict.fromkeys([*backends, BACKEND]))
            for site in tapped:
                sites[site.key] = site if site.key not in sites else sites[site.key].with_sums_of(site)
        return SampleSums(tuple(sites.values()), max(period, self.period), tokens, backends, reasons)

    @property
    def tensors(self) -> list[Tensor]:
        own = [self.tokens] if isinstance(self.tokens, Tensor) else []
        return [*(site.sums for site in self.sites), *own, *self.taps.tensors]

    def with_tensors(self, tensors: Iterator[Tensor]) -> Snapshot:
        sites = tuple(site.with_sums(next(tensors)) for site in self.sites)
        tokens = next(tensors) if isinstance(self.tokens, Tensor) else self.tokens
        return replace(self, sites=sites, tokens=tokens, taps=self.taps.with_tensors(tensors))


@dataclass(frozen=True)
class _Copy:
    """Tensors of one device on their way to the host, one after another in float64."""

    numbers: Tensor
    arrived: torch.cuda.Event | None
    """None where nothing has to be waited for."""

    @classmethod
    def of(cls, tensors: list[Tensor]) -> _Copy:
        if tensors[0].device.type != "cuda":
            return cls(torch.cat([tensor.detach().cpu().reshape(-1).to(torch.float64) for tensor in tensors]), None)
        return cls(*begin_copy(torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])))


def begin_copy(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Numbers of a CUDA device on their way to the host, behind what is queued there, and what tells that they came."""
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(numbers.device))
    return host, arrived


@dataclass(frozen=True)
class Transfer:
    """A sample on its way to the host."""

    _sample: DeviceSample
    _tensors: list[Tensor]
    _copies: Mapping[torch.device, _Copy]

    @property
    def done(self) -> bool:
        """Whether ``wait`` would not wait."""
        return all(copy.arrived is None or copy.arrived.query() for copy in self._copies.values())

    def wait(self) -> DeviceSample:
        """The sample on the host."""
        parts = {}
        for device, copy in self._copies.items():
            if copy.arrived is not None:
                copy.arrived.synchronize()
            own = [tensor for tensor in self._tensors if tensor.device == device]
            parts[device] = iter(copy.numbers.split([tensor.numel() for tensor in own]))
        return self._sample.with_tensors(next(parts[one.device]).view(one.shape) for one in self._tensors)


def sample_of(step: int, time: float, sites: Sequence[SiteSums], stats: tuple[str, ...], tokens: int) -> Sample:
    """The sample of a step. Waits for the device if ``sites`` are on one.

    Args:
        sites: what was measured, at least one.
        stats: names of statistics that were asked for; a quantity of any other would be NaN.
    """
    stats = (*stats, *COUNTED)
    if any(is_rowwise(site.label.normalizer) for site in sites):
        stats = (*stats, *rowwise_names(stats))
    plan, sums = plan_of(stats, sites[0].fewest_keys), torch.cat([site.sums for site in sites]).cpu().numpy()
    values = plan.values(sums, [(site.queries, site.keys, site.label.heads) for site in sites])
    return Sample(step, time, tuple(site.label for site in sites), plan.quantities, values, tokens)


def with_differences(sample: Sample, differences: Mapping[SiteKey, RankDifference]) -> Sample:
    """The sample with how far apart its ranks are, the same number for all heads of a site."""
    import numpy as np

    nothing = np.full((2, sample.values.shape[1]), np.nan, sample.values.dtype)
    for key, difference in differences.items():
        if key in sample.places:
            nothing[:, sample.places[key]] = np.array(difference)[:, None]
    return sample.plus((RANK_DIFFERENCE, FARTHEST_RANK), nothing)
