"""Acting on attention that goes through transformers' registry, whatever the implementation."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from attemper.nn.temperature import ACTIONS
from attemper.sites import registry
from attemper.sites.act import Actions, acted
from attemper.sites.observation import AttentionCall
from attemper.sites.transformers_arguments import as_eager, reader_of, understood


class RegistryActions(Actions):
    """Keeps the look-up of the registry wrapped for as long as it lives, or until it is released."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self._enter()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._enter()

    def _enter(self) -> None:
        registry.put(registry.ACTING, acting)
        # A model that goes away takes its part of the look-up with it.
        self.leave = weakref.finalize(self, registry.take, registry.ACTING)


def acting(function: Callable[..., Any], implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """A function of transformers' registry, with what is done to the calls of some modules."""

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if getattr(module, ACTIONS, None) is None:
            return function(module, query, key, value, *args, **kwargs)

        def read(query: Tensor) -> AttentionCall:
            given = dict(kwargs)
            mask = args[0] if args else given.pop("attention_mask", None)
            given.pop("dropout", None)
            return _reader(function, implementation, default)(module, query=query, key=key, mask=mask, **given)

        def run(query: Tensor) -> Any:
            return function(module, query, key, value, *args, **kwargs)

        return acted(module, query, value, kwargs.get("dropout", 0.0), read, run, _of_registry, first_of_tuple)

    return attention


def _reader(
    function: Callable[..., Any], implementation: str, default: Callable[..., Any]
) -> Callable[..., AttentionCall]:
    if implementation == registry.NAME:
        return understood
    # Somebody may look at the function that the model calls.
    own = getattr(function, "function", function)
    return as_eager if own is default else reader_of(own, implementation)


def _of_registry(output: Tensor) -> tuple[Tensor, None]:
    return output.transpose(1, 2).contiguous(), None


def first_of_tuple(result: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A result whose first entry is the output, with ``function`` applied to that."""
    return (function(result[0]), *result[1:])
