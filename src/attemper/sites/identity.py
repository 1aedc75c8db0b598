"""Whether a tap and an attention that is seen otherwise are one: whether they read the same queries and keys.

Two tensors hold the same queries if they are the same memory, or copies of the same memory: in another type or layout,
or times a factor that all features share. Memory is known by weak references to storages, so no tensor is kept alive,
and no address is mistaken for another's after it was freed.

It also tells what becomes of the outputs of attention, up to the next layer: two that are subtracted are no map for
each head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from attemper.sites.tensor_axes import (
    CONVERSIONS,
    LAYERS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    RESHAPES,
    FunctionCall,
    Notes,
    functions,
    is_weight,
    product,
)

FACTOR = "its softmaxes are multiplied with each other (landmarks): none of them alone is attention over tokens"
DIFFERENCE = "what its softmaxes give is subtracted (differential attention): weights of a head are no distribution"
_SUBTRACTIONS = functions("sub", "__sub__", "__rsub__", "rsub", "subtract", "sub_", "subtract_", "__isub__")

_COPIES = RESHAPES | {*CONVERSIONS, *functions("clone", "clamp", "repeat_interleave")}
"""Functions whose result holds what their first argument holds, in memory of its own."""
_JOINED = functions("cat", "concat", "concatenate")
"""Functions by which keys join those of a cache, which may be empty."""
_NOTED = _COPIES | _JOINED | PRODUCTS | MATRIX_PRODUCTS
"""Functions of which something is noted also where there are no scores yet."""


@dataclass(frozen=True)
class Place:
    """Where in memory a tensor begins. As long as a place is held, no other memory can be mistaken for it."""

    storage: StorageWeakRef
    offset: int


Places = frozenset[Place]


class Lineage:
    """Which memory of a forward pass is made of outputs of attention, and of which modules."""

    def __init__(self) -> None:
        self._made: dict[StorageWeakRef | None, frozenset[nn.Module]] = {}

    def mark(self, output: Any, module: nn.Module) -> None:
        """Notes what an attention of ``module`` gave."""
        self._made[_memory_of(output)] = frozenset((module,))
        self._made.pop(None, None)

    def follow(self, call: FunctionCall) -> frozenset[nn.Module]:
        """Notes what a function has made of outputs. Returns the modules whose outputs it subtracts."""
        given = [part for part in call.tensors() if part.is_floating_point()] if self._made else []
        made = [self._made.get(_memory_of(part), frozenset[nn.Module]()) for part in given]
        found = product(call) if any(made) else None
        if not any(made) or call.func in LAYERS or (found and any(map(is_weight, found.operands))):
            return frozenset()
        every = frozenset[nn.Module]().union(*made)
        for part in call.result if isinstance(call.result, (tuple, list)) else (call.result,):
            self._made.setdefault(_memory_of(part), every)
        self._made.pop(None, None)
        alike = len(given) == 2 and given[0].shape == given[1].shape and all(made)
        return every if alike and call.func in _SUBTRACTIONS else frozenset()


class Origins:
    """Where the tensors of a forward pass come from, as far as it tells which queries and keys an attention reads."""

    def __init__(self) -> None:
        self._copies: dict[StorageWeakRef, Place] = {}
        """Memory -> that of which it is a copy."""
        self._scores: Notes[Places] = Notes()
        """Scores -> places of the operands of the product that made them."""
        self.lineage = Lineage()

    def of_scores(self, scores: Any) -> Places:
        """Places of the queries and keys whose product these scores follow from; none where that is not known."""
        return self._scores.get(scores) or frozenset() if isinstance(scores, Tensor) else frozenset()

    def original(self, place: Place) -> Place:
        """The place that this one is a copy of, or itself."""
        return self._copies.get(place.storage, place)

    def follow(self, call: FunctionCall) -> None:
        """Notes where the result of a function comes from."""
        result, func = call.result, call.func
        if not (self._scores or func in _NOTED) or not isinstance(result, Tensor) or not result.is_floating_point():
            return
        found = product(call)
        if found is not None:
            self._scores[result] = places(found.operands)
            return
        if func in _COPIES or func in PRODUCTS:
            self._note_copy([part for part in call.args if isinstance(part, Tensor) and not _is_factor(part)], result)
        elif func in _JOINED:
            self._note_copy([part for part in call._replace(kwargs={}).tensors() if part.numel()], result)
        self._pass_on(call)

    def _note_copy(self, tensors: list[Tensor], result: Tensor) -> None:
        if len(tensors) != 1 or tensors[0] is result or tensors[0] is result._base:
            return
        before, after = place(tensors[0]), _memory(result)
        if before is not None and after is not None and before.storage != after.storage:
            self._copies.setdefault(after.storage, before)

    def _pass_on(self, call: FunctionCall) -> None:
        """Scores stay scores of their product through masks, factors, views and all that makes no fewer of them."""
        if not self._scores:
            return
        for part in call.tensors():
            known = self._scores.get(part)
            if known is not None and call.result.numel() >= part.numel():
                self._scores[call.result] = known
                return


_current: ContextVar[Origins | None] = ContextVar("attemper_origins", default=None)


@contextmanager
def following(origins: Origins) -> Iterator[None]:
    """Lets ``origins`` tell what is a copy of what, in this thread, until the end."""
    _current.set(origins)
    try:
        yield
    finally:
        _current.set(None)


def note_output(output: Any, module: nn.Module) -> None:
    """Notes what an attention of ``module`` gave, where this thread's tensors are followed."""
    origins = _current.get()
    if origins is not None:
        origins.lineage.mark(output, module)


def place(tensor: Tensor) -> Place | None:
    """The place of a tensor, or of what it is a copy of; None where its memory is not known."""
    own, origins = _memory(tensor), _current.get()
    return own if own is None or origins is None else origins.original(own)


def places(given: Iterable[Any]) -> Places:
    """The places of all tensors of numbers among ``given``."""
    parts = (part for part in given if isinstance(part, Tensor) and part.is_floating_point())
    return frozenset(found for part in parts if (found := place(part)) is not None)


def _memory_of(tensor: Any) -> StorageWeakRef | None:
    """The memory of a tensor, of a DTensor what this process holds; None where it is not known."""
    try:
        return StorageWeakRef(getattr(tensor, "_local_tensor", tensor).untyped_storage())
    except (AttributeError, RuntimeError, NotImplementedError):  # no tensor, inside torch.func, or without memory
        return None


def _memory(tensor: Tensor) -> Place | None:
    memory, part = _memory_of(tensor), getattr(tensor, "_local_tensor", tensor)
    return None if memory is None else Place(memory, int(part.storage_offset()) * part.element_size())


def _is_factor(tensor: Tensor) -> bool:
    return tensor.dim() == 0 or tensor.shape[-1] == 1


@dataclass(frozen=True)
class Sketch:
    """Means over tokens of queries and keys: enough to tell whether two pairs are the same up to rounding."""

    shape: tuple[int, ...]
    """[B, H, Q, D] of the queries."""
    query: Tensor
    """[B, H, D] float32."""
    key: Tensor
    """[B, G, D] float32."""

    def is_of(self, other: Sketch) -> bool:
        """Whether both are of the same queries and keys. Waits for the device."""
        if self.shape != other.shape or self.key.shape != other.key.shape:
            return False
        pairs = ((self.query, other.query), (self.key, other.key))
        return all(bool(((one - two).abs().amax() <= 0.01 * two.abs().amax()).cpu()) for one, two in pairs)


def sketch(query: Tensor, key: Tensor) -> Sketch:
    """The sketch of queries [B, H, Q, D] and keys [B, G, K, D]."""
    parts = (part.detach().float().mean(2) for part in (query, key))
    return Sketch(tuple(query.shape), *parts)


def partners(taps: Sequence[tuple[int, Places]], calls: Sequence[tuple[int, Places]]) -> dict[int, int]:
    """Which call each tap stands beside: number of the tap -> number of the call, where it reads the same.

    Both are (number in the order of the pass, places). Where several calls read the same queries and keys, a tap
    takes the first after it that no other has, else the last before it.
    """
    found: dict[int, int] = {}
    for number, own in taps:
        free = [other for other, theirs in calls if own and own <= theirs and other not in found.values()]
        after = [other for other in free if other > number]
        if free:
            found[number] = after[0] if after else free[-1]
    return found
