"""Runs that no limit was set on: other sizes, optimizers, schedules and batches, healthy ones and faults."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from attemper.lab.corpus import Corpus
from attemper.lab.experiment import one_thread
from attemper.lab.model import ByteConfig
from research.early_warning.faults import EVERY_KIND, Fault
from research.early_warning.grid import Trial
from research.early_warning.optimizers import OPTIMIZERS, OtherRun
from research.early_warning.spacing import ATTENTION
from research.early_warning.trial import Array, Training

SEEDS = 5
LONG = 20_000
"""Steps of a long run, in which every step is measured."""
ALARMED = ("max_logit", "logit_std", "normalized_entropy", "first_token_mass")
"""Signals that alarms look at: the others are left out of long runs."""


def _run(layers: int, heads: int, width: int, context: int, qk_norm: bool = False, **other: Any) -> OtherRun:
    return OtherRun(config=ByteConfig(layers, heads, width, context, qk_norm=qk_norm), every=ATTENTION, **other)


CONFIGURATIONS = (
    (_run(2, 3, 48, 64, rate=2e-2, optimizer="Muon"), ("jump", "scale", "leak")),
    (_run(1, 4, 64, 64, rate=0.3, optimizer="SGD", schedule="linear"), ("ramp", "shuffled", "jump")),
    (_run(2, 4, 32, 64, rate=5e-4, optimizer="Lion", warmup=0.1), ("rate", "jump", "padding")),
    (
        _run(3, 6, 48, 48, rate=2e-3, optimizer="AdamW, long memory", schedule="constant, then down", batch=4),
        ("ramp", "one token", "jump"),
    ),
    (_run(4, 2, 32, 48, True, rate=1e-2, optimizer="Muon", schedule="constant", batch=4), ("jump", "leak")),
    (_run(2, 4, 128, 48, rate=2e-3, schedule="inverse root", batch=3), ("ramp", "shuffled")),
    (_run(1, 3, 96, 96, rate=2e-3, optimizer="NAdam", schedule="linear", batch=6), ("jump", "scale")),
    (_run(2, 5, 80, 56, rate=1e-3, optimizer="AMSGrad", warmup=0.0, batch=6), ("ramp", "repeated")),
)
"""Run -> kinds of the faults that it has: 20 in all, of which ten are rises of the rate."""

RATES = (1e-3, 3e-3, 5e-3)
LONG_RUNS = (
    *(_run(2, 2, 32, 40, rate=rate, batch=3, steps=LONG, warmup=0.01) for rate in RATES),
    *(
        _run(2, 2, 32, 40, rate=4 * rate, batch=3, steps=LONG, warmup=0.01, optimizer="Muon", schedule="linear")
        for rate in RATES
    ),
)


class UpperHalf(Random):
    """Draws from the upper half: sizes of faults, of which the lower half seldom hurts."""

    def random(self) -> float:
        return 0.5 + super().random() / 2


def plan_unseen(steps: int = 600, seeds: int = SEEDS) -> list[Trial]:
    """Of each configuration five healthy runs and two or three faults: the healthy ones of all first."""
    runs = [(run.change(steps=steps), kinds) for run, kinds in CONFIGURATIONS]
    healthy = [Trial(run.change(seed=seed)) for run, _ in runs for seed in range(seeds)]
    return [*healthy, *(trial for run, kinds in runs for trial in _faulty(run, kinds, seeds))]


def plan_long(steps: int = LONG) -> list[Trial]:
    """Healthy runs of two optimizers at three rates."""
    return [Trial(run.change(steps=steps, every=1, seed=seed)) for seed, run in enumerate(LONG_RUNS)]


def _faulty(run: OtherRun, kinds: tuple[str, ...], seeds: int) -> Iterator[Trial]:
    for number, kind in enumerate(kinds):
        seeded = run.change(seed=number % seeds)
        name = f"unseen/{kind}/{number}/{seeded}"
        places, told = Random(name), EVERY_KIND[kind]
        step = 0 if told.at_start else places.randrange(round(0.2 * run.steps), round(0.6 * run.steps))
        head = places.randrange(run.config.layers * run.config.heads)
        yield Trial(seeded, Fault(kind, told.size(UpperHalf(name), seeded), step, head))


class OtherTraining(Training):
    """A training by another optimizer."""

    def __init__(self, trial: Trial, corpus: Corpus) -> None:
        super().__init__(trial, corpus)
        assert isinstance(self.run, OtherRun)
        self.optimizer = OPTIMIZERS[self.run.optimizer](self.model, self.run)


@one_thread()
def measure_unseen(trial: Trial, corpus: Corpus) -> tuple[dict[str, Any], dict[str, Array]]:
    """As ``measure_run``."""
    training = OtherTraining(trial, corpus)
    values = training.finish(trial)
    return values, training.signals.arrays()
