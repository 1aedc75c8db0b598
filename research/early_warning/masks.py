"""How many keys the queries of a run see: what follows from its masks, which no weight changes.

Files of runs do not hold it: it is counted from the same masks when runs are judged.
"""

from __future__ import annotations

import numpy as np
import torch

from research.early_warning.attention import Arithmetic, WrittenOutAttention
from research.early_warning.encoder import EncoderAttention, EncoderConfig
from research.early_warning.faults import EVERY_KIND, Effect
from research.early_warning.grid import Trial
from research.early_warning.trial import Array


def visible_keys(trial: Trial, measurements: int) -> Array:
    """Mean over rows of the number of visible keys at each measurement of attention: [T, L, H]."""
    run, fault = trial.run, trial.fault
    effect = EVERY_KIND[fault.kind].effect(fault, run) if fault else Effect()
    config = run.config
    layers = [
        EncoderAttention(config, layer) if isinstance(config, EncoderConfig) else WrittenOutAttention(config, layer)
        for layer in range(config.layers)
    ]
    known: dict[Arithmetic, Array] = {}
    found = []
    for step in range(0, measurements * run.every, run.every):
        arithmetic = effect.arithmetic(step)
        if arithmetic not in known:
            known[arithmetic] = _counts(layers, arithmetic, config.context)
        found.append(known[arithmetic])
    return np.stack(found)


def _counts(layers: list[WrittenOutAttention], arithmetic: Arithmetic, tokens: int) -> Array:
    """[L, H]."""
    counts = []
    for layer in layers:
        layer.arithmetic = arithmetic
        counts.append(mean_count(layer, torch.empty(tokens, tokens)).numpy())
    return np.stack(counts)


def mean_count(layer: WrittenOutAttention, scores: torch.Tensor) -> torch.Tensor:
    """[H], of the mask that a layer puts on ``scores`` [..., N, N]."""
    return (~layer.mask(scores)).sum(-1).float().mean(-1).expand(layer.heads)
