"""From the first alarm on in another way: the same run again, with a remedy that begins at the step after the alarm.

The alarm is the first of ``FIRST_OF``, by their defaults. A fault that stays goes on under the remedy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from attemper.lab.corpus import Corpus
from attemper.lab.experiment import one_thread
from attemper.lab.trained.interventions import THRESHOLD
from research.early_warning.default_alarms import first_alarms
from research.early_warning.grid import LARGER, Trial
from research.early_warning.run_file import RunFile
from research.early_warning.trial import Array, Training

BACK = 50
"""Steps from the last good checkpoint to the alarm."""
FIRST_OF = frozenset(("nonfinite", "logits", "layer_fallen", "fallen", "falling", "logit_growth"))
"""The alarms of heads above notice when these runs were drawn: others would mean to train the remedies anew."""
RUNS = 30
"""Faulty runs that are branched, drawn among those with an alarm."""


@dataclass(frozen=True)
class Branch:
    """What is done from an alarm on."""

    remedy: str
    """A name of ``REMEDIES``."""
    step: int
    """Of the alarm."""


class BranchedTraining(Training):
    """A training that takes a remedy at an alarm."""

    def __init__(self, trial: Trial, branch: Branch, corpus: Corpus) -> None:
        super().__init__(trial, corpus)
        self.branch = branch
        self.checkpoint: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.after_step: Callable[[], object] = lambda: None

    def _step(self, step: int) -> bool:
        if step == max(0, self.branch.step - BACK):
            self.checkpoint = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        if step == self.branch.step + 1:
            REMEDIES[self.branch.remedy](self)
        finite = super()._step(step)
        self.after_step()
        return finite


def _clip(training: BranchedTraining) -> None:
    from attemper import QKClip

    training.after_step = QKClip(training.model, threshold=THRESHOLD).step


def _slow_down(training: BranchedTraining) -> None:
    before = training.effect.rate
    training.effect = replace(training.effect, rate=lambda step: before(step) / 3)


def _roll_back(training: BranchedTraining) -> None:
    """Weights and moments of the checkpoint; bytes and schedule go on from where the run is."""
    assert training.checkpoint is not None, "a checkpoint is kept before each alarm"
    weights, moments = training.checkpoint
    training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(moments)


REMEDIES: dict[str, Callable[[BranchedTraining], None]] = {
    "QKClip": _clip,
    "learning rate / 3": _slow_down,
    "roll-back": _roll_back,
}


def plan_branches(files: Sequence[tuple[Trial, RunFile]]) -> list[tuple[Trial, Branch]]:
    """The remedies of 30 faulty runs with an alarm, drawn by a fixed seed. With QK-norm there is no QKClip.

    Not of the larger models, of which each remedy takes minutes.
    """
    small = [(trial, file) for trial, file in files if trial.run.config not in {run.config for run in LARGER}]
    alarmed = [(trial, step) for trial, file in small if (step := alarm_step(trial, file)) is not None]
    chosen = random.Random(0).sample(alarmed, min(RUNS, len(alarmed)))
    return [
        (trial, Branch(remedy, step))
        for trial, step in chosen
        for remedy in REMEDIES
        if remedy != "QKClip" or not trial.run.config.qk_norm
    ]


def alarm_step(trial: Trial, file: RunFile) -> int | None:
    """The first of these alarms from the fault on; None without one, or in a healthy run."""
    if trial.fault is None:
        return None
    steps = [step for kind, step in first_alarms(file, trial.fault.step).items() if kind in FIRST_OF]
    return min(steps, default=None)


@one_thread()
def measure_branch(trial: Trial, branch: Branch, corpus: Corpus) -> tuple[dict[str, Any], dict[str, Array]]:
    """As ``measure_run``, of the run with its remedy; of the signals, the loss."""
    training = BranchedTraining(trial, branch, corpus)
    values = training.finish(trial)
    return values, {"loss": training.signals.arrays()["loss"]}
