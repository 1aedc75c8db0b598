"""The memory of a watch: every sample is judged in the training thread and handed to the writer of the run."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from attemper.monitor.checked_model import configuration, provenance
from attemper.monitor.collector import Collector
from attemper.monitor.kept_run import KeptRun
from attemper.monitor.options import Schedule, WatchOptions
from attemper.monitor.scalars import Scalars, ScalarsUnderway
from attemper.monitor.snapshot import DeviceSample, SampleReadings, SampleSums, Transfer, sample_of
from attemper.readings.alarms import LOSS, is_heard, lines
from attemper.readings.judge import Judge
from attemper.readings.labels import JOINED
from attemper.readings.loss_judge import LossJudge
from attemper.readings.reading import Alarm
from attemper.readings.sample import Sample
from attemper.readings.visible_keys import Surplus
from attemper.sites.names import class_name, unwrap
from attemper.store.compaction import as_kept
from attemper.store.scalars import as_float32
from attemper.store.store import SHADOWED, UNMEASURED, UNNUMBERED, sentence
from attemper.text import count, cut

if TYPE_CHECKING:
    from attemper.results.run import Run

logger = logging.getLogger("attemper")

MOST_UNDERWAY = 64
"""Samples that may be on their way from a device before the oldest is waited for."""
MOST_JUDGED = 2_000
"""Samples that are judged again where a run goes on or goes back, two seconds of 1,024 heads; of a longer run the first
and the last."""
FIRST_JUDGED = 64
"""How many of them are the first: they hold what was normal."""
ARRIVES_SECONDS = 0.005
"""Between two looks whether a sample has come from its device, at the end of the process."""
SCALARS_SECONDS = 1.0
"""Numbers of steps are handed to the writer after so long, or with a sample."""
MOST_LOSSES = 100_000
"""Losses that are judged again where a run goes on or goes back: the last."""
MOST_LETTERS = 1_000
"""Of the reason why nothing was measured, in the store."""
UNSEEN = "no attention of it was seen in a sampled step"


@dataclass
class _Underway:
    """A sample on its way from its devices."""

    step: int
    time: float
    snapshot: Transfer | DeviceSample


class Recorder:
    """Takes the samples of a watch as they end."""

    merges = False
    """Whether samples of several ranks become one, when a step ends."""

    def __init__(
        self,
        collector: Collector,
        options: WatchOptions,
        about: Mapping[str, Any],
        start: int | None = None,
        number: int | None = None,
    ) -> None:
        """
        Args:
            about: what the store says of the run.
            start: the number of the step that begins, where the loop knows it: a run that goes on is judged up to it.
            number: of this process' fragment of the run; None for that of its rank.
        """
        self._start = start
        self._collector, self._on_alarm = collector, options.on_alarm
        self.judge = Judge(options.alarm_limits, options.fewest_keys)
        assert not isinstance(options.store, str | os.PathLike)  # a path has become a store
        self._kept = KeptRun(options.store, about, number)
        self._surplus = Surplus()
        self._skipped: dict[str, str] = {}
        self._underway: deque[_Underway] = deque()
        self.scalars = ScalarsUnderway()
        """Numbers of steps on their way from devices."""
        self._latest: tuple[int | None, dict[str, float]] = None, {}
        """The last step whose numbers have come, and these."""
        self._noted: int | None = None
        """The last step that was noted."""
        self._resumed = False
        """Whether the store has samples that were not judged yet."""
        self._advised: set[str] = set()
        """Sentences of advice that the log has."""
        self._shadowed = False
        """Whether the run's last sample was of a shadow pass."""
        self._judged = self._ended = -1
        """Which of the watch's samples was judged last, and which had ended then."""
        self.first_step: int | None = None
        """Of the run that is resumed; None for a new one."""
        self._stored_first: int | None = None
        """The first step that the store has, wherever this watch starts."""
        self.first_put: int | None = None
        """The step of the first sample of this watch."""
        if self.is_stored and self._kept.open().last_step is not None:
            self._resume()

    # --- samples ---

    def add(self, step: int) -> None:
        """Adds the sample that has ended, at this step. Nothing waits for a device; ``settle`` takes it."""
        self.put(step, self._collector.snapshot(), time.time())

    def put(self, step: int, found: DeviceSample, when: float) -> None:
        """Adds a sample that ended at ``when``, in seconds since 1970."""
        self.first_put = step if self.first_put is None else self.first_put
        if self._collector.shadowed != self._shadowed:
            self._shadowed = self._collector.shadowed
            before = self._kept.about.get(SHADOWED, ())
            self._kept.describe({SHADOWED: [*before, {"from_step": step, "shadow": self._shadowed}]})
        here = found.on_host and not self._underway
        self._underway.append(_Underway(step, when, found if here else found.to_host()))

    def settle(self, *, wait: bool = False) -> None:
        """Takes what has arrived from the devices, in its order; with ``wait`` all of it."""
        while self._underway:
            if not (wait or self._underway[0].snapshot.done or len(self._underway) > MOST_UNDERWAY):
                return
            for sample, found in self._keep_first():
                self._describe(sample, found)
                self._judge(sample, found.period)
                self._ended = found.period

    def hand_over(self, until: float) -> None:
        """At the end of the process: keeps what arrives from devices until then (monotonic), and counts the rest."""
        assert self._kept.writer is not None
        self._settle_scalars()
        self._kept.hand_numbers()
        try:
            while self._underway:
                while not (arrived := self._underway[0].snapshot.done) and time.monotonic() < until:
                    time.sleep(ARRIVES_SECONDS)
                if not arrived:
                    break
                for sample, found in self._keep_first():
                    self._describe(sample, found)
        finally:
            self._kept.writer.drop(len(self._underway), "the device was too slow for the end of the process")
            self._underway.clear()

    def forget(self, ended: int) -> None:
        """Ends the file of a watch that is garbage-collected without ``close()``. Its last samples count as dropped: in
        the middle of somebody's code no tensor can be read. ``ended``: how many samples have ended that were not added.
        """
        self._kept.forget(len(self._underway) + ended)

    def at_end(self, hand_over: Callable[[float], object], close: Callable[[], object]) -> None:
        """Has these methods of the watch called, if it exists then: ``hand_over`` before the process ends, ``close``
        when another watch of the process is to write the same run.
        """
        if (writer := self._kept.writer) is not None:
            writer.source, writer.owner = weakref.WeakMethod(hand_over), weakref.WeakMethod(close)

    def judge_now(self, step: int, *, apart: bool) -> Judge:
        """Judges the sample that is there, though more may be added to it. Waits for the devices. ``apart``: whether it
        is no sample of the run yet: a copy of the judge has seen it then, and nobody is told.
        """
        self.settle(wait=True)
        found = self._collector.join(self._collector.snapshot())
        if not found.sites or found.period == self._ended:
            return self.judge
        sample = self._sample(step, time.time(), found)
        if not apart:
            self._judge(sample, found.period)
            return self.judge
        if self._resumed:
            self._judge_earlier(step)
            self._resumed = True  # the first sample may get another number
        judge = deepcopy(self.judge)
        judge.feed(sample)
        return judge

    def _keep_first(self) -> Iterator[tuple[Sample, SampleSums]]:
        """Keeps the first of the samples that have been added; none if it has no site.

        A signal that ends the process in between finds it still there.
        """
        first = self._underway[0]
        try:
            found = self._collector.join(first.snapshot.wait())
            sample = self._sample(first.step, first.time, found) if found.sites else None
            if sample is not None:
                self._kept.take(sample)
        finally:
            if self._underway and self._underway[0] is first:
                self._underway.popleft()
        if sample is not None:
            yield sample, found

    def _sample(self, step: int, when: float, found: SampleSums) -> Sample:
        return self._surplus.with_surplus(sample_of(step, when, found.sites, self._collector.stats, found.tokens))

    def _judge(self, sample: Sample, period: int) -> None:
        again = period == self._judged
        if self._resumed or (self.judge.step is not None and sample.step < self.judge.step):
            self._judge_earlier(sample.step)
            again = False
        changed = self.judge.feed(as_kept(sample, self._kept.bits), again=again)  # what is read later rings alike
        self._judged = period
        self._tell(sample.step, changed)

    def _tell(self, step: int, changed: Iterable[Alarm]) -> None:
        """Tells of alarms that begin."""
        begun = [alarm for alarm in changed if alarm.ended is None]
        for line, heard in lines(begun, self._advised):
            logger.log(logging.WARNING if heard else logging.INFO, "attemper: step %s: %s", step, line)
        for alarm in begun:
            if is_heard(alarm) and self._on_alarm is not None:
                self._collector.guard("on_alarm", partial(self._on_alarm, alarm))

    # --- numbers of steps ---

    def note(self, step: int, given: Scalars) -> None:
        """Takes the numbers that the loop gave of a step. Nothing waits for a device."""
        begins = self.last_step is not None if self._noted is None else step <= self._noted
        if given or begins:  # a run that goes on or back without numbers has none from there on
            self.scalars.take(step, given)
        self._noted, self.judge.loss.expected = step, True
        self._settle_scalars()
        self._kept.hand_numbers(seconds=SCALARS_SECONDS)

    def latest_scalars(self) -> tuple[int | None, dict[str, float]]:
        """The last step with numbers, and these. Waits for the device."""
        self._settle_scalars(wait=True)
        return self._latest

    def _settle_scalars(self, *, wait: bool = False) -> None:
        for step, numbers in self.scalars.ready(wait=wait):
            self._latest = step, numbers
            self._kept.take_numbers(step, numbers)
            if LOSS in numbers:
                self._judge_loss(step, numbers[LOSS])

    def _judge_loss(self, step: int, loss: float) -> None:
        judge = self.judge.loss
        resumed = self.last_step is not None if judge.step is None else step <= judge.step
        if resumed:  # what the run has before is judged again, as those do who read it later
            judge = self.judge.loss = LossJudge(self.judge.limits)
            self._kept.open().flush()
            with self._kept.earlier() as ranks:
                if (earlier := ranks.scalars.get(LOSS)) is not None:
                    latest = earlier.between(None, step)
                    judge.feed(latest.steps[-MOST_LOSSES:], latest.values[-MOST_LOSSES:])
        if changed := judge.feed_one(step, as_float32(loss)):
            self._tell(step, changed)

    # --- the run ---

    def _resume(self) -> None:
        """Finds where the run that goes on began, and what it has as one site."""
        writer = self._kept.open()
        if writer.earlier is not None:
            joined = writer.earlier.joined
            self._collector.call_sites.joined |= joined.keys()
            self._collector.skipped |= {f"{name}{JOINED}": why for (name, _), why in joined.items()}
        with self._kept.earlier() as ranks:
            steps = ranks.steps().tolist()
            self._stored_first = steps[0] if steps else None
            self.first_step = next((step for step in steps if self._start is None or step < self._start), None)
            self._resumed = True
            if changes := ranks.about.get(SHADOWED):
                self._kept.about[SHADOWED], self._shadowed = changes, changes[-1]["shadow"]

    def _judge_earlier(self, step: int) -> None:
        """Judges what the run has below ``step`` from its beginning, as those do who read it later. The loop may have
        gone back, and then it replaces what came after.
        """
        from attemper.readings.run_judge import RunJudge
        from attemper.store.series import between
        from attemper.store.verdict import JUDGED

        self._resumed = False
        self._kept.open().flush()
        loss, self.judge = self.judge.loss, (judge := RunJudge(self.judge.limits, self.judge.fewest_keys))
        judge.loss = loss
        with self._kept.earlier() as ranks:
            moments = between(ranks.moments[0], None, step)
            if len(moments) > MOST_JUDGED:
                moments = np.concatenate([moments[:FIRST_JUDGED], moments[FIRST_JUDGED - MOST_JUDGED :]])
            judge.feed_all(ranks.blocks([moments], JUDGED))

    def _describe(self, sample: Sample, found: SampleSums) -> None:
        """Keeps what is known of the run, where that has changed."""
        self._compare_earlier(sample)
        self._kept.describe({"backend": ", ".join(found.backends)})
        known = all(self._kept.coverage.get(label.key, "") is None for label in sample.sites)
        if not known or self._collector.skipped != self._skipped:
            self._skipped = dict(self._collector.skipped)
            unread = self.unread({label.name for label in sample.sites})
            reasons = {(name, "self", sample.sites[0].mode): reason for name, reason in unread.items()}
            self._kept.cover(reasons | dict.fromkeys(label.key for label in sample.sites))

    def _compare_earlier(self, sample: Sample) -> None:
        """Says once that the folder held a run of another model, or one in which sites were of several calls."""
        writer = self._kept.writer
        if writer is None or writer.earlier is None:
            return
        earlier, writer.earlier = writer.earlier, None
        modules = self._collector.call_sites.names
        said = earlier.difference(str(self._kept.about["model"]), sample.sites, modules, sample.step)
        if said is not None:
            logger.warning("attemper: %s%s", self._kept.name, said)

    def unread(self, seen: set[str]) -> dict[str, str]:
        """Name -> why it is not read, of what was expected beside the sites of these names."""
        collector = self._collector
        reasons = {entry.name: entry.reason for entry in collector.skips(seen)}
        modules = {collector.module_of(name) for name in seen}
        modules |= {name for (name, _, _), reason in self._kept.coverage.items() if reason != UNSEEN}
        # A module whose forward is called without its hooks attends under the name of the one around it.
        around = tuple(f"{name}." for name in modules.difference(collector.expected))
        for name in collector.expected:
            if name not in modules and not name.startswith(around):
                reasons.setdefault(name, UNSEEN)
        return reasons

    def note_restart(self, schedule: Schedule) -> str | None:
        """What to say once where a stored run goes on: that the loop has given no number, which is kept in the run, or
        one that hides all of it.
        """
        last, step, name = schedule.last, self.first_put, self._kept.name
        if not self.is_stored or last is None or step is None:
            return None
        new = f"For a new training pass store=attemper.Store({name!r}, new=True), or another folder"
        if schedule.numbered:
            schedule.last = None  # it is said once
            if self._stored_first is None or step > self._stored_first:
                return None
            hidden = f"{name} holds steps {self._stored_first} to {last}, which are no longer shown"
            return f"{hidden}: this training starts again at step {step}. {new}."
        schedule.numbered = True
        with self._kept.earlier() as ranks:
            self._kept.describe({UNNUMBERED: [*ranks.about.get(UNNUMBERED, ()), step]})
        return (
            f"{name} holds a run up to step {last}, which goes on: this sample gets step {step}, since the loop gave "
            f"no number. {new}; from a checkpoint, call watch.step(n) once before the loop, with its last step."
        )

    def note_unmeasured(self, reason: str, mode: str) -> None:
        """Keeps why nothing was measured so far, for those who read the run and find no sample in it: the first line of
        ``reason``, and each part of the model that was skipped.
        """
        if (writer := self._kept.writer) is not None:
            writer.describe({UNMEASURED: cut(sentence(reason.partition("\n")[0]), MOST_LETTERS)})
            writer.cover({(one.name, "self", mode): one.reason for one in self._collector.skips(())})

    @property
    def run(self) -> Run:
        """Everything that was sampled, to be read."""
        self._settle_scalars(wait=True)
        self.settle(wait=True)
        return self._kept.read()

    @property
    def readings(self) -> SampleReadings:
        """The latest sample. Waits for the devices."""
        return self._collector.readings()

    @property
    def is_stored(self) -> bool:
        """Whether the run outlives this process."""
        return self._kept.store is not None

    @property
    def last_step(self) -> int | None:
        """Of the last sample in the store; None for a new one."""
        return self._kept.last_step

    @property
    def dropped(self) -> int:
        """Samples that are not in the store."""
        return 0 if self._kept.writer is None else self._kept.writer.dropped

    def summary(self, sampled: int) -> str:
        """What became of so many samples, for people."""
        where = f"in {self._kept.name}"
        if self.judge.step is None:
            alarms = "not judged yet" if self._underway else "nothing was measured so far"
        else:
            alarms = count(len(self.judge.standing), "alarm")
        dropped = f", {self.dropped} dropped" if self.is_stored else ""
        if self._kept.writer is not None and self._kept.writer.waiting:
            dropped += f", {self._kept.writer.waiting} waiting for the disk"
        return f"{count(sampled, 'sample')} {where}{dropped}, {alarms}"

    def close(self) -> None:
        """Writes what is left and ends the file. What is there can be read afterwards."""
        self._settle_scalars(wait=True)
        self._kept.hand_numbers()
        self.settle(wait=True)
        self._kept.close()


def about(model: nn.Module, options: WatchOptions) -> dict[str, Any]:
    """What the store of a watch says of its run."""
    known, scope = provenance(model, None), options.scope
    return {
        "model": class_name(unwrap(model)),
        "configuration": configuration(model),
        **{name: known[name] for name in ("dtype", "revision", "versions")},
        **{name: getattr(options, name) for name in ("every", "rows", "observe", "fewest_keys")},
        "stats": scope.stats,
        "sites": scope.sites,
        "limits": options.alarm_limits.to_dict(),
    }
