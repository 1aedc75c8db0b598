"""What becomes of the outputs of attention, up to the next layer: two that are subtracted are no map for each head.

Memory that holds an output is marked with the module that attended. Marks go through every function but products with
parameters.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from attemper.sites.tensor_axes import LAYERS, FunctionCall, functions, is_weight, product

FACTOR = "its softmaxes are multiplied with each other (landmarks): none of them alone is attention over tokens"
DIFFERENCE = "what its softmaxes give is subtracted (differential attention): weights of a head are no distribution"
_SUBTRACTIONS = functions("sub", "__sub__", "__rsub__", "rsub", "subtract", "sub_", "subtract_", "__isub__")

Modules = frozenset[nn.Module]


class Lineage:
    """Which memory of a forward pass is made of outputs of attention."""

    def __init__(self) -> None:
        self._made: dict[StorageWeakRef | None, Modules] = {}

    def mark(self, output: Any, module: nn.Module) -> None:
        """Notes what an attention of ``module`` gave."""
        memory = memory_of(output)
        if memory is not None:
            self._made[memory] = frozenset((module,))

    def follow(self, call: FunctionCall) -> Modules:
        """Notes what a function has made of outputs. Returns the modules whose outputs it subtracts."""
        given = [part for part in call.tensors() if part.is_floating_point()] if self._made else []
        made = [self._made.get(memory_of(part), frozenset[nn.Module]()) for part in given]
        if not any(made) or _is_layer(call):
            return frozenset()
        every = frozenset[nn.Module]().union(*made)
        for part in call.result if isinstance(call.result, (tuple, list)) else (call.result,):
            if (memory := memory_of(part)) is not None:
                self._made.setdefault(memory, every)
        alike = len(given) == 2 and given[0].shape == given[1].shape and all(made)
        return every if alike and call.func in _SUBTRACTIONS else frozenset()


def memory_of(tensor: Any) -> StorageWeakRef | None:
    """The memory of a tensor, of a DTensor what this process holds; None where it is not known."""
    try:
        return StorageWeakRef(getattr(tensor, "_local_tensor", tensor).untyped_storage())
    except (AttributeError, RuntimeError, NotImplementedError):  # no tensor, inside torch.func, or without memory
        return None


def _is_layer(call: FunctionCall) -> bool:
    found = product(call)
    return call.func in LAYERS or (found is not None and any(map(is_weight, found.operands)))
