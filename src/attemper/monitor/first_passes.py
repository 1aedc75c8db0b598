"""The forward passes before the first ``watch.step()``: one step together, or steps of their own. Only that call tells
which, so they are measured and held back until it comes.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from attemper.monitor.collector import Collector
from attemper.monitor.options import Schedule
from attemper.monitor.recorder import Recorder
from attemper.monitor.snapshot import Snapshot

MOST_PASSES = 16
"""Sums of so many are held. With one more, passes are steps."""
LATE_STEP = (
    "attemper: the first watch.step() came after {} forward passes. Only 16 are kept until then, so these became "
    "steps, and this step has only its last pass. Call watch.step() once before the loop."
)


class _Pass(NamedTuple):
    number: int
    """As a step of its own."""
    kept: bool
    """Whether ``every`` keeps it as such."""
    period: int
    """Its number among those that the collector counts."""
    time: float
    sample: Snapshot


class FirstPasses:
    """Passes that are held back, each a snapshot on its device. What the watch shows meanwhile is the last pass that it
    would have sampled were passes its steps.
    """

    def __init__(self, collector: Collector, recorder: Recorder, shown: int) -> None:
        """
        Args:
            shown: the number of the step that begins.
        """
        self._collector, self._recorder = collector, recorder
        self._passes: list[_Pass] = []
        self._given = 0
        """How many of them are steps of the run already, because somebody asked for it."""
        self._shown, self._last = (collector.snapshot(), collector.last), collector.last
        self.shown = shown
        """Number of the pass that is shown."""

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def waiting(self) -> int:
        """How many would be lost as steps of their own."""
        return sum(one.kept for one in self._passes[self._given :])

    def hold(self, number: int, period: int, schedule: Schedule) -> None:
        """Holds the pass back that has ended as ``number``, and what was measured in ``period``."""
        collector = self._collector
        found, self._last = collector.snapshot(), collector.last
        self._passes.append(_Pass(number, schedule.kept, period, time.time(), found))
        if schedule.sampled:
            self.shown, self._shown = number, (found, self._last)
        else:
            collector.restore(*self._shown)

    def give(self) -> None:
        """Makes the passes steps of their own, as far as ``every`` keeps them; ``join`` may still take their place."""
        while self._given < len(self._passes):
            one = self._passes[self._given]
            if one.kept:
                self._recorder.put(one.number, one.sample, one.time)
            self._given += 1

    def join(self) -> None:
        """Makes all passes the collector's sample."""
        self._collector.join_passes([(one.sample, one.period) for one in self._passes], self._last)
