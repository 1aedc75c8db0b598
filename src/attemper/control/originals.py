"""Modules that were given for several sites at once: each site has a copy, and training the original does nothing."""

from __future__ import annotations

import copy
import warnings
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from attemper.nn.temperature import ScheduledTemperature

Part = TypeVar("Part", bound=nn.Module)

_originals: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters of modules that were copied -> what to tell whoever trains them. Alive as long as the user holds them."""


def parts_for(given: Part, count: int) -> list[Part]:
    """A module for each of ``count`` sites: itself for one, copies for several, which learn each for itself.

    A schedule is not copied: all sites follow the one whose ``step()`` the user calls.
    """
    if count == 1:
        return [given]
    shared = {id(part): part for part in given.modules() if isinstance(part, ScheduledTemperature)}
    learned = {name: part for name, part in given.named_parameters() if part.requires_grad}
    for name, parameter in learned.items():
        _originals[parameter] = (
            f"an optimizer holds {name} of the {type(given).__name__} that attemper.temper was given for {count} "
            "sites, and it has no gradient: each site learns a copy of its own. Give the optimizer "
            "handle.parameters(), or give temper a list with a module for each site."
        )
    if learned:
        _watch_optimizers()
    return [copy.deepcopy(given, dict(shared)) for _ in range(count)]


@lru_cache(1)
def _watch_optimizers() -> None:
    # It stays: taken off inside of a step, it would break the loop over the hooks of others.
    register_optimizer_step_post_hook(_tell)


def _tell(optimizer: Optimizer, *_: Any) -> None:
    """After a step of any optimizer: warns once of each original in it that received no gradient."""
    if torch.compiler.is_compiling() or not len(_originals):
        return
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is None]
    for message in {_originals.pop(parameter, None): None for parameter in held}:
        if message is not None:
            warnings.warn(message, UserWarning, stacklevel=3)
