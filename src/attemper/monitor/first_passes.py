"""The forward passes before the first ``watch.step()``: one step together, or steps of their own. Only that call tells
which, so they are measured and held back until it comes.
"""

from __future__ import annotations

import time
from operator import ne
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

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

NO_STEP = (
    "attemper: the weights change between these forward passes, and watch.step() was never called: each forward pass "
    "counts as a step, also one of validation or of an accumulated gradient. In a training loop, call "
    "watch.step(loss=loss) once after each optimizer.step()."
)
FEWEST_UPDATES = 2
"""So many are a training."""
MOST_LOOKED_AT = 256
"""Passes between which updates are looked for."""


class Updates:
    """Counts updates of the weights between forward passes in training mode, by the versions of tensors: nothing is
    hooked. Code that changes a few weights by itself, such as ``max_norm`` of an embedding, is none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._versions: list[int] = []
        self._passes = self.many = 0

    def look(self) -> bool:
        """Whether there were enough by now."""
        self._passes += 1
        if self._passes > MOST_LOOKED_AT or self.many >= FEWEST_UPDATES:
            return self.many >= FEWEST_UPDATES
        weights = (one for one in self._model.parameters() if one.requires_grad and not is_lazy(one))
        before, self._versions = self._versions, [one._version for one in weights if not one.is_inference()]
        if self._model.training and torch.is_grad_enabled() and len(before) == len(self._versions):
            self.many += 2 * sum(map(ne, before, self._versions)) > len(before)
        return self.many >= FEWEST_UPDATES


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
        """``shown``: the number of the step that begins."""
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
