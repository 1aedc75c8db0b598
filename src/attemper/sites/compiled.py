"""Parts of a model that no hook and no function mode can look into: compiled by torch.compile, or TorchScript."""

from __future__ import annotations

import sys

import torch
from torch import nn

from attemper.sites.names import named, unwrapped

COMPILED = "it is compiled by torch.compile: only taps (attemper.tap) are seen inside"
SCRIPTED = "it is TorchScript, into which nothing can look: measure the module that it was made of"


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile made this module, or compiled it in place, or its forward."""
    # Nobody has compiled anything where torch's compiler is not even imported.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return False
    whole = isinstance(module, compiler.OptimizedModule) or module._compiled_call_impl is not None
    return whole or hasattr(module.forward, "_torchdynamo_orig_callable")


def is_script(module: nn.Module) -> bool:
    """Whether this module is TorchScript."""
    return isinstance(module, torch.jit.ScriptModule)


def compiled_parts(model: nn.Module) -> dict[str, str]:
    """Name (empty for the model itself) -> why nothing is seen in it, for the outermost of such modules."""
    names = named(model)
    found: dict[str, str] = {}
    for module in model.modules():
        reason = COMPILED if is_compiled(module) else SCRIPTED if is_script(module) else None
        name = names[module]
        if reason is not None and not any(not outer or name.startswith(f"{outer}.") for outer in found):
            found[name] = reason
    if "" not in found and is_compiled(unwrapped(model)):
        found[""] = COMPILED
    return found
