"""Which step a sample is of: samples begin, end and are recorded.

The forward passes before the first ``watch.step()`` are one step together, or steps of their own. Only that call tells
which, so they are measured and held back until it comes.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from operator import ne
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attemper.monitor.checked_model import why_not_loaded
from attemper.monitor.collector import Collector
from attemper.monitor.hooks import quietly, weakly
from attemper.monitor.options import Schedule, WatchOptions
from attemper.monitor.recorder import Recorder, about
from attemper.monitor.snapshot import Snapshot
from attemper.sites import tap, tap_buffers
from attemper.sites.names import class_name, unwrap
from attemper.sites.padding import CallContext
from attemper.text import clean

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


class SampledSteps:
    """The part of a watch that counts passes and steps, and records the samples of some; it is what
    ``sites.tap_buffers`` knows of a watch.
    """

    _inside: bool
    """Whether a forward of the model runs."""

    def __init__(
        self, model: nn.Module, options: WatchOptions, start: int | None, recorder: Callable[..., Recorder]
    ) -> None:
        """
        Args:
            start: the number of the step that begins, where the loop knows it.
            recorder: makes what takes the samples.
        """
        self.model, self.every, self.rows = model, options.every, options.rows
        self.title = class_name(unwrap(model))
        self._failures = 0
        self.passes = self.steps = self.sampled = 0
        self._due = False
        """Whether a sample has ended that is not recorded yet."""
        self._first: FirstPasses | None = None
        """Passes until the first step; None once it is known what they are."""
        self._stepping, self._fresh = options.reduce is not None, False
        """Whether steps are counted, and not passes; whether a sample has begun in this step."""
        self._date: float | None = None
        """When the latest sample began; None where only taps in compiled code were seen."""
        self._tapped = False
        """Whether taps may have run on their device in this step."""
        self._context = CallContext()
        self._collector = Collector(model, self._context, options.scope, quiet=weakly(self.note_failure))
        self._recorder = recorder(self._collector, options, about(model, options), start)
        self._schedule = Schedule(options.every, self._recorder.first_step, self._recorder.last_step, start)
        self._sampled_number = self._schedule.number
        """Of the step that was sampled last."""
        self._first = FirstPasses(self._collector, self._recorder, self._sampled_number)

    @property
    def failures(self) -> int:
        """How often something of ours failed: calls that could not be measured, and samples that the store lost."""
        return self._failures + self._recorder.dropped

    def note_failure(self, where: str, error: Exception) -> None:
        """Counts a failure of ours; the first one is told, none reaches the training step."""
        self._failures += 1
        why = why_not_loaded(self.model) or str(error)
        self._collector.skipped[where] = why
        if self._failures == 1:
            warnings.warn(clean(f"attemper: {where} could not be measured: {why}. Training goes on."), stacklevel=2)

    def _begin_step(self, ended: int) -> None:
        """Begins a step, or a pass where passes are the steps: what comes is another sample than that of ``ended``."""
        if self._tapped and not self._fresh:
            self.sampled += not self._holding or self._schedule.sampled
        if self._tapped or self._fresh:
            self._sampled_number, self._due = ended, True
        self._switch_taps()
        self._tapped = self._fresh = False
        self._collector.period += 1

    def begin_sample(self) -> None:
        """Begins a new sample, unless one has begun in this step."""
        if not self._fresh:
            if self._due:
                self._record()
            self._collector.commit()
            self._collector.forget()
            # By the place in the run, so that a run that was resumed samples the rows that it would have sampled.
            self._collector.generator.manual_seed(self._schedule.place)
            self._fresh, self._date = True, time.time()
            self.sampled += not self._holding or self._schedule.sampling
            self._sampled_number = self._schedule.number

    @quietly
    def _record(self) -> None:
        """Takes the sample that has ended. A pass is taken when the next one begins: both may be of one step."""
        self._add_due(kept=self._keeps)
        self._recorder.settle()

    @property
    def _keeps(self) -> bool:
        """Whether what has ended is kept: what ranks merge is kept by ``step``, on all of them."""
        return self._schedule.kept and not self._recorder.merges

    def _add_due(self, *, kept: bool) -> None:
        """A signal that ends the process in between adds it once more, which changes nothing."""
        first = self._first
        try:
            if first is not None and self._due and (self._holding or first):
                first.hold(self._sampled_number, self._collector.period - 1, self._schedule)
            if first is not None and self._holding:
                self._sampled_number = first.shown
            elif first:
                first.join()
                self._due, self.sampled = True, 1
            if self._due and kept and not self._holding:
                self._recorder.add(self._sampled_number)
        finally:
            self._due = False
            self._first = first if self._holding else None

    @quietly
    def _keep_passes(self) -> None:
        """Makes passes the steps: no step has come in time."""
        if self._first is not None:
            self._first.give()
            self._first = None
            self._recorder.settle()

    @quietly
    def _hand_over(self, until: float) -> None:
        """Before the process ends: keeps what has ended and is not recorded, until ``until`` (monotonic)."""
        self._add_due(kept=self._keeps)
        if self._first is not None:
            self._first.give()
        self._recorder.hand_over(until)

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
