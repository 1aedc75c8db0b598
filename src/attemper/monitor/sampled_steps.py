"""Which step a sample is of: samples begin, end and are recorded; passes before the first step are held back."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable

from torch import Tensor, nn

from attemper.monitor.checked_model import why_not_loaded
from attemper.monitor.collector import Collector
from attemper.monitor.first_passes import FirstPasses
from attemper.monitor.hooks import quietly, weakly
from attemper.monitor.options import Schedule, WatchOptions
from attemper.monitor.recorder import Recorder, about
from attemper.sites import tap, tap_buffers
from attemper.sites.names import class_name, unwrap
from attemper.sites.padding import CallContext
from attemper.text import clean


class SampledSteps:
    """The part of a watch that counts passes and steps, and records the samples of some; it is what ``sites.tap`` and
    ``sites.tap_buffers`` know of a watch.
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

    def module_of(self, site: str) -> str:
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
