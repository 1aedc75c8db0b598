"""One run of the benchmark: trains a model, with a fault or without, and writes down signals and nothing that judges.

Each step: training loss, norm of the whole gradient before clipping, norm of the change of all weights. Each
``run.every`` steps: attention per head. Each ``COSTLY`` steps: ranks and spectra. Each ``HELD_OUT`` steps: the
held-out loss.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attemper.lab.corpus import Corpus, drawn_windows
from attemper.lab.experiment import one_thread
from attemper.lab.model import ByteModel
from attemper.lab.trained.training import Run, adamw, held_out_loss, held_out_windows
from research.early_warning.attention import Arithmetic, Moment, WrittenOutAttention, write_out
from research.early_warning.encoder import Encoder, EncoderConfig
from research.early_warning.faults import EVERY_KIND, Effect
from research.early_warning.grid import Trial
from research.early_warning.measures import (
    Increments,
    attention_output,
    change_norm,
    effective_rank,
    of_moment,
)
from research.early_warning.pieces import drawn_pieces, pieces
from research.early_warning.spacing import COSTLY, HELD_OUT

HELD_OUT_WINDOWS = 32
"""Of those of the end, so many on the way."""

Array = npt.NDArray[np.float32]


class Signals:
    """What a run has written down so far."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = defaultdict(list)
        """Name -> a number or an array for each time it was measured."""
        self.seconds: dict[str, float] = defaultdict(float)
        """What each group of signals took, and the training itself."""

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self.values[name].append(value)

    def arrays(self) -> dict[str, Array]:
        """Name -> [T, ...]."""
        return {name: np.asarray(values, np.float32) for name, values in self.values.items()}


class Training:
    """A model in training, with what it measures."""

    def __init__(self, trial: Trial, corpus: Corpus) -> None:
        self.effect = EVERY_KIND[trial.fault.kind].effect(trial.fault, trial.run) if trial.fault else Effect()
        self.run: Run = self.effect.run(trial.run)
        self.corpus = corpus
        torch.manual_seed(self.run.seed)
        self.model, self.layers = self._start()
        self.optimizer = adamw(self.model, self.run)
        self.signals = Signals()
        self.increments = Increments(self.layers)
        self._moments: list[Moment] = []

    def _start(self) -> tuple[ByteModel | Encoder, list[WrittenOutAttention]]:
        """The model before its first step, and its attention layers."""
        model = ByteModel(self.run.config)
        return model, write_out(model)

    def _held_out(self) -> Tensor:
        """What held-out loss is measured on at the end; its first rows on the way."""
        return held_out_windows(self.run, self.corpus)

    def advance(self) -> int | None:
        """Trains to the last step; the step whose loss was no number, where one was."""
        held_out = self._held_out()[:HELD_OUT_WINDOWS]
        for step in range(self.run.steps):
            if step % HELD_OUT == 0:
                with self.signals.clock("held_out"):
                    self.signals.add(held_out=_number(held_out_loss(self.model, held_out)))
            if not self._step(step):
                return step
        return None

    def _step(self, step: int) -> bool:
        self.effect.act(self.model, self.optimizer, step)
        for layer in self.layers:
            layer.arithmetic = self.effect.arithmetic(step)
        measured = step % self.run.every == 0
        with self.signals.clock("training"), self._reading(measured):
            loss = self.model.loss(self.batch(step))
        self.signals.add(loss=loss.item())
        if measured:
            self._measure(step)
        if not math.isfinite(loss.item()):
            return False
        self._update(loss, step)
        return True

    def _seed(self, step: int) -> int:
        """Of what is drawn at a step."""
        return self.run.seed * 2**32 + self.effect.source(step) + 1

    def batch(self, step: int) -> Tensor:
        """What is trained on at a step."""
        ids = drawn_windows(self.corpus.training, self.run.batch, self.run.config.context + 1, self._seed(step))
        return self.effect.batch(ids, step)

    def _update(self, loss: Tensor, step: int) -> None:
        weights = list(self.model.parameters())
        with self.signals.clock("training"):
            self.optimizer.zero_grad()
            loss.backward()
        with self.signals.clock("gradient_norm"):
            norm = torch.nn.utils.clip_grad_norm_(weights, self.run.clip)
        with self.signals.clock("update_norm"):
            before = [weight.detach().clone() for weight in weights]
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.learning_rate(step) * self.effect.rate(step)
        with self.signals.clock("training"):
            self.optimizer.step()
        with self.signals.clock("update_norm"):
            change = change_norm(weights, before)
        self.signals.add(gradient_norm=norm.item(), update_norm=change.item())

    def read_attention(self, step: int) -> list[Moment]:
        """What each layer computes from the batch of a step."""
        with self._reading(True):
            self.model.loss(self.batch(step))
        return list(self._moments)

    @contextmanager
    def _reading(self, wanted: bool) -> Iterator[None]:
        self._moments.clear()
        for layer in self.layers:
            layer.reader = self._moments.append if wanted else None
        yield
        for layer in self.layers:
            layer.reader = None

    def _measure(self, step: int) -> None:
        with self.signals.clock("attention"):
            found = [of_moment(moment) for moment in self._moments]
            self.signals.add(**{name: np.stack([one[name].numpy() for one in found]) for name in found[0]})
        if step % COSTLY == 0:
            with self.signals.clock("output_rank"):
                self.signals.add(**_ranks(self._moments, self.layers))
            with self.signals.clock("increment_entropy"):
                self.signals.add(increment_entropy=self.increments.read().numpy())
        self._moments.clear()

    def finish(self, trial: Trial) -> dict[str, Any]:
        """Trains to the end; the values of :func:`measure_run`."""
        diverged = self.advance()
        stays = trial.fault is not None and EVERY_KIND[trial.fault.kind].stays
        last = self.effect.arithmetic(self.run.steps - 1) if stays else Arithmetic()
        return {
            "held_out": None if diverged is not None else self.held_out(last),
            "diverged_at": diverged,
            "seconds": {name: round(value, 3) for name, value in self.signals.seconds.items()},
        }

    def held_out(self, arithmetic: Arithmetic) -> float | None:
        """The loss on all held-out windows, with attention computed in one way."""
        for layer in self.layers:
            layer.arithmetic = arithmetic
        return held_out_loss(self.model, self._held_out())


class EncoderTraining(Training):
    """Of the pretrained encoder: pieces of source, each with the package that it is from."""

    def _start(self) -> tuple[ByteModel | Encoder, list[WrittenOutAttention]]:
        assert isinstance(self.run.config, EncoderConfig)
        model = Encoder(self.run.config)
        return model, model.attentions()

    def _held_out(self) -> Tensor:
        return drawn_pieces(pieces(self.run.config.context).held_out, 4 * HELD_OUT_WINDOWS, seed=2**40)

    def batch(self, step: int) -> Tensor:
        """A fault changes the pieces, never the class that stands before them."""
        drawn = drawn_pieces(pieces(self.run.config.context).training, self.run.batch, self._seed(step))
        return torch.cat((drawn[:, :1], self.effect.batch(drawn[:, 1:], step)), 1)


def _ranks(moments: list[Moment], layers: list[WrittenOutAttention]) -> dict[str, npt.NDArray[Any]]:
    """Effective ranks: of each head's mixed values [L, H], and of what each layer's attention adds [L].

    NaN in a layer whose values are no numbers.
    """
    heads, outputs = [], []
    for moment, layer in zip(moments, layers, strict=True):
        mixed = moment.mixed.transpose(0, 1).flatten(1, 2)  # [H, B N, D]
        output = attention_output(moment, layer)
        known = bool(output.isfinite().all())
        heads.append(effective_rank(mixed) if known else torch.full((layer.heads,), math.nan))
        outputs.append(effective_rank(output) if known else torch.tensor(math.nan))
    return {"head_rank": torch.stack(heads).numpy(), "output_rank": torch.stack(outputs).numpy()}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


@one_thread()
def measure_run(trial: Trial, corpus: Corpus) -> tuple[dict[str, Any], dict[str, Array]]:
    """Trains one run to its end: plain values for JSON, and signals by name, [T, ...] each.

    Values: ``{"held_out", "diverged_at", "seconds"}``. ``held_out`` is the loss in nats a byte of what comes out: with
    the fault in place where its arithmetic belongs to the model (``FaultKind.stays``), else without; None if the
    training or the loss broke. Training and measuring draw from generators that start anew with the seed and the step,
    so that neither the order of runs nor the number of processes changes a bit.
    """
    training = (EncoderTraining if trial.of_encoder else Training)(trial, corpus)
    values = training.finish(trial)
    return values, training.signals.arrays()
