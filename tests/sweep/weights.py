"""An oracle for attention that knows no attention: products in which one operand is a distribution over what is summed.

Below the functions of torch, where attemper does not look, every product of matrices is looked at by its numbers. If
the rows of one operand are not negative and sum to 1 over the axis that is summed, and neither operand is a parameter,
then they are weights, whatever made them. What became of a product is followed up to the next layer with parameters:
whether it is a factor of another product, and whether two of them are subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import TorchDispatchMode

from attemper.sites.names import names_of

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.bmm: 0, _ATEN.mm: 0, _ATEN.baddbmm: 1, _ATEN.addmm: 1}
"""Products, and the place of their left operand."""
_COPIED = "clone _to_copy view _unsafe_view permute transpose t expand unsqueeze alias"
_COPIES = {getattr(_ATEN, name) for name in _COPIED.split()}
_SOFTMAX = (_ATEN._softmax, _ATEN._safe_softmax)
_MOST = 2**26
"""Numbers of an operand that are looked at, at most."""


@dataclass
class Map:
    """Weights [n, Q, K] that met values in the forward of a module."""

    module: str
    call: int
    """Which forward of that module, from 0."""
    weights: Tensor
    factor: bool = False
    """Whether they are a factor of a product of several weights."""
    subtracted: bool = False
    """Whether what they gave is subtracted from, or by, what other weights gave."""
    added: bool = False
    output: tuple[int, ...] = ()
    """Shape of what the module returned."""
    heads: tuple[int, ...] = ()
    """Numbers of heads that the module names; none where it names none."""

    def rows_of_output(self, heads: int) -> int:
        """Rows of what the module returned, each of all heads: it may return each head's own."""
        apart = len(self.output) == 4 and heads in self.output[1:3]
        return math.prod(self.output[:-1]) // (heads if apart else 1)

    def statistics(self, heads: int) -> Iterator[Tensor]:
        """Mean entropies in nats and mean largest weights, [2, heads], over rows that see a key.

        Once for every order in which heads may be folded.
        """
        weights = self.weights.double()
        rows = torch.stack((-torch.xlogy(weights, weights).sum(-1), weights.amax(-1)))
        some = weights.sum(-1) > 0.5
        # Added masks of the lowest number make a row that sees nothing uniform, to the last bit: it is no row.
        uneven = some & (weights.amax(-1) > weights.amin(-1))
        for seen in (some.double(), uneven.double()):
            for shape in _layouts(seen.shape[0], seen.shape[1], heads):
                here = seen.view(shape)
                yield (rows.view(2, *shape) * here).sum((1, 3)) / here.sum((0, 2))


def _layouts(count: int, queries: int, heads: int) -> Iterator[tuple[int, int, int]]:
    """Shapes of [count, queries] as [before, heads, behind]: heads may stand among windows, and beside queries."""
    for place in range(1, count // heads + 1):
        if count % (heads * place) == 0:
            yield place, heads, count // (heads * place) * queries
    if queries % heads == 0:
        yield count * queries // heads, heads, 1
        yield count, heads, queries // heads


def together(maps: list[Map]) -> Map:
    """The weights of several calls of a module as one map; their statistics are means over all of their rows."""
    alike = [one.weights for one in maps if one.weights.shape[1:] == maps[0].weights.shape[1:]]
    return replace(maps[0], weights=torch.cat(alike))


@dataclass
class Found:
    """What a forward pass held."""

    maps: list[Map] = field(default_factory=list)
    double: bool = True
    """Whether the pass ran in float64."""


class _Watcher(TorchDispatchMode):
    def __init__(self, model: nn.Module, found: Found) -> None:
        super().__init__()
        self.found = found
        self.names = names_of(model)
        self.parameters = {part.untyped_storage().data_ptr() for part in model.parameters() if part.numel()}
        self.running: list[tuple[nn.Module, int]] = []
        self.forwards: dict[nn.Module, int] = {}
        self._made: dict[int, tuple[ref[Tensor], frozenset[int]]] = {}
        """Tensors that were made of products of weights since the last layer with parameters: numbers of the maps."""
        self._soft: list[tuple[str, Tensor]] = []
        self._copies: dict[int, ref[Tensor]] = {}
        """Copies of parameters: einsum makes them, in another order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _SOFTMAX:
            self._soft = [*self._soft[-3:], (self._place()[0], result)]
        given = [part for part in _flat(args) if isinstance(part, Tensor)]
        marks = frozenset[int]().union(*map(self._marks, given))
        if packet in _PRODUCTS:
            left, right = args[_PRODUCTS[packet] :][:2]
            marks = self._product(left, right)
        elif packet is _ATEN.convolution or any(self._is_parameter(part) and part.dim() > 1 for part in given):
            marks = frozenset()
        if packet in (_ATEN.sub, _ATEN.add, _ATEN.add_) and len(given) == 2 and given[0].shape == given[1].shape:
            self._combined(packet, *map(self._marks, given))
        if packet in _COPIES and self._is_parameter(given[0]):
            self._copies[id(result)] = ref(result)
        if marks:
            for part in _flat(result if isinstance(result, (tuple, list)) else (result,)):
                if isinstance(part, Tensor):
                    self._made[id(part)] = ref(part), marks
        return result

    def _place(self) -> tuple[str, int]:
        for module, call in reversed(self.running):
            if module in self.names:
                return self.names[module] or type(module).__name__, call
        return "", 0

    def _marks(self, tensor: Tensor) -> frozenset[int]:
        found = self._made.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else frozenset()

    def _is_parameter(self, tensor: Tensor) -> bool:
        copy = self._copies.get(id(tensor))
        return tensor.untyped_storage().data_ptr() in self.parameters or (copy is not None and copy() is tensor)

    def _product(self, left: Tensor, right: Tensor) -> frozenset[int]:
        if self._is_parameter(left) or self._is_parameter(right):
            return frozenset()
        marks = self._marks(left) | self._marks(right)
        weights, partner = self._weights(left), right
        if weights is None:
            weights, partner = self._weights(right.mT), left
        if weights is None:
            for number in marks:  # a product of a product with values: of something else than weights
                self.found.maps[number].factor = True
            return marks
        name, call = self._place()
        made = Map(name, call, weights.detach().clone(), heads=_heads(self.running[-1][0]) if self.running else ())
        for number in self._marks(partner):
            other = self.found.maps[number]
            if (other.module, other.call) == (name, call):
                other.factor = made.factor = True
        self.found.maps.append(made)
        return frozenset((len(self.found.maps) - 1,))

    def _weights(self, operand: Tensor) -> Tensor | None:
        """The operand as weights [n, Q, K], if that is what its numbers are."""
        if not operand.is_floating_point() or operand.shape[-1] < 2 or not 0 < operand.numel() <= _MOST:
            return None
        grid = operand if operand.dim() == 3 else operand[None]
        if bool((grid < -1e-9).any()):
            return None
        sums = grid.sum(-1)
        whole, empty = (sums - 1).abs() < 1e-4, sums == 0
        if bool((whole | empty).all() & whole.any()):
            soft = any(name == self._place()[0] and part.numel() == grid.numel() for name, part in self._soft)
            # Without a softmax, rows of equal numbers are means over fixed places, and rows of a single 1 are choices.
            lowest = grid.masked_fill(grid == 0, math.inf).amin(-1)
            return grid if soft or bool(((grid.amax(-1) - lowest > 1e-6) & whole).any()) else None
        # Where a sink has taken its part, what is left is a softmax without its last column.
        for name, soft in self._soft:
            if name == self._place()[0] and soft.shape[-1] == grid.shape[-1] + 1:
                rest = soft[..., :-1].reshape(-1, soft.shape[-2], grid.shape[-1])
                if rest.shape == grid.shape and torch.equal(rest.to(grid.dtype), grid):
                    return grid / sums.unsqueeze(-1)
        return None

    def _combined(self, packet: Any, one: frozenset[int], two: frozenset[int]) -> None:
        if not one or not two:
            return
        places = {(self.found.maps[number].module, self.found.maps[number].call) for number in one | two}
        if len(places) == 1:
            for number in one | two:
                self.found.maps[number].subtracted |= packet is _ATEN.sub
                self.found.maps[number].added |= packet is not _ATEN.sub

    def enter(self, module: nn.Module, _: Any) -> None:
        self.forwards[module] = self.forwards.get(module, -1) + 1
        self.running.append((module, self.forwards[module]))

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        if self.running and self.running[-1][0] is module:
            call = self.running.pop()[1]
            name = self.names.get(module)
            first = next((part for part in _flat((output,)) if isinstance(part, Tensor)), None)
            if name is None or first is None or not first.dim():
                return
            for made in self.found.maps:
                if (made.module, made.call) == (name or type(module).__name__, call):
                    made.output = tuple(first.shape)


def _heads(module: nn.Module) -> tuple[int, ...]:
    names = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_attn_heads")
    return tuple(value for name in names if isinstance(value := getattr(module, name, None), int) and value > 0)


def _flat(given: Any) -> Iterator[Any]:
    for part in given:
        if isinstance(part, (tuple, list)):
            yield from _flat(part)
        elif isinstance(part, dict):
            yield from _flat(part.values())
        else:
            yield part


@contextmanager
def weights_of(model: nn.Module) -> Iterator[Found]:
    """Collects the weights of every forward pass inside. SDPA and nn.MultiheadAttention run step by step."""
    found = Found()
    watcher = _Watcher(model, found)
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        stack.callback(every_module.register_module_forward_pre_hook(watcher.enter).remove)
        stack.callback(every_module.register_module_forward_hook(watcher.leave, always_call=True).remove)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.no_grad())
        stack.enter_context(watcher)
        yield found
