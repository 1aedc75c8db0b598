"""Models inside models: what data-parallel training, compilation and checkpointing wrap, seen as if it was not wrapped.

A site keeps the name that it has in the user's own model: ``layers.0.attention``, whether DistributedDataParallel adds
``module.``, torch.compile ``_orig_mod.`` or a checkpoint wrapper ``_checkpoint_wrapped_module.`` in front or between.
"""

from __future__ import annotations

import sys

from torch import nn

_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Where torch.compile, FSDP's first version and the wrappers of activations keep the module they wrap."""


class Wrapper(nn.Module):
    """Stands around ``module`` for a while, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


_HOLDERS = (Wrapper, nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Wrappers whose attribute ``module`` could be a name of the user's own in any other class."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's own model inside all wrappers around it."""
    while (name := _wrapped_name(module)) is not None:
        module = getattr(module, name)
    return module


def named(model: nn.Module) -> dict[nn.Module, str]:
    """Every module of ``model`` with its name in the user's own model (empty for the model), as in ``named_modules``.

    A wrapper has the name of what it wraps.
    """
    names: dict[nn.Module, str] = {}
    _name(model, "", names)
    return names


def class_name(module: nn.Module) -> str:
    """The name of the user's own class: ``fully_shard`` makes a subclass of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(module)
    if fsdp is not None and isinstance(module, fsdp.FSDPModule) and len(kind.__bases__) == 2:
        kind = kind.__bases__[1]
    return kind.__name__


def _wrapped_name(module: nn.Module) -> str | None:
    if isinstance(module, _HOLDERS):
        return "module"
    return next((name for name in _ATTRIBUTES if name in module._modules), None)


def _name(module: nn.Module, name: str, names: dict[nn.Module, str]) -> None:
    if module in names:
        return
    names[module] = name
    wrapped = _wrapped_name(module)
    for child_name, child in module._modules.items():
        if child is not None:
            below = name if child_name == wrapped else f"{name}.{child_name}" if name else child_name
            _name(child, below, names)
