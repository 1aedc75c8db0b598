"""The entry points into models' attention, as one table: how each is found in code, read, and acted on.

A kind of site is a row here and a file that reads it and acts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from attemper.nn.attention import CrossAttention
from attemper.nn.attention import MultiheadAttention as OwnMultiheadAttention
from attemper.sites import package_functions, torch_functions, transformers
from attemper.sites.actions import Actions


@dataclass(frozen=True)
class EntryPoint:
    """What a model's code computes attention by."""

    title: str
    """What attends by it, in messages."""
    read: Callable[[nn.Module], AbstractContextManager[None]]
    """Reports the calls of a model to the current observers, inside the block."""
    actions: type[Actions] | None = None
    """How calls are met that are acted on; None where that is not possible."""
    layers: tuple[type[nn.Module], ...] = ()
    """Layers that attend by it, whatever their code says."""
    function: str | None = None
    """The name by which the code of a module gets at the attention."""
    normalizes: bool = True
    """Whether another normalizer can take the place of softmax."""


REGISTRY = EntryPoint(
    "models of transformers' attention registry",
    transformers.reading,
    transformers.RegistryActions,
    function="ALL_ATTENTION_FUNCTIONS",
)
SDPA = EntryPoint(
    "modules that call F.scaled_dot_product_attention",
    torch_functions.reading,
    torch_functions.FunctionActions,
    function="scaled_dot_product_attention",
)
TORCH = EntryPoint(
    "nn.MultiheadAttention",
    torch_functions.reading,
    torch_functions.MultiHeadActions,
    layers=(nn.MultiheadAttention,),
    normalizes=False,
)
OWN = EntryPoint("attemper.nn", package_functions.reading, Actions, layers=(OwnMultiheadAttention, CrossAttention))
BY_HAND = EntryPoint("attention that is softmaxed by hand", torch_functions.reading)
PACKAGES = EntryPoint("a compiled kernel of another package", package_functions.reading)

ENTRY_POINTS = (REGISTRY, SDPA, TORCH, OWN, BY_HAND, PACKAGES)
LAYERS = {layer: entry for entry in ENTRY_POINTS for layer in entry.layers}
FUNCTIONS = {entry.function: entry for entry in ENTRY_POINTS if entry.function is not None}


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Reports every attention call of ``model`` in this thread to the current observers, wherever it enters."""
    with ExitStack() as stack:
        for read in dict.fromkeys(entry.read for entry in ENTRY_POINTS):
            stack.enter_context(read(model))
        yield
