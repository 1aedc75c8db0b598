"""A temperature at one call of a module that runs several times in a pass: shared layers, loops."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.nn.temperature import Temperature
from attemper.sites.tap import in_backward


class OneCall(Temperature):
    """``temperature`` at one call of a pass, 1 at the others, of the site of this name. ``end_pass`` ends a pass."""

    def __init__(self, temperature: Temperature, site: str, call: int) -> None:
        super().__init__()
        self.temperature, self.site, self.call = temperature, site, call
        self.calls = 0
        """Of the pass that runs, so far."""
        self.warned = False

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        if not torch.compiler.is_compiling() and in_backward():
            raise InputError(
                f"temper: activation checkpointing computes {self.site} again in the backward pass, and temper "
                "cannot tell which call it is. Turn it off for this module, or temper all its calls."
            )
        self.calls += 1
        if self.calls == self.call:
            return self.temperature(query, hidden=hidden, visible_keys=visible_keys)
        return query.new_ones((1, 1, 1), dtype=torch.promote_types(query.dtype, torch.float32))


def end_pass(model: nn.Module, *_: Any) -> None:
    """A forward hook of the tempered model: the next call of each module is its first."""
    for part in model.modules():
        if isinstance(part, OneCall):
            if 0 < part.calls < part.call and not part.warned:
                part.warned = True
                warnings.warn(
                    f"attemper: temper acts on {part.site}, but its module attended {part.calls} times in this pass.",
                    stacklevel=2,
                )
            part.calls = 0
