"""The ways into a model's attention, as one table: how each is found in code, read, and acted on.

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
class Way:
    """One way in which a model's code computes attention."""

    title: str
    """What attends this way, in messages."""
    read: Callable[[nn.Module], AbstractContextManager[None]]
    """Reports the calls of a model to the current observers, inside the block."""
    actions: type[Actions] | None = None
    """How calls are met that are acted on; None where that is not possible."""
    layers: tuple[type[nn.Module], ...] = ()
    """Layers that attend this way, whatever their code says."""
    function: str | None = None
    """The name by which the code of a module gets at the attention."""
    normalizes: bool = True
    """Whether another normalizer can take the place of softmax."""


REGISTRY = Way(
    "models of transformers' attention registry",
    transformers.reading,
    transformers.RegistryActions,
    function="ALL_ATTENTION_FUNCTIONS",
)
SDPA = Way(
    "modules that call F.scaled_dot_product_attention",
    torch_functions.reading,
    torch_functions.FunctionActions,
    function="scaled_dot_product_attention",
)
TORCH = Way(
    "nn.MultiheadAttention",
    torch_functions.reading,
    torch_functions.MultiHeadActions,
    layers=(nn.MultiheadAttention,),
    normalizes=False,
)
OWN = Way("attemper.nn", package_functions.reading, Actions, layers=(OwnMultiheadAttention, CrossAttention))
BY_HAND = Way("attention that is softmaxed by hand", torch_functions.reading)
PACKAGES = Way("a compiled kernel of another package", package_functions.reading)

WAYS = (REGISTRY, SDPA, TORCH, OWN, BY_HAND, PACKAGES)
LAYERS = {layer: way for way in WAYS for layer in way.layers}
FUNCTIONS = {way.function: way for way in WAYS if way.function is not None}


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Reports every attention call of ``model`` in this thread to the current observers, whatever the way."""
    with ExitStack() as stack:
        for read in dict.fromkeys(way.read for way in WAYS):
            stack.enter_context(read(model))
        yield
