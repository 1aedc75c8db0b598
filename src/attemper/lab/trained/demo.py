"""A training of about a minute to look at: healthy, or with a learning rate that goes wrong in the middle.

The learning rate of a healthy run falls along half a cosine. With ``inject="collapse"`` it rises instead from the
middle on, in a straight line to 30 times its peak. Attention goes first: within some tens of steps entropy falls and
logits grow in every layer, while the loss rises slowly. The alarm of the loss rings later, or never.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from attemper.lab.corpus import Corpus, standard_library
from attemper.lab.experiment import one_thread
from attemper.lab.model import ByteConfig
from attemper.lab.trained.training import Run, one_step, start
from attemper.monitor.watch import watch
from attemper.readings.alarms import KINDS, is_heard
from attemper.readings.reading import Alarm
from attemper.results.scan import Scan

RAISED = 30.0
"""The last learning rate of an injected collapse, as a multiple of the peak of the healthy run."""
RECENT = 20
"""Losses whose mean is the last loss."""


@dataclass(frozen=True)
class DemoRun(Run):
    """What one run of the demo follows from."""

    steps: int = 800
    every: int = 5
    config: ByteConfig = field(default_factory=lambda: ByteConfig(width=64, context=128))
    inject: str | None = None

    def learning_rate(self, step: int) -> float:
        """At ``step``, from 0: of a healthy run up to the middle, then what is injected."""
        healthy, middle = super().learning_rate(step), self.steps // 2
        if self.inject is None or step < middle:
            return healthy
        done = (step - middle + 1) / (self.steps - middle)
        return healthy + (RAISED * self.rate - healthy) * done


@dataclass(frozen=True)
class Progress:
    """What is known after a step."""

    step: int
    loss: float
    """Of the batch, in nats a byte; NaN or infinite at the last step of a training that diverged."""
    rate: float
    scan: Scan | None
    """What attention looked like; None where the step was not sampled."""


@dataclass(frozen=True)
class Outcome:
    """What a demo came to."""

    steps: int
    """Steps that were trained: all, or those up to a loss that is no number."""
    loss: float
    """Mean of the last 20 losses, in nats a byte."""
    alarms: tuple[Alarm, ...]
    """Every alarm of attention and of the loss, in the order in which they began."""
    scan: Scan
    """The last sample."""
    seconds: float

    @property
    def attention_alarm(self) -> Alarm | None:
        return self._first(of_loss=False)

    @property
    def loss_alarm(self) -> Alarm | None:
        return self._first(of_loss=True)

    def _first(self, of_loss: bool) -> Alarm | None:
        heard = (alarm for alarm in self.alarms if is_heard(alarm))
        return next((alarm for alarm in heard if KINDS[alarm.kind].of_loss == of_loss), None)


@one_thread()
def run_demo(
    run: DemoRun,
    on_step: Callable[[Progress], object],
    *,
    store: str | os.PathLike[str] | None = None,
    corpus: Corpus | None = None,
) -> Outcome:
    """Trains to the end of ``run``, or until the loss is no number.

    With one thread of torch: the same run gives the same numbers on any number of cores.

    Args:
        store: folder of the history; None keeps it in memory. What was seen is there, too, if training is interrupted.
        corpus: what is learned; None for the sources of Python's standard library.
    """
    corpus, (state, control) = corpus or standard_library(), start(run)
    before, losses = time.monotonic(), state.curve.losses
    with watch(state.model, every=run.every, store=store) as watching:
        while state.step < run.steps:
            step, trained = state.step, one_step(run, corpus, state, control)
            scan = watching.table() if step % run.every == 0 else None
            watching.step(step, loss=losses[-1])
            on_step(Progress(step, losses[-1], run.learning_rate(step), scan))
            if not trained:
                break
            state.step += 1
        last = watching.table()
    with watching.run as stored:
        alarms = tuple(stored.alarms())
    return Outcome(len(losses), fmean(losses[-RECENT:]), alarms, last, time.monotonic() - before)
