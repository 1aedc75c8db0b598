"""A small corpus and small runs, for tests of training experiments."""

from __future__ import annotations

import torch

from attemper.lab.corpus import Corpus
from attemper.lab.model import ByteConfig
from attemper.lab.trained.training import Run

CONFIG = ByteConfig(layers=2, heads=2, width=16, context=16)


def corpus() -> Corpus:
    """Bytes that follow a rule: easy to learn, the same every time."""
    ids = (torch.arange(6000) ** 2 % 97 + torch.arange(6000) % 7).to(torch.uint8)
    return Corpus(ids[:4000], ids[4000:], "small")


def small(**values: object) -> Run:
    """A run of 8 steps, changed by ``values``."""
    return Run(steps=8, batch=2, every=3, config=CONFIG).change(**values)
