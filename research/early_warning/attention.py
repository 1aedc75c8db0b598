"""The attention of the benchmark's models: written out, so that it can be read and its arithmetic can be broken.

All runs compute so, healthy ones too: a run and its twin differ by the fault and by no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.lab.model import Attention, ByteConfig, ByteModel

SIGNIFICAND = 23
"""Bits of mantissa of float32."""


@dataclass(frozen=True)
class Arithmetic:
    """How scores are computed; the default is right."""

    factor: float = 1.0
    """Scores are multiplied by it."""
    bits: int = SIGNIFICAND
    """Of mantissa that are left of each score: 7 as in bfloat16, 3 and 2 as in the two formats of 8 bits."""
    leaks: frozenset[int] = frozenset()
    """Heads, counted through the model, whose queries see the next key."""


@dataclass(frozen=True)
class Moment:
    """What one layer computed in one forward pass, without a graph."""

    scores: Tensor
    """[B, H, N, N], -inf where a key is not visible."""
    weights: Tensor
    """[B, H, N, N]."""
    mixed: Tensor
    """[B, H, N, D], before the output projection."""


class WrittenOutAttention(Attention):
    """:class:`Attention` as scores, softmax and a sum, with an :class:`Arithmetic`."""

    def __init__(self, config: ByteConfig, layer: int) -> None:
        super().__init__(config)
        self.first_head = layer * config.heads
        self.arithmetic = Arithmetic()
        self.reader: Callable[[Moment], None] | None = None
        """Is told of each forward pass while it is there."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query * (self.arithmetic.factor / math.sqrt(query.shape[-1]))) @ key.transpose(-1, -2)
        if self.arithmetic.bits < SIGNIFICAND:
            # The gradient passes as if nothing had been rounded, as it does in a kernel of low precision.
            scores = scores + (round_mantissa(scores.detach(), self.arithmetic.bits) - scores.detach())
        scores = scores.masked_fill(self.mask(scores), -math.inf)
        weights = scores.softmax(-1)
        mixed = weights @ value
        if self.reader is not None:
            self.reader(Moment(scores.detach(), weights.detach(), mixed.detach()))
        return mixed

    def mask(self, scores: Tensor) -> Tensor:
        """Which keys no query sees: [N, N], or [H, N, N] where heads leak."""
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        leaks = [self.first_head + head in self.arithmetic.leaks for head in range(self.heads)]
        if not any(leaks):
            return hidden
        return torch.stack([hidden.triu(2) if leak else hidden for leak in leaks])


def round_mantissa(x: Tensor, bits: int) -> Tensor:
    """``x``, float32, to the nearest number with so many bits of mantissa. Source: Veltkamp's splitting."""
    spread = x * (2.0 ** (SIGNIFICAND - bits) + 1)
    return spread - (spread - x)


def write_out(model: ByteModel) -> list[WrittenOutAttention]:
    """Puts a :class:`WrittenOutAttention` with the same weights in the place of each attention of ``model``."""
    found = []
    for layer, block in enumerate(model.blocks):
        attention = WrittenOutAttention(model.config, layer)
        attention.load_state_dict(block.get_submodule("attention").state_dict())
        block.add_module("attention", attention)
        found.append(attention)
    return found
