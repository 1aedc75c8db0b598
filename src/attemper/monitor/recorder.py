"""The memory of a watch: every sample is judged in the training thread and handed to the writer of the run."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attemper.monitor.collector import Collector
from attemper.monitor.model import configuration, provenance, versions
from attemper.monitor.options import WatchOptions
from attemper.monitor.sample import sample_of
from attemper.monitor.snapshot import SampleSums, Snapshot, Transfer
from attemper.readings.alarms import is_heard, lines
from attemper.readings.judge import Judge
from attemper.readings.sample import Sample, SiteKey
from attemper.sites.names import class_name, unwrap
from attemper.text import clean_name, count

if TYPE_CHECKING:
    from attemper.readings.history import History, Trend
    from attemper.store.ranks import Ranks
    from attemper.store.run import Run
    from attemper.store.writer import Writer

logger = logging.getLogger("attemper")

KEPT = 128
"""Without a store, so many samples stay as they are; more, or a question, make tables in memory of them."""
MOST_UNDERWAY = 64
"""Samples that may be on their way from a device before the oldest is waited for."""
ENDS = 64
"""How many of the first samples of a resumed run are judged again, and of the last: they hold what was normal."""
UNSEEN = "no attention of it was seen in a sampled step"


@dataclass
class _Underway:
    """A sample on its way from its devices."""

    step: int
    time: float
    transfer: Transfer


class Recorder:
    """Takes the samples of a watch as they end."""

    def __init__(
        self,
        collector: Collector,
        options: WatchOptions,
        about: Mapping[str, Any],
        start: int | None = None,
    ) -> None:
        """
        Args:
            about: what the store says of the run.
            start: the number of the step that begins, where the loop knows it: a run that goes on is judged up to it.
        """
        self._start = start
        self._collector, self._on_alarm = collector, options.on_alarm
        self.judge = Judge(options.alarm_limits, options.fewest_keys)
        assert not isinstance(options.store, str | os.PathLike)  # a path has become a store
        self._store = options.store
        self._about = dict(about)
        self._coverage: dict[SiteKey, str | None] = {}
        self._skipped: dict[str, str] = {}
        self._underway: deque[_Underway] = deque()
        self._waiting: list[Sample] = []
        self._writer: Writer | None = None
        self._run: Run | None = None
        self._closed = False
        self._judged = self._ended = -1
        """Which of the watch's samples was judged last, and which had ended then."""
        self.first_step: int | None = None
        """Of the run that is resumed; None for a new one."""
        if self._store is not None:
            self._open_writer()

    # --- samples ---

    def record(self, step: int) -> None:
        """Takes the sample that has ended, at this step. Nothing waits for a device."""
        found = self._collector.snapshot()
        if found.on_host and not self._underway:
            self._take(step, time.time(), found)
        else:
            self._underway.append(_Underway(step, time.time(), found.to_host()))
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Takes what has arrived from the devices, in its order; with ``wait`` all of it."""
        while self._underway:
            first = self._underway[0]
            if not (wait or first.transfer.done or len(self._underway) > MOST_UNDERWAY):
                return
            self._underway.popleft()
            self._take(first.step, first.time, first.transfer.wait())

    def judge_now(self, step: int) -> None:
        """Judges the sample that is there, though more may be added to it. Waits for the devices."""
        self.settle(wait=True)
        found = self._collector.join(self._collector.snapshot())
        if found.sites and found.period != self._ended:
            self._judge(self._sample(step, time.time(), found), found.period)

    def _take(self, step: int, when: float, snapshot: Snapshot) -> None:
        found = self._collector.join(snapshot)
        self._collector.skipped |= found.reasons
        if not found.sites:
            return
        sample = self._sample(step, when, found)
        self._keep(sample)
        self._describe(sample, found)
        self._judge(sample, found.period)
        self._ended = found.period

    def _sample(self, step: int, when: float, found: SampleSums) -> Sample:
        return sample_of(step, when, found.sites, self._collector.stats, found.tokens)

    def _judge(self, sample: Sample, period: int) -> None:
        changed = self.judge.feed(sample, again=period == self._judged)
        self._judged = period
        begun = [alarm for alarm in changed if alarm.ended is None]
        for line, heard in lines(begun):
            logger.log(logging.WARNING if heard else logging.INFO, "attemper: step %s: %s", sample.step, line)
        for alarm in begun:
            if is_heard(alarm) and self._on_alarm is not None:
                self._collector.guard("on_alarm", partial(self._on_alarm, alarm))

    # --- the run ---

    def _keep(self, sample: Sample) -> None:
        if self._writer is not None:
            self._writer.take(sample)
            return
        self._waiting.append(sample)
        if len(self._waiting) > KEPT:
            self._open_writer()

    def _open_writer(self) -> Writer:
        """The writer, which has all samples so far.

        Raises:
            InputError: the store's path is a file, or no path.
        """
        from attemper.store.writer import open_writer

        if self._writer is None:
            self._writer = open_writer(self._store, rank=_rank(), about=self._about, versions=versions())
            # A watch that is garbage-collected without ``close()`` ends its file. At the end of the process the writer
            # sees to that itself.
            self._forgotten = weakref.finalize(self, self._writer.close)
            self._forgotten.atexit = False
            if self._coverage:
                self._writer.cover(self._coverage)
            if self._writer.last_step is not None:
                self._resume(self._writer)
        while self._waiting:
            self._writer.take(self._waiting.pop(0))
        if self._closed:
            self._writer.close()
        return self._writer

    def _resume(self, writer: Writer) -> None:
        """Judges the first and the last samples of the run that goes on, so that what was normal stays so."""
        ranks = _ranks(writer)
        try:
            steps = ranks.steps(stop=self._start).tolist()
            self.first_step = steps[0] if steps else None
            for step in steps if len(steps) <= 2 * ENDS else (*steps[:ENDS], *steps[-ENDS:]):
                self.judge.feed(ranks.sample(step))
        finally:
            ranks.close()

    def _describe(self, sample: Sample, found: SampleSums) -> None:
        """Keeps what is known of the run, where that has changed."""
        about = {"backend": ", ".join(found.backends)}
        if not about.items() <= self._about.items():
            self._about |= about
            if self._writer is not None:
                self._writer.describe(about)
        known = all(self._coverage.get(label.key, "") is None for label in sample.sites)
        if not known or self._collector.skipped != self._skipped:
            self._skipped = dict(self._collector.skipped)
            self._coverage |= dict(self._covered(sample))
            if self._writer is not None:
                self._writer.cover(self._coverage)

    def _covered(self, sample: Sample) -> Iterator[tuple[SiteKey, str | None]]:
        """Every site that was expected, and why it is not in the sample."""
        collector, mode = self._collector, sample.sites[0].mode
        reasons = {entry.name: entry.reason for entry in collector.skips(sample.sites)}
        seen = {collector.module_of(label.name).partition("#")[0] for label in sample.sites}
        seen |= {name for name, _, _ in self._coverage}
        for name in collector.expected:
            if name not in seen:
                reasons.setdefault(name, UNSEEN)
        yield from (((name, "self", mode), reason) for name, reason in reasons.items())
        yield from ((label.key, None) for label in sample.sites)

    @property
    def run(self) -> Run:
        """Everything that was sampled, to be read."""
        from attemper.store.run import Run

        self.settle(wait=True)
        writer = self._open_writer()
        writer.flush()
        if self._run is None:
            self._run = Run(_ranks(writer))
        return self._run

    @property
    def last_step(self) -> int | None:
        """Of the last sample in the store; None for a new one."""
        return None if self._writer is None else self._writer.last_step

    @property
    def dropped(self) -> int:
        """Samples that are not in the store."""
        return 0 if self._writer is None else self._writer.dropped

    def summary(self, sampled: int) -> str:
        """What became of so many samples, for people."""
        where = "in memory" if self._store is None else f"in {clean_name(self._store.last_name)}"
        dropped = f", {self.dropped} dropped" if self._store is not None else ""
        return f"{count(sampled, 'sample')} {where}{dropped}, {count(len(self.judge.standing), 'alarm')}"

    def close(self) -> None:
        """Writes what is left and ends the file. What is there can be read afterwards."""
        self.settle(wait=True)
        self._closed = True
        if self._writer is not None and self._forgotten.detach() is not None:
            self._writer.close()
            if self._store is not None and self._writer.dropped:
                lost, reason = count(self._writer.dropped, "sample is", "samples are"), self._writer.trouble
                logger.warning("attemper: %s not in the store%s.", lost, f": {reason}" if reason else "")


class RunView:
    """What a watch says of its run, while it goes on and after: the methods of :class:`attemper.store.run.Run`."""

    @property
    def run(self) -> Run:
        """Every sample so far, as ``attemper.open_run`` gives them."""
        raise NotImplementedError

    def history(self, statistic: str, site: Any = None, head: int | None = None, **options: Any) -> History:
        """A statistic at every sampled step; see ``Run.history``."""
        return self.run.history(statistic, site, head, **options)

    def mean(self, statistic: str, site: Any = None, head: int | None = None, **options: Any) -> Any:
        """The mean of a statistic over the sampled steps; see ``Run.mean``."""
        return self.run.mean(statistic, site, head, **options)

    def std(self, statistic: str, site: Any = None, head: int | None = None, **options: Any) -> Any:
        """Its standard deviation over the sampled steps; see ``Run.std``."""
        return self.run.std(statistic, site, head, **options)

    def trend(self, statistic: str, site: Any = None, head: int | None = None, **options: Any) -> Trend:
        """Its slope per 1,000 steps with a 95% interval; see ``Run.trend``."""
        return self.run.trend(statistic, site, head, **options)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Writes the page of the run; see ``Run.to_html``."""
        return self.run.to_html(path)


def _ranks(writer: Writer) -> Ranks:
    """What this process has written, to be read."""
    from attemper.store.ranks import Ranks
    from attemper.store.series import FragmentReader

    return Ranks([FragmentReader(writer.open_reader(), _rank())])


def _rank() -> int:
    """Of this process among those that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "")  # torchrun's, before the processes have found each other
    return int(rank) if rank.isdecimal() else 0


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
