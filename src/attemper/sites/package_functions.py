"""Attention that no function mode sees: FlexAttention, torch's varlen attention, and kernels of other packages.

While somebody looks, every module that holds such a function under a name holds a wrapper that tells the observers
and then calls it. They are all put back afterwards. A reference that is kept elsewhere (a closure, a class attribute,
a compiled function) is not seen.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from attemper.call.options import Options
from attemper.sites import own_functions, package_arguments
from attemper.sites.autocast import rounded
from attemper.sites.block_mask import dense as block_mask_of
from attemper.sites.observation import AttentionCall, UnsupportedCallError, current, guarded, tell, told
from attemper.sites.package_arguments import TAP, Given, packed
from attemper.sites.tap import in_backward

Reader = Callable[..., AttentionCall]
"""Called with the function, the module that is running, and the arguments of the function."""

_COMPILES = "transformers.integrations.flex_attention"
"""Compiles the function that it holds and keeps it for good: it must not be a wrapper of ours. The registry sees it."""

_lock = threading.RLock()
_depth = 0
_replaced: list[tuple[Any, str, Any]] = []


@contextmanager
def seen() -> Iterator[None]:
    """Tells the current observers of calls of these functions; nested and concurrent looks share one replacement."""
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
                _put_back()


def _put_back() -> None:
    while _replaced:
        holder, name, function = _replaced.pop()
        setattr(holder, name, function)


def _replace() -> None:
    homes = _homes(tuple(sys.modules))
    wrappers = {}
    for home, name, reader in homes:
        function = getattr(sys.modules.get(home), name, None)
        if callable(function):
            wrappers[id(function)] = _telling(function, reader)
    for holder, name in _holders(frozenset(wrappers)):
        function = vars(holder).get(name)
        if id(function) in wrappers and holder.__name__ != _COMPILES:
            _put(holder, name, wrappers[id(function)])
    for home, name in _MODULES:
        kind = getattr(sys.modules.get(home), name, None)
        if isinstance(kind, type) and "forward" in vars(kind):
            _put(kind, "forward", _telling(vars(kind)["forward"], _by_name(package_arguments.transformer_engine)))


def _put(holder: Any, name: str, wrapper: Callable[..., Any]) -> None:
    _replaced.append((holder, name, vars(holder)[name]))
    setattr(holder, name, wrapper)


@lru_cache(maxsize=1)
def _homes(modules: tuple[str, ...]) -> tuple[tuple[str, str, Reader], ...]:
    """(module, name, reader) of every function that may be there.

    Kernels from the Hub bring flash_attn's interface along under a name of their own; a function of that name anywhere
    else is somebody's own, of which nothing is known.
    """
    found = list(_FUNCTIONS)
    for module in modules:
        if module.rpartition(".")[2] == "flash_attn_interface" or module == "flash_attn.cute.interface":
            found += [(module, name, _by_name(reader)) for name, reader in _FLASH]
    return tuple(found)


class _Holders:
    """Which modules hold these functions, under which names.

    A module is looked through again when it is another one, or when it holds more or fewer names than before. The
    module ``__main__``, of a notebook say, always is: there, names are given to other things all the time.
    """

    def __init__(self) -> None:
        self._functions: frozenset[int] = frozenset()
        self._known: dict[str, tuple[Any, int, tuple[str, ...]]] = {}
        """Name of a module -> itself, how many names it held, and those of the functions."""

    def __call__(self, functions: frozenset[int]) -> list[tuple[Any, str]]:
        before = self._known if functions == self._functions else {}
        self._functions, self._known = functions, {}
        for module, holder in list(sys.modules.items()):
            names = getattr(holder, "__dict__", None)
            if isinstance(names, dict):
                self._known[module] = self._looked_through(module, holder, names, before.get(module))
        return [(holder, name) for holder, _, names in self._known.values() for name in names]

    def _looked_through(self, module: str, holder: Any, names: dict[str, Any], before: Any) -> Any:
        same = before is not None and before[0] is holder and before[1] == len(names)
        if same and module != "__main__":
            return before
        held = tuple(name for name, value in list(names.items()) if id(value) in self._functions)
        return holder, len(names), held


_holders = _Holders()


def _telling(function: Callable[..., Any], reader: Reader) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not current() or in_backward():
            return function(*args, **kwargs)
        with told():
            result = function(*args, **kwargs)
        guarded(current(), tell, partial(reader, function), args, kwargs)
        return result

    return wrapper


def _by_name(read: Callable[[Given], AttentionCall]) -> Reader:
    """A reader of arguments by the names that the function gives them."""

    def reader(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> AttentionCall:
        return read(Given(module, function, args, kwargs))

    return reader


def _by_place(read: Callable[..., AttentionCall]) -> Reader:
    """A reader of torch's own functions, whose signatures are its own."""

    def reader(_: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> AttentionCall:
        return read(module, *args, **kwargs)

    return reader


def _flex(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None,
    **_: Any,
) -> AttentionCall:  # fmt: skip
    if score_mod is not None:
        raise UnsupportedCallError(module, "its FlexAttention changes scores by a score_mod of its own")
    mask = None if block_mask is None else block_mask_of(module, block_mask, query, key)
    return AttentionCall(*rounded(query, key), mask, Options(scale=scale, enable_gqa=enable_gqa))


def _torch_varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int,
    max_k: int, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    seqused_k: Any = None, block_table: Any = None, **_: Any,
) -> AttentionCall:  # fmt: skip
    if seqused_k is not None or block_table is not None or cu_seq_k is None:
        raise UnsupportedCallError(module, f"its varlen attention reads a cache of its own; {TAP}")
    options = Options(
        scale=scale, window_size=window_size, causal_alignment="bottom-right",
        enable_gqa=enable_gqa or query.shape[1] != key.shape[1],
    )  # fmt: skip
    return packed(query, key, cu_seq_q, cu_seq_k, options)


def _torch_varlen_out(module: nn.Module, out: Tensor, *args: Any, **kwargs: Any) -> AttentionCall:
    return _torch_varlen(module, *args, **kwargs)


_FUNCTIONS: tuple[tuple[str, str, Reader], ...] = (
    ("attemper.functional.attention", "attention", _by_place(own_functions.attention)),
    ("attemper.functional.attention", "varlen_attention", _by_place(own_functions.varlen_attention)),
    ("torch.nn.attention.flex_attention", "flex_attention", _by_place(_flex)),
    ("torch.nn.attention.varlen", "varlen_attn", _by_place(_torch_varlen)),
    ("torch.nn.attention.varlen", "varlen_attn_out", _by_place(_torch_varlen_out)),
    ("xformers.ops.fmha", "memory_efficient_attention", _by_name(package_arguments.xformers)),
    ("xformers.ops.fmha", "memory_efficient_attention_forward", _by_name(package_arguments.xformers)),
    ("xformers.ops.fmha", "memory_efficient_attention_forward_requires_grad", _by_name(package_arguments.xformers)),
    ("xformers.ops.fmha", "memory_efficient_attention_partial", _by_name(package_arguments.xformers_partial)),
)
_FLASH = (
    ("flash_attn_func", package_arguments.flash),
    ("flash_attn_qkvpacked_func", package_arguments.flash),
    ("flash_attn_kvpacked_func", package_arguments.flash),
    ("flash_attn_varlen_func", package_arguments.flash),
    ("flash_attn_varlen_qkvpacked_func", package_arguments.flash),
    ("flash_attn_varlen_kvpacked_func", package_arguments.flash),
    ("flash_attn_with_kvcache", package_arguments.flash_with_cache),
)
_MODULES = (("transformer_engine.pytorch", "DotProductAttention"),)
"""Modules whose forward attends in kernels that nothing else shows."""
