"""The memory of a watch on many ranks: their samples are made one. The first rank of a group keeps and judges it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attemper import __version__
from attemper.distributed.reduction import Fail, Reduction
from attemper.errors import InputError
from attemper.monitor.collector import Collector
from attemper.monitor.options import WatchOptions
from attemper.monitor.recorder import Recorder
from attemper.monitor.scalars import Scalars
from attemper.monitor.snapshot import SampleReadings, SampleSums, with_differences
from attemper.readings.alarms import LOSS
from attemper.readings.judge import Judge
from attemper.readings.sample import Sample
from attemper.text import count

if TYPE_CHECKING:
    from attemper.results.run import Run


class MergedRecorder(Recorder):
    """Takes the samples of a watch, each merged with those of the other ranks of ``reduction``."""

    merges = True

    def __init__(
        self,
        collector: Collector,
        options: WatchOptions,
        about: Mapping[str, Any],
        start: int | None,
        reduction: Reduction,
    ) -> None:
        self._reduction = reduction
        self.merged: SampleSums | None = None
        """The latest sample of all ranks."""
        own = options if reduction.is_first else replace(options, store=None)
        self.first_step = self._last_step = None
        try:
            super().__init__(collector, own, {**about, **reduction.about}, start, reduction.coordinate.number)
        finally:  # the others wait for this rank, also where its store cannot be opened
            steps = reduction.begin(_options_of_ranks(about), self.first_step, super().last_step)
        self.first_step, self._last_step = steps

    @property
    def last_step(self) -> int | None:
        return self._last_step

    def add_merged(self, step: int, period: int, failures: int, fail: Fail, given: Scalars) -> Scalars:
        """Merges the sample that has ended with those of the other ranks, and adds it. See ``Reduction.merge``.

        Args:
            given: numbers of the step on this rank.

        Returns:
            The same, with the mean loss of the ranks that have one.
        """
        try:
            found = self._reduction.merge(self._collector, period, failures, fail, given.get(LOSS))
            if found is not None:
                self.put(step, found, time.time())
                return {**given, LOSS: found.loss} if LOSS in given else given
        except InputError:
            raise
        except Exception as error:  # a rank is gone, say: what training makes of that is its own affair
            fail("ranks", error)
        return given

    def add(self, step: int) -> None:
        """Adds a sample of this rank alone, of an evaluation: the ranks may have different parts of it, or none."""
        if self._reduction.is_first:
            super().add(step)

    def note(self, step: int, given: Scalars) -> None:
        if self._reduction.is_first:
            super().note(step, given)

    def judge_now(self, step: int, *, apart: bool) -> Judge:
        """Takes what is on its way. A sample is judged when its step ends, and has all its rows then."""
        self.settle(wait=True)
        return self.judge

    @property
    def readings(self) -> SampleReadings:
        self.settle(wait=True)
        return super().readings if self.merged is None else self._collector.as_readings(self.merged, {})

    @property
    def run(self) -> Run:
        if not self._reduction.is_first:
            raise InputError(
                f"This is rank {self._reduction.rank}: rank {self._reduction.ranks[0]} has the history of its group. "
                "watch.table() is the latest sample on every rank."
            )
        return super().run

    def summary(self, sampled: int) -> str:
        if self._reduction.is_first:
            return f"{super().summary(sampled)}, {self._reduction}"
        return f"{count(sampled, 'sample')}, {self._reduction}, kept by rank {self._reduction.ranks[0]}"

    def _keep_first(self) -> Iterator[tuple[Sample, SampleSums]]:
        if self._reduction.is_first:
            yield from super()._keep_first()
            return
        self.merged = self._collector.join(self._underway.popleft().snapshot.wait())

    def _sample(self, step: int, when: float, found: SampleSums) -> Sample:
        sample = super()._sample(step, when, found)
        if found.differences is None:
            return sample
        self.merged = found
        return with_differences(sample, found.differences) if len(self._reduction.ranks) > 1 else sample

    def _describe(self, sample: Sample, found: SampleSums) -> None:
        self._kept.describe(self._reduction.about)
        super()._describe(sample, found)


def _options_of_ranks(about: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same on all ranks, so that they join on the same steps with tensors of the same size."""
    names = ("every", "rows", "stats", "sites", "fewest_keys")
    return {"attemper": __version__} | {name: about[name] for name in names}
