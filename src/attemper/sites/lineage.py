"""What becomes of the outputs of attention, up to the next layer: two that are subtracted are no map for each head."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from attemper.sites.tensor_axes import LAYERS, FunctionCall, functions, is_weight, product

FACTOR = "its softmaxes are multiplied with each other (landmarks): none of them alone is attention over tokens"
DIFFERENCE = "what its softmaxes give is subtracted (differential attention): weights of a head are no distribution"
_SUBTRACTIONS = functions("sub", "__sub__", "__rsub__", "rsub", "subtract", "sub_", "subtract_", "__isub__")


class Lineage:
    """Which memory of a forward pass is made of outputs of attention, and of which modules."""

    def __init__(self) -> None:
        self._made: dict[StorageWeakRef | None, frozenset[nn.Module]] = {}

    def mark(self, output: Any, module: nn.Module) -> None:
        """Notes what an attention of ``module`` gave."""
        self._made[memory_of(output)] = frozenset((module,))
        self._made.pop(None, None)

    def follow(self, call: FunctionCall) -> frozenset[nn.Module]:
        """Notes what a function has made of outputs. Returns the modules whose outputs it subtracts."""
        given = [part for part in call.tensors() if part.is_floating_point()] if self._made else []
        made = [self._made.get(memory_of(part), frozenset[nn.Module]()) for part in given]
        found = product(call) if any(made) else None
        if not any(made) or call.func in LAYERS or (found and any(map(is_weight, found.operands))):
            return frozenset()
        every = frozenset[nn.Module]().union(*made)
        for part in call.result if isinstance(call.result, (tuple, list)) else (call.result,):
            self._made.setdefault(memory_of(part), every)
        self._made.pop(None, None)
        alike = len(given) == 2 and given[0].shape == given[1].shape and all(made)
        return every if alike and call.func in _SUBTRACTIONS else frozenset()


def memory_of(tensor: Any) -> StorageWeakRef | None:
    """The memory of a tensor, of a DTensor what this process holds; None where it is not known."""
    try:
        return StorageWeakRef(getattr(tensor, "_local_tensor", tensor).untyped_storage())
    except (AttributeError, RuntimeError, NotImplementedError):  # no tensor, inside torch.func, or without memory
        return None
