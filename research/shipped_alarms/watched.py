"""Runs of the benchmark trained again, as a user would watch them: ``attemper.watch`` at every step, with the loss.

Attention is torch's own, so that the watch sees it; a fault's arithmetic is a scale or a mask given to it.
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attemper import open as open_run
from attemper import watch
from attemper.lab.corpus import Corpus
from attemper.lab.experiment import one_thread
from attemper.lab.model import ByteModel
from attemper.readings.reading import Alarm
from research.early_warning.attention import Arithmetic, WrittenOutAttention
from research.early_warning.grid import LARGER, Trial
from research.early_warning.grid import plan as grid
from research.early_warning.trial import Array, Training
from research.shipped_alarms.verdicts import KEPT

EACH = 20
"""Healthy runs, and as many with a fault."""
LEFT_OUT = ("precision",)
"""Kinds of fault: scores that are rounded cannot be given to torch's attention."""
MOST_LAYERS, MOST_TOKENS = 3, 64
"""Of the configurations that the sample is drawn from: those that train fastest."""


def plan_watched(steps: int = 600) -> list[Trial]:
    """20 healthy runs and 20 with a fault in turn, drawn with a fixed seed among the runs of the grid."""
    asked = [trial for trial in grid(steps) if _is_asked(trial)]
    drawn = Random(0)
    groups = ([one for one in asked if (one.fault is None) == healthy] for healthy in (True, False))
    pairs = zip(*(drawn.sample(group, EACH) for group in groups), strict=True)
    return [Trial(one.run.change(every=1), one.fault) for pair in pairs for one in pair]


def _is_asked(trial: Trial) -> bool:
    config = trial.run.config
    if trial.of_encoder or config in {run.config for run in LARGER} or (trial.fault and trial.fault.kind in LEFT_OUT):
        return False
    return config.layers <= MOST_LAYERS and config.context <= MOST_TOKENS


class GivenAttention(WrittenOutAttention):
    """The same, computed by torch."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scale = self.arithmetic.factor / math.sqrt(query.shape[-1])
        if not self.arithmetic.leaks:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        hidden = self.mask(torch.empty(query.shape[2], query.shape[2]))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=scale)


class WatchedTraining(Training):
    """A training whose attention a watch sees."""

    def _start(self) -> tuple[ByteModel, list[WrittenOutAttention]]:
        model, layers = ByteModel(self.run.config), list[WrittenOutAttention]()
        for layer, block in enumerate(model.blocks):
            attention = GivenAttention(model.config, layer)
            attention.load_state_dict(block.get_submodule("attention").state_dict())
            block.add_module("attention", attention)
            layers.append(attention)
        return model, layers

    def watch(self, folder: Path) -> tuple[int | None, list[Alarm]]:
        """Trains to the end, into a store: the step whose loss was no number, and the warnings as they came."""
        warned: list[Alarm] = []
        with watch(self.model, every=1, store=folder, on_alarm=warned.append) as watching:
            for step in range(self.run.steps):
                self.effect.act(self.model, self.optimizer, step)
                for layer in self.layers:
                    layer.arithmetic = self.effect.arithmetic(step)
                loss = self.model.loss(self.batch(step))
                finite = math.isfinite(loss.item())
                if finite:
                    self._update(loss, step)
                watching.step(loss=loss)
                if not finite:
                    return step, warned
        return None, warned


@one_thread()
def measure_watched(trial: Trial, corpus: Corpus) -> tuple[dict[str, Any], dict[str, Array]]:
    """Values: as ``measure_run``, and ``live``: warnings as they came, and ``stored``: those of the run that was opened
    again, [kind, site, head, step] each. Signals: losses and what alarms look at, as the store has them.
    """
    training = WatchedTraining(trial, corpus)
    with TemporaryDirectory() as folder:
        diverged, warned = training.watch(Path(folder) / "run")
        with open_run(Path(folder) / "run") as run:
            stored = [alarm for alarm in run.alarms() if alarm.severity != "notice"]
            signals = _signals(run, trial)
    return {
        "held_out": None if diverged is not None else training.held_out(Arithmetic()),
        "diverged_at": diverged,
        "seconds": {},
        "live": sorted(map(_told, warned), key=str),
        "stored": sorted(map(_told, stored), key=str),
    }, signals


def _told(alarm: Alarm) -> list[Any]:
    return [alarm.kind, alarm.site, alarm.head, alarm.since]


def _signals(run: Any, trial: Trial) -> dict[str, Array]:
    config = trial.run.config
    found = {"loss": np.asarray(run.history("loss").values, np.float32)}
    for quantity, signal in KEPT.items():
        values = [
            [run.history(quantity, site=f"blocks.{layer}.attention", head=head).values for head in range(config.heads)]
            for layer in range(config.layers)
        ]
        found[signal] = np.moveaxis(np.asarray(values, np.float32), -1, 0)
    return found
