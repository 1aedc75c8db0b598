"""Modules under the names that they have in the user's own model, and which of them a caller asks for.

Data-parallel training, compilation and activation checkpointing wrap modules. A site keeps its name all the same:
``layers.0.attention``, whether DistributedDataParallel adds ``module.``, torch.compile ``_orig_mod.`` or a checkpoint
wrapper ``_checkpoint_wrapped_module.`` in front or between.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from attemper.checks import did_you_mean
from attemper.errors import InputError
from attemper.text import first_of

Names = Mapping[nn.Module, str]
"""Every module of a model with its name in the user's own model, the model itself first (its name is empty)."""
SiteNames = tuple[str, ...] | None
"""Names of modules or taps, each with everything below it; None for every site."""

COMPILED = "it is compiled by torch.compile: only taps (attemper.tap) are seen inside"
SCRIPTED = "it is TorchScript, into which nothing can look: measure the module that it was made of"
SHOWN = 8
"""Names of sites in a message."""
ORIGINAL = "_torchdynamo_orig_callable"
"""Where torch.compile keeps the function that it was given."""
_WRAPPER = "torch._dynamo.eval_frame.OptimizedModule"
_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Where torch.compile, FSDP's first version and the wrappers of activations keep the module they wrap."""


class Wrapper(nn.Module):
    """Stands around ``module`` for a while, as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


_HOLDERS = (Wrapper, nn.DataParallel, nn.parallel.DistributedDataParallel)
"""Wrappers with an attribute ``module``, which in any other class could be a name of the user's own."""


def unwrap(module: nn.Module, attributes: tuple[str, ...] = _ATTRIBUTES) -> nn.Module:
    """The user's own model inside all wrappers around it; of those that are told by ``attributes``, inside of these."""
    while (name := _wrapped_name(module, attributes)) is not None:
        module = getattr(module, name)
    return module


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Every module of ``model`` with its name in the user's own model (empty for the model), as in ``named_modules``.

    A wrapper has the name of what it wraps.
    """
    names: dict[nn.Module, str] = {}
    _name(model, "", names)
    return names


def class_name(module: nn.Module) -> str:
    return own_class(module).__name__


def own_class(module: nn.Module) -> type[nn.Module]:
    """The user's own class: ``fully_shard`` makes a subclass of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(module)
    if fsdp is not None and isinstance(module, fsdp.FSDPModule) and len(kind.__bases__) == 2:
        kind = kind.__bases__[1]
    return kind


def _wrapped_name(module: nn.Module, attributes: tuple[str, ...] = _ATTRIBUTES) -> str | None:
    if isinstance(module, _HOLDERS):
        return "module"
    for name in attributes:
        if name in module._modules:
            return name
    return None


def _name(module: nn.Module, name: str, names: dict[nn.Module, str]) -> None:
    if module in names:
        return
    names[module] = name
    wrapped = _wrapped_name(module)
    for child_name, child in module._modules.items():
        if child is not None:
            own = writable(child_name)
            below = name if child_name == wrapped else f"{name}.{own}" if name else own
            _name(child, below, names)


def check_sites(where: str, sites: Any) -> SiteNames:
    """The argument ``sites`` as names. A string is one name."""
    if sites is None:
        return None
    if not isinstance(sites, Iterable):
        raise InputError(f"{where}(sites=...) must be a list of module or tap names, got {sites!r}.")
    names = (sites,) if isinstance(sites, str) else tuple(sites)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}(sites=...) must be a list of at least one name, got {list(names)!r}.")
    return tuple(map(writable, names))


def check_matches(where: str, sites: SiteNames, names: Iterable[str], what: str = "attention") -> None:
    """Checks that each of the wanted ``sites`` is one of these names, or has one below it. ``InputError``: one matches
    nothing; with the names, and those that are spelled most like it.
    """
    names = list(names)
    for name in sites or ():
        if not any(is_wanted(one, (name,)) for one in names):
            near = did_you_mean(name, names)
            raise InputError(f"{where}(sites=[{name!r}]) matches no {what}. They are: {first_of(names, SHOWN)}.{near}")


def writable(name: str) -> str:
    """A name as files can hold it: a lone surrogate, which no encoding has, as its escape."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def is_within(name: str, outer: str) -> bool:
    """Whether a module is the one of the other name, or lies in it; the name of a whole model is empty."""
    return not outer or name == outer or name.startswith(f"{outer}.")


def is_wanted(name: str, wanted: SiteNames) -> bool:
    return wanted is None or any(name == w or name.startswith(f"{w}.") for w in wanted)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made this module, or compiled it in place, or its forward."""
    whole = "_orig_mod" in module._modules or compiled_call(module) is not None
    return whole or hasattr(module.forward, ORIGINAL)


def compiled_call(module: nn.Module) -> Any:
    """What ``module.compile()`` runs in the module's place; None where it was not called."""
    return getattr(module, "_compiled_call_impl", None)


def wrapper_kind() -> type[nn.Module] | None:
    """The class of what ``torch.compile`` makes of a module; None where nothing has been compiled."""
    return getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)


def missing_door() -> str | None:
    """What this release of torch lacks of its private names by which a watch meets compiled code; None where it has
    all. What ``torch.compile`` uses is known once it is imported.
    """
    if not hasattr(nn.Module, "_compiled_call_impl"):
        return "torch.nn.Module._compiled_call_impl"
    return _WRAPPER if "torch._dynamo" in sys.modules and wrapper_kind() is None else None


def missing_question(wrapper: nn.Module) -> str | None:
    """What this release of torch lacks of its private names by which a module learns that it is called through a
    wrapper that was made of it since; None where it has all.
    """
    if not hasattr(type(wrapper), "_call_lazy_check"):
        return f"{_WRAPPER}._call_lazy_check"
    return None if "_forward" in vars(wrapper) else f"{_WRAPPER}._forward"


def is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a model of transformers, which nobody has made where that is not even imported."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def pretrained_models(model: nn.Module) -> list[nn.Module]:
    """The models of transformers inside ``model``."""
    return [part for part in model.modules() if is_pretrained(part)]


def compiled_parts(names: Names) -> dict[str, str]:
    """Why nothing is seen inside, by name, for the outermost modules that no hook and no function mode looks into.
    ``names``: what ``names_of`` says of a model; the name of the model itself is empty.
    """
    found: dict[str, str] = {}
    for module, name in names.items():
        reason = COMPILED if is_compiled(module) else SCRIPTED if is_script(module) else None
        if reason is not None and not any(not outer or name.startswith(f"{outer}.") for outer in found):
            found[name] = reason
    model = next(iter(names))
    if "" not in found and is_compiled(unwrap(model)):
        found[""] = COMPILED
    return found
