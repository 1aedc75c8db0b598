"""Which modules of a model compute attention, and by which entry point, from their code and without running it.

The names that a class's own functions use are searched, and those of the functions that they call: a method of the same
class, a function of the same file, an object that the module holds (a processor of diffusers).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from attemper.errors import InputError
from attemper.sites.entry_points import ENTRY_POINTS, FUNCTIONS, LAYERS, SDPA, EntryPoint
from attemper.sites.names import (
    Names,
    check_matches,
    check_sites,
    class_name,
    compiled_parts,
    is_wanted,
    names_of,
    own_class,
    unwrap,
)
from attemper.sites.sharded import is_dtensor
from attemper.text import call_of

_DEPTH = 3
"""How many calls deep functions are followed."""
_FOREIGN = ("torch.", "builtins", "einops.")


@dataclass(frozen=True)
class Site:
    """An attention module."""

    name: str
    """Its name in the user's own model."""
    module: nn.Module
    entry: EntryPoint
    call: int | None = None
    """Which of its calls in a pass; None for all."""


def all_sites(names: Names) -> list[Site]:
    """Every module of a model whose own code attends, in the order of the model; ``names``: what ``names_of`` gives."""
    found = ((module, name, entry_of(module)) for module, name in names.items())
    return [Site(name or class_name(module), module, entry) for module, name, entry in found if entry is not None]


def call_site(name: str, sites: Iterable[Site]) -> Site | None:
    """The call that a name such as ``layer#2`` means, of a module among ``sites``; None where it is none."""
    module, call = call_of(name)
    return next((replace(site, name=name, call=call) for site in sites if site.name == module != name), None)


def chosen_sites(where: str, model: nn.Module, sites: Iterable[str] | None, *, calls: bool = False) -> list[Site]:
    """The attention modules of ``model`` that ``sites`` names, in its order; None for all. With ``calls`` also single
    calls, by names such as ``layer#2``, behind them.

    Raises:
        InputError: the model is compiled; no part of it attends in a way that is known; a name matches nothing; or one
            module attends inside another, so that their calls could not be told apart.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"{where}(model) must be an nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel):
        raise InputError(
            f"{where}: nn.DataParallel runs copies of the model, which would act on the original. Take "
            "DistributedDataParallel, or the model inside."
        )
    wanted, names = check_sites(where, sites), names_of(model)
    compiled = compiled_parts(names)
    if compiled:
        name, reason = next(iter(compiled.items()))
        raise InputError(f"{where}: {name or class_name(unwrap(model))}: {reason}. Call {where} before compiling.")
    found = all_sites(names)
    if not found:
        raise InputError(f"{where} found no attention in {class_name(unwrap(model))} that it can act on. {_reach()}")
    kept = [site for site in found if is_wanted(site.name, wanted)]
    for name in wanted or ():
        call = call_site(name, found)
        if call is None or any(is_wanted(site.name, (name,)) for site in found):
            check_matches(where, (name,), (site.name for site in found))
            continue
        if not calls:
            raise InputError(f"{where}(sites=[{name!r}]) acts on all calls of a module: write [{call_of(name)[0]!r}].")
        kept.append(call)
    _refuse_nested(where, kept)
    return kept


def _reach() -> str:
    """Which entry points are acted on and which are not, as sentences."""
    *first, last = (entry.title for entry in ENTRY_POINTS if entry.actions is not None)
    out = ", or ".join(entry.title for entry in ENTRY_POINTS if entry.actions is None)
    return f"It acts on {', on '.join(first)} and on {last}; {out}, is out of its reach."


def _refuse_nested(where: str, sites: list[Site]) -> None:
    for outer in sites:
        inside = {id(part) for part in outer.module.modules()} - {id(outer.module)}
        for inner in sites:
            if id(inner.module) in inside and SDPA in (outer.entry, inner.entry):
                raise InputError(
                    f"{where}: {outer.name} attends, and so does {inner.name} inside it, so their calls cannot "
                    f"be separated. Name one of them with sites=."
                )


def refuse_wrapped(where: str, model: nn.Module) -> None:
    """Refuses a model whose parameters a wrapper holds already, which would not know new ones."""
    if unwrap(model) is not model or any(is_dtensor(parameter) for parameter in model.parameters()):
        raise InputError(
            f"{where} adds parameters, and {type(model).__name__} would not train them: call {where} on the model "
            "before it is wrapped (DistributedDataParallel, fully_shard, torch.compile)."
        )


def entry_of(module: nn.Module) -> EntryPoint | None:
    """How this module's own code attends; None if it does not, or in a way that no code shows."""
    own = own_class(module)
    for kind in own.__mro__:
        if kind in LAYERS:
            return LAYERS[kind]
    if own.__module__.startswith("torch."):
        return None
    found = _of_class(own)
    if found is None:
        for helper in _callable_parts(module):
            found = found or _of_class(helper)
    return found


def projects(module: nn.Module) -> bool:
    """Whether this layer makes queries and keys inside, of sequences that it is given."""
    return isinstance(module, tuple(LAYERS))


def used_names(kind: type) -> set[str]:
    """Names of globals, attributes and methods that a module's forward uses, with its own methods that it calls."""
    methods, names, waiting = _own_methods(kind), set[str](), ["forward"]
    while waiting:
        function = methods.pop(waiting.pop(), None)
        if function is not None:
            new = set(_names(inspect.unwrap(function).__code__)) - names
            names |= new
            waiting += [name for name in new if name in methods]
    return names


def _own_methods(kind: type) -> dict[str, FunctionType]:
    """Methods of a class that are neither torch's nor Python's."""
    methods = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return {
        name: value for name, value in methods.items() if isinstance(value, FunctionType) and not _is_foreign(value)
    }


def _callable_parts(module: nn.Module) -> Iterator[type]:
    """Classes of plain objects that a module holds and may call."""
    for kind in dict.fromkeys(map(type, vars(module).values())):
        if isinstance(vars(kind).get("__call__"), FunctionType) and not issubclass(kind, nn.Module | type):
            yield kind


@lru_cache(maxsize=4096)
def _of_class(kind: type) -> EntryPoint | None:
    own = _own_methods(kind)
    name = "forward" if "forward" in own else "__call__"
    for base in kind.__mro__:
        start = vars(base).get(name)
        if not isinstance(start, FunctionType) or _is_foreign(start):
            continue
        entry = _of_function(start, own, _DEPTH, set())
        if entry is not None or "super" not in _names(start.__code__):
            return entry
    return None


def _of_function(
    function: FunctionType, methods: dict[str, FunctionType], depth: int, visited: set[CodeType]
) -> EntryPoint | None:
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None or code in visited:
        return None
    visited.add(code)
    names = set(_names(code))
    for name, entry in FUNCTIONS.items():
        if name in names or _is_renamed(function, names, name):
            return entry
    if depth == 0:
        return None
    for name in sorted(names):
        called: Any = methods.get(name) or function.__globals__.get(name)
        if isinstance(called, FunctionType) and not _is_foreign(called):
            entry = _of_function(called, methods, depth - 1, visited)
            if entry is not None:
                return entry
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
