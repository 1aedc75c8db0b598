"""What a watch is to taps: which of them are its model's, when they are measured, and where their sums go."""

from __future__ import annotations

import random

from torch import Tensor, nn

from attemper.monitor.collector import Collector
from attemper.monitor.first_passes import FirstPasses
from attemper.monitor.hooks import quietly
from attemper.monitor.options import Schedule
from attemper.sites import tap, tap_buffers
from attemper.sites.names import unwrap


class TapReceiver:
    """The part of a watch that ``sites.tap`` and ``sites.tap_buffers`` know."""

    model: nn.Module
    passes: int
    rows: int | None
    _collector: Collector
    _schedule: Schedule
    _inside: bool
    """Whether a forward of the model runs."""
    _tapped: bool
    """Whether taps may have run on their device in this step."""
    _first: FirstPasses | None
    """Passes until the first step; None once it is known what they are."""
    _stepping: bool
    """Whether steps are counted, and not passes."""

    @property
    def sampling(self) -> bool:
        """Whether the step that is running is sampled."""
        return self._holding or self._schedule.sampling

    @property
    def _holding(self) -> bool:
        """Whether passes are held back: no step has ended yet."""
        return self._first is not None and not self._stepping

    @property
    def measures(self) -> bool:
        """Whether a pass of the model is being measured, which sees taps itself."""
        raise NotImplementedError

    def begin_sample(self) -> None:
        """Begins a new sample, unless one has begun in this step."""
        raise NotImplementedError

    def _switch_taps(self) -> None:
        """Raises or lowers the flag that taps ask on their device, for the step or pass that comes."""
        if self.sampling:
            tap_buffers.raise_flag(self, self._start())
        else:
            tap_buffers.lower_flag(self)

    def _start(self) -> float:
        """Where the rows that taps sample on their device start, in [0, 1)."""
        # Python's own: inside a transform of torch.func, torch may refuse to draw.
        return random.Random(self._schedule.place).random()

    @property
    def observer(self) -> Collector:
        """Who is told of taps that this samples."""
        return self._collector

    @quietly
    def samples(self, site: nn.Module) -> bool:
        """Whether this tap is to be measured now; a new sampled step starts a new reading.

        Another model's tap is not: a module tells whose it is; a name belongs to the model that is running (or to one
        that a compiled wrapper calls, so that no hook has ever seen it run).
        """
        if self.measures or not self.sampling or self.runs(site) is None:
            return False
        self.begin_sample()
        return True

    @property
    def running(self) -> bool:
        """Whether the watched model's forward is seen to run now."""
        return self._inside

    @quietly
    def runs(self, site: nn.Module) -> nn.Module | None:
        """The watched model, if the tap of ``site`` that is called now belongs to it."""
        named = isinstance(site, tap.NamedSite)
        mine = (self._inside or not self.passes) if named else self._collector.owns(site)
        return unwrap(self.model) if mine else None

    def module_of(self, site: str) -> str:
        """The name of the module in which the attention of a site runs; see ``Collector.module_of``."""
        return self._collector.module_of(site)

    @quietly
    def receives(self, buffer: tap_buffers.TapBuffer) -> bool:
        """Whether the tap of ``buffer`` is the watched model's: by its module, or by whose name it is known to be."""
        site = tap.site_of(buffer)
        if site is None or isinstance(site, tap.NamedSite):
            return site is not None and (not buffer.models or unwrap(self.model) in buffer.models)
        return self._collector.owns(site)

    @quietly
    def receive(self, sums: list[tuple[tap_buffers.TapBuffer, Tensor]]) -> None:
        """Receives what taps have summed on their devices, in this step or pass so far."""
        sites = ((buffer, tap.site_of(buffer), part) for buffer, part in sums)
        found = {buffer: (self._collector.name_of(site), part) for buffer, site, part in sites if site is not None}
        self._collector.add_taps(found)
        self._tapped = self._tapped or any(buffer.may_have_run for buffer in found)
