"""What each detector costs a step: the time of its signal and of its score, on one model of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from attemper.lab.corpus import Corpus
from attemper.lab.experiment import one_thread
from attemper.lab.trained.training import Run
from research.early_warning.detectors import DETECTORS
from research.early_warning.grid import Trial
from research.early_warning.masks import mean_count, visible_keys
from research.early_warning.measures import (
    PER_HEAD,
    Rows,
    attention_output,
    change_norm,
    effective_rank,
)
from research.early_warning.trial import Training

REPEATS = 20
STEPS = 120
"""Of the training whose signals are scored."""


@one_thread()
def measure_costs(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Microseconds a step of the training and of each detector: ``{"step", "detectors": {name: {"signal", "score"}}}``.

    Times are those of this process on one core, medians of 20: what else the machine does hardly counts. A signal that
    is measured each n steps counts with an n-th of what it takes. Scores and weights of attention are there, as it is
    written out; a fused kernel would have to compute them. A score is that of all steps of a training, shared by them.
    """
    trial = Trial(run.change(steps=min(run.steps, STEPS)))
    training = Training(trial, corpus)
    training.advance()
    signals = training.signals.arrays()
    signals["visible_keys"] = visible_keys(trial, len(signals["max_logit"]))
    taken = {name: _microseconds(call) for name, call in _calls(training).items()}
    steps = len(signals["loss"])
    return {
        "step": _microseconds(lambda: _step(training)),
        "detectors": {
            name: {
                "signal": taken.get(one.signal, 0.0) / one.spacing,
                "score": _microseconds(lambda score=one.score: score(signals)) / steps,
            }
            for name, one in DETECTORS.items()
        },
    }


def _step(training: Training) -> None:
    """A step of the training that measures nothing."""
    training.optimizer.zero_grad()
    training.model.loss(training.batch(0)).backward()
    training.optimizer.step()


def _calls(training: Training) -> dict[str, Callable[[], object]]:
    """Signal -> what measures it, and nothing else, once. The loss is there."""
    moments = training.read_attention(0)
    _step(training)
    weights = list(training.model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    pairs = list(zip(moments, training.layers, strict=True))
    per_head: dict[str, Callable[[], object]] = {
        name: lambda measure=measure: [measure(Rows(moment)) for moment in moments]
        for name, measure in PER_HEAD.items()
    }
    return {
        "gradient_norm": lambda: torch.nn.utils.get_total_norm(gradients),
        "update_norm": lambda: change_norm(weights, [weight.detach().clone() for weight in weights]),
        "output_rank": lambda: [effective_rank(attention_output(*pair)) for pair in pairs],
        "increment_entropy": training.increments.read,
        "visible_keys": lambda: [mean_count(layer, moment.scores) for moment, layer in pairs],
        **per_head,
    }


def _microseconds(call: Callable[[], object]) -> float:
    """Median time of this process for a call."""
    taken = []
    for _ in range(REPEATS):
        began = time.process_time_ns()
        call()
        taken.append(time.process_time_ns() - began)
    return median(taken) / 1000
