"""Attention that no function mode sees: FlexAttention, torch's varlen attention, and kernels of other packages.

While a pass is read, every Python module that holds such a function under a name holds a wrapper instead, which calls
the function and reports the call to the observers. All functions are restored afterwards. A reference that is kept
elsewhere (a closure, a class attribute, a compiled function) is not seen.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import nn

from attemper.sites import package_arguments
from attemper.sites.observation import AttentionCall, beside, report
from attemper.sites.package_arguments import NamedArguments, Read, refusing

_COMPILES = "transformers.integrations.flex_attention"
"""Compiles the function that it holds and keeps the result: it must hold no wrapper. The registry reads its calls."""

_lock = threading.RLock()
_depth = 0
_replaced: list[tuple[Any, str, Any]] = []


@contextmanager
def reading(_: nn.Module) -> Iterator[None]:
    """Reports calls of these functions to the current observers; nested and concurrent blocks share one replacement."""
    global _depth
    with _lock:
        _depth += 1
    try:
        with _lock:
            if _depth == 1:
                _replace()
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _restore()


def _restore() -> None:
    while _replaced:
        holder, name, function = _replaced.pop()
        setattr(holder, name, function)


def _replace() -> None:
    homes = _homes(_modules_now())
    wrappers = {}
    for home, name, read in homes:
        function = getattr(sys.modules.get(home), name, None)
        if callable(function):
            wrappers[id(function)] = _reporting(function, read)
    for holder, name in _holders(frozenset(wrappers)):
        function = vars(holder).get(name)
        if id(function) in wrappers and holder.__name__ != _COMPILES:
            _place(holder, name, wrappers[id(function)])
    for home, name in _MODULES:
        kind = getattr(sys.modules.get(home), name, None)
        if isinstance(kind, type) and "forward" in vars(kind):
            _place(kind, "forward", _reporting(vars(kind)["forward"], _TRANSFORMER_ENGINE))


def _place(holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
    _replaced.append((holder, name, vars(holder)[name]))
    setattr(holder, name, wrapper)


@lru_cache(maxsize=1)
def _homes(loaded: tuple[int, str]) -> tuple[tuple[str, str, Read], ...]:
    """(module, name, how its arguments are read) of every function that may be there.

    Kernels from the Hub bring flash_attn's interface along under a name of their own. Of a function of the same name
    anywhere else nothing is known. ``loaded``: what ``_loaded`` says of them.
    """
    del loaded
    found = list(_FUNCTIONS)
    for module in list(sys.modules):
        if module.rpartition(".")[2] == "flash_attn_interface" or module == "flash_attn.cute.interface":
            found += [(module, name, read) for name, read in _FLASH]
    return tuple(found)


def _modules_now() -> tuple[int, str]:
    """How many Python modules are loaded, and which one last: another where one was added or taken away."""
    return len(sys.modules), next(reversed(sys.modules), "")


_SETTLED = frozenset((*sys.stdlib_module_names, *re.findall(r"\w+", "torch numpy sympy mpmath triton")))
"""Packages with thousands of modules, which are given no names after they are loaded."""


class _Holders:
    """Which Python modules hold these functions, under which names.

    A module is searched again when it is another object, or holds more or fewer names than before: those of
    ``_SETTLED`` only when other modules are loaded. The module ``__main__``, of a notebook say, is always searched:
    there, names are given to other things all the time.
    """

    def __init__(self) -> None:
        self._functions: frozenset[int] = frozenset()
        self._loaded = (0, "")
        self._known: dict[str, tuple[Any, dict[str, Any], int, tuple[str, ...]]] = {}
        """Name of a module -> itself, its names, how many they were, and those of the functions."""
        self._changing: list[tuple[str, Any, dict[str, Any], int]] = []
        """The same of modules that may be given names."""
        self._found: list[tuple[Any, str]] = []

    def __call__(self, functions: frozenset[int]) -> list[tuple[Any, str]]:
        if functions != self._functions or not self._is_unchanged():
            self._search_all(functions)
        main = sys.modules.get("__main__")
        return [*self._found, *((main, name) for name in self._names_in(getattr(main, "__dict__", {})))]

    def _is_unchanged(self) -> bool:
        """Whether these are the modules of the last search, with as many names. A sampled step asks it."""
        modules = sys.modules
        return _modules_now() == self._loaded and all(
            modules.get(module) is holder and len(names) == size for module, holder, names, size in self._changing
        )

    def _search_all(self, functions: frozenset[int]) -> None:
        before = self._known if functions == self._functions else {}
        self._functions, self._known, self._loaded = functions, {}, _modules_now()
        for module, holder in list(sys.modules.items()):
            names = getattr(holder, "__dict__", None)
            if isinstance(names, dict) and module != "__main__":
                known = before.get(module)
                if known is None or known[0] is not holder or known[2] != len(names):
                    known = (holder, names, len(names), self._names_in(names))
                self._known[module] = known
        self._changing = [
            (module, *known[:3]) for module, known in self._known.items() if module.partition(".")[0] not in _SETTLED
        ]
        self._found = [(holder, name) for holder, _, _, held in self._known.values() for name in held]

    def _names_in(self, names: dict[str, Any]) -> tuple[str, ...]:
        return tuple(name for name, value in list(names.items()) if id(value) in self._functions)


_holders = _Holders()


@lru_cache(maxsize=64)
def _reporting(function: Callable[..., Any], read: Read) -> Callable[..., Any]:
    def reader(module: nn.Module, *args: Any, **kwargs: Any) -> AttentionCall:
        return read(NamedArguments(module, function, args, kwargs))

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return beside(function, args, kwargs, lambda _: report(reader, args, kwargs))

    return wrapper


_FUNCTIONS: tuple[tuple[str, str, Read], ...] = (
    ("attemper.functional.attention", "attention", package_arguments.own_attention),
    ("attemper.functional.attention", "varlen_attention", package_arguments.own_varlen_attention),
    ("torch.nn.attention.flex_attention", "flex_attention", package_arguments.flex),
    ("torch.nn.attention.varlen", "varlen_attn", package_arguments.torch_varlen),
    ("torch.nn.attention.varlen", "varlen_attn_out", package_arguments.torch_varlen),
    ("xformers.ops.fmha", "memory_efficient_attention", package_arguments.xformers),
    ("xformers.ops.fmha", "memory_efficient_attention_forward", package_arguments.xformers),
    ("xformers.ops.fmha", "memory_efficient_attention_forward_requires_grad", package_arguments.xformers),
    (
        "xformers.ops.fmha",
        "memory_efficient_attention_partial",
        refusing("its xformers attention is over a part of the keys"),
    ),
)
_FLASH = (
    ("flash_attn_func", package_arguments.flash),
    ("flash_attn_qkvpacked_func", package_arguments.flash),
    ("flash_attn_kvpacked_func", package_arguments.flash),
    ("flash_attn_varlen_func", package_arguments.flash),
    ("flash_attn_varlen_qkvpacked_func", package_arguments.flash),
    ("flash_attn_varlen_kvpacked_func", package_arguments.flash),
    ("flash_attn_with_kvcache", refusing("its flash attention reads and writes an internal cache")),
)
_TRANSFORMER_ENGINE = refusing("TransformerEngine chooses layout, mask and kernel inside")
_MODULES = (("transformer_engine.pytorch", "DotProductAttention"),)
"""Modules whose forward attends in kernels that nothing else shows."""
