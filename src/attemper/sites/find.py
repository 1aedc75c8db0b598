"""Which modules of a model compute attention, and by which way in, told from their code without running it.

The names that a class's own functions use are looked through, and those of the functions that they call: a method of
the same class, a function of the same file, an object that the module holds (a processor of diffusers).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from attemper.nn.attention import CrossAttention
from attemper.nn.attention import MultiheadAttention as OwnMultiheadAttention
from attemper.sites.names import class_name, named

REGISTRY, SDPA, TORCH, OWN = "registry", "sdpa", "torch", "own"
"""transformers' registry; ``F.scaled_dot_product_attention``; ``nn.MultiheadAttention``; a layer of attemper.nn."""

_NAMES = {"ALL_ATTENTION_FUNCTIONS": REGISTRY, "scaled_dot_product_attention": SDPA}
_DEPTH = 3
"""How many calls deep functions are followed."""
_FOREIGN = ("torch.", "builtins", "einops.")


def callers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Name -> (module, way in) of every module of ``model`` whose own code attends, in the order of the model."""
    found = {}
    for module, name in named(model).items():
        way = way_in(module)
        if way is not None:
            found[name or class_name(module)] = (module, way)
    return found


def way_in(module: nn.Module) -> str | None:
    """How this module's own code attends; None if it does not, or in a way that is not among these."""
    if isinstance(module, OwnMultiheadAttention | CrossAttention):
        return OWN
    if isinstance(module, nn.MultiheadAttention):
        return TORCH
    if type(module).__module__.startswith("torch."):
        return None
    found = _of_class(type(module))
    if found is None:
        for helper in _callable_parts(module):
            found = found or _of_class(helper)
    return found


def projects(module: nn.Module) -> bool:
    """Whether this layer makes queries and keys inside, of sequences that it is given."""
    return isinstance(module, nn.MultiheadAttention | OwnMultiheadAttention | CrossAttention)


def _callable_parts(module: nn.Module) -> Iterator[type]:
    """Classes of plain objects that a module holds and may call."""
    for value in vars(module).values():
        kind = type(value)
        if not isinstance(value, nn.Module | type) and isinstance(vars(kind).get("__call__"), FunctionType):
            yield kind


@lru_cache(maxsize=4096)
def _of_class(kind: type) -> str | None:
    functions = {}
    for base in reversed(kind.__mro__):
        if base is object or base is nn.Module:
            continue
        functions |= {name: value for name, value in vars(base).items() if isinstance(value, FunctionType)}
    own = {name: function for name, function in functions.items() if not _is_foreign(function)}
    name = "forward" if "forward" in own else "__call__"
    for base in kind.__mro__:
        start = vars(base).get(name)
        if not isinstance(start, FunctionType) or _is_foreign(start):
            continue
        way = _of_function(start, own, _DEPTH, set())
        if way is not None or "super" not in _names(start.__code__):
            return way
    return None


def _of_function(
    function: FunctionType, methods: dict[str, FunctionType], depth: int, seen: set[CodeType]
) -> str | None:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return None
    seen.add(code)
    names = set(_names(code))
    for name, way in _NAMES.items():
        if name in names or _is_renamed(function, names, name):
            return way
    if depth == 0:
        return None
    for name in sorted(names):
        called: Any = methods.get(name) or function.__globals__.get(name)
        if isinstance(called, FunctionType) and not _is_foreign(called):
            way = _of_function(called, methods, depth - 1, seen)
            if way is not None:
                return way
    return None


def _names(code: CodeType) -> Iterator[str]:
    """Every global, attribute and method name in a function and in those it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_renamed(function: FunctionType, names: set[str], name: str) -> bool:
    """Whether a global of another name is torch's function: ``import scaled_dot_product_attention as sdpa``."""
    values = (function.__globals__.get(used) for used in names)
    return any(callable(value) and getattr(value, "__name__", None) == name for value in values)


def _is_foreign(function: FunctionType) -> bool:
    return (function.__module__ or "").startswith(_FOREIGN)
