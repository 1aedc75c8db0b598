"""How often alarms ring in long healthy trainings that were never run: blocks of a run's own noise, one after another.

Of the second half of a long run: each quantity, and the loss, is its mean plus what it is away from its running mean.
Blocks of that noise are drawn with replacement, all quantities of a step together, so that increments inside a block
are those of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from research.early_warning.run_file import RunFile
from research.early_warning.trial import Array
from research.shipped_alarms.unseen import ALARMED
from research.shipped_alarms.verdicts import begun, judge_signals, quantities

STEPS = 100_000
BLOCK = 500
"""Steps of a block, and of the running mean."""
BOUNDED = ("normalized_entropy", "first_token_mass")


def false_alarms(files: Sequence[RunFile]) -> list[dict[str, Any]]:
    """For each long run: steps at which alarms begin in a resampled training of 100,000 steps, at every step."""
    found = []
    for number, file in enumerate(files):
        drawn = resampled(file.signals, STEPS, np.random.default_rng(number))
        run = file.about["trial"]["run"]
        alarms = judge_signals(run, quantities(drawn, file), drawn["loss"], run["every"])
        found.append({"seed": run["seed"], "steps": STEPS, "begun": begun(alarms)})
    return found


def resampled(signals: dict[str, Array], steps: int, generator: np.random.Generator) -> dict[str, Array]:
    """Name -> [steps, ...] of the loss and of what alarms look at."""
    names = ("loss", *ALARMED)
    halves = {name: signals[name][len(signals[name]) // 2 :].astype(np.float64) for name in names}
    many = len(halves["loss"])
    length = min(BLOCK, many // 4)
    starts = generator.integers(0, many - length + 1, -(-steps // length))
    places = (starts[:, None] + np.arange(length)).ravel()[:steps]
    drawn = {}
    for name, values in halves.items():
        noise = values - _running_mean(values, length)
        drawn[name] = (values.mean(0) + noise[places]).astype(np.float32)
        if name in BOUNDED:
            drawn[name] = drawn[name].clip(0, 1)
    return drawn


def _running_mean(values: npt.NDArray[np.float64], length: int) -> npt.NDArray[np.float64]:
    """[T, ...]: of the ``length`` values around each, fewer at the ends."""
    sums = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, 0)])
    low = np.maximum(np.arange(len(values)) - length // 2, 0)
    high = np.minimum(low + length, len(values))
    return (sums[high] - sums[low]) / (high - low).reshape(-1, *[1] * (values.ndim - 1))
