"""A sample on its devices, how it comes to the host without waiting, and what its calls and taps are together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attemper.call.sums import BACKEND
from attemper.monitor.head_sums import SiteSums
from attemper.monitor.tap_sums import TapSnapshot


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


@dataclass(frozen=True)
class Snapshot:
    """A sample as it lies on its devices: calls that were seen, and what taps have summed."""

    sites: tuple[SiteSums, ...]
    period: int
    """Of ``sites``."""
    tokens: Tensor | int
    backends: tuple[str, ...]
    taps: TapSnapshot

    done = True
    """Whether ``wait`` would not wait."""

    def wait(self) -> Snapshot:
        """The snapshot itself: as a :class:`Transfer`, which waits."""
        return self

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
    def on_host(self) -> bool:
        """Whether nothing has to be copied."""
        return all(tensor.device.type == "cpu" for tensor in self._tensors)

    @property
    def _tensors(self) -> list[Tensor]:
        own = [self.tokens] if isinstance(self.tokens, Tensor) else []
        return [*(site.sums for site in self.sites), *own, *self.taps.tensors]

    def to_host(self) -> Transfer:
        """Begins to copy the sample to the host, behind all that its devices have to do; nothing waits."""
        tensors = self._tensors
        copied = {
            device: _Copy.of([t for t in tensors if t.device == device]) for device in {t.device for t in tensors}
        }
        return Transfer(self, tensors, copied)


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
        numbers = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(numbers.device))
        return cls(host, arrived)


@dataclass(frozen=True)
class Transfer:
    """A snapshot on its way to the host."""

    _snapshot: Snapshot
    _tensors: list[Tensor]
    _copies: Mapping[torch.device, _Copy]

    @property
    def done(self) -> bool:
        """Whether ``wait`` would not wait."""
        return all(copy.arrived is None or copy.arrived.query() for copy in self._copies.values())

    def wait(self) -> Snapshot:
        """The snapshot on the host."""
        parts = {}
        for device, copy in self._copies.items():
            if copy.arrived is not None:
                copy.arrived.synchronize()
            own = [tensor for tensor in self._tensors if tensor.device == device]
            parts[device] = iter(copy.numbers.split([tensor.numel() for tensor in own]))
        here = iter([next(parts[tensor.device]).view(tensor.shape) for tensor in self._tensors])
        sites = tuple(site.with_sums(next(here)) for site in self._snapshot.sites)
        tokens = next(here) if isinstance(self._snapshot.tokens, Tensor) else self._snapshot.tokens
        taps = self._snapshot.taps.with_tensors(here)
        return replace(self._snapshot, sites=sites, tokens=tokens, taps=taps)
