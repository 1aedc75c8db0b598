"""Axes of tensors: those of the operands of a product, and those that are features, followed through a forward pass.

Attention weighs tokens. By their shapes, XCiT's softmax over channels and a router's over experts look like attention;
where their axes come from tells them apart. Linear layers and convolutions mark the axis they make. Marks go through
views, through functions that keep the shape, and through products. What is not followed is unknown, and no axis of it
counts as features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Axes = frozenset[int]


def functions(*names: str) -> set[Any]:
    return {getattr(home, name) for home in (torch, Tensor) for name in names if hasattr(home, name)}


RESHAPES = functions("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel")
"""Functions whose result follows from the old and the new shape."""
VIEWS = {
    *functions("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint", "unsqueeze"),
    *functions("squeeze", "expand", "expand_as", "unbind", "chunk", "split", "tensor_split", "narrow", "select"),
    *attrgetter("__getitem__", "T.__get__", "mT.__get__", "H.__get__", "mH.__get__")(Tensor),
}
"""Functions that give views of their first argument, one or several."""
PRODUCTS = functions("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "true_divide", "divide")
"""Functions that multiply or divide element by element, into a new tensor."""
CONVERSIONS = attrgetter("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "cuda", "cpu")(
    Tensor
)
"""Functions that give the same numbers in another type, place or layout."""
LAYERS = {F.linear: 1, F.conv1d: 2, F.conv2d: 3, F.conv3d: 4, torch.conv1d: 2, torch.conv2d: 3, torch.conv3d: 4}
"""Layers, and which axis of their result is features, counted from the last."""


class FunctionCall(NamedTuple):
    """A torch function that has run, as a function mode sees it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def first(self) -> Any:
        """The first argument, by place or as ``input``."""
        return self.args[0] if self.args else self.kwargs.get("input")

    def options(self) -> dict[str, Any]:
        """Arguments by keyword without the first one."""
        return {name: given for name, given in self.kwargs.items() if name != "input"}

    def tensors(self) -> Iterator[Tensor]:
        """Tensors among the arguments, and in tuples and lists among them."""
        for given in (*self.args, *self.kwargs.values()):
            if isinstance(given, Tensor):
                yield given
            elif isinstance(given, (tuple, list)):
                yield from (part for part in given if isinstance(part, Tensor))


Note = TypeVar("Note")


class Notes(Generic[Note]):
    """What is noted of tensors, each by itself and not by its numbers, and only as long as it lives.

    A mode asks at every function of a sampled step: this takes a fifth of the time of torch's WeakTensorKeyDictionary.
    The price is that the note of a tensor that is gone stays until another has its place, so notes must be small.
    """

    def __init__(self) -> None:
        self._notes: dict[int, tuple[ref[Tensor], Note]] = {}

    def __bool__(self) -> bool:
        return bool(self._notes)

    def __setitem__(self, tensor: Tensor, note: Note) -> None:
        self._notes[id(tensor)] = ref(tensor), note

    def get(self, tensor: Tensor) -> Note | None:
        found = self._notes.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


@dataclass(frozen=True)
class Features:
    """Which axes of a tensor are features."""

    axes: Axes
    direct: bool
    """Whether it is a layer's own output, with no product of activations since."""


class FeatureAxes:
    """The features among the axes of every tensor that a forward pass has made from a layer's output."""

    def __init__(self) -> None:
        self._known: Notes[Features] = Notes()

    def of(self, tensor: Tensor) -> Features:
        found = self._known.get(tensor)
        return _UNKNOWN if found is None else found

    def follow(self, call: FunctionCall) -> None:
        """Notes the features of what a function has made."""
        result = call.result
        if isinstance(result, Tensor):
            made = _output_features(call) or self._derive(call)
            if made is not None:
                self._known[result] = made
        elif self._known and call.func in VIEWS and isinstance(result, (tuple, list)):
            known = self._known.get(call.args[0]) if call.args and isinstance(call.args[0], Tensor) else None
            if known is not None:
                for part, axes in zip(result, marked_axes(call, known.axes), strict=True):
                    self._known[part] = Features(axes, known.direct)

    def _derive(self, call: FunctionCall) -> Features | None:
        found = product(call)
        if found is not None:
            return self._of_product(found)
        if not self._known:
            return None
        first = call.first()
        known = self._known.get(first) if isinstance(first, Tensor) else None
        if call.func in RESHAPES or call.func in VIEWS:
            return known and Features(marked_axes(call, known.axes)[0], known.direct)
        tensors = [part for part in call.args[:2] if isinstance(part, Tensor)]
        marked = [(part, known) for part in tensors if (known := self._known.get(part)) is not None]
        shape = call.result.shape if marked else None
        parts = [known for part, known in marked if part.shape == shape]
        if len(parts) < 2:
            return parts[0] if parts else None
        axes = frozenset.intersection(*(part.axes for part in parts))
        return Features(axes, all(part.direct for part in parts))

    def _of_product(self, found: Product) -> Features:
        """Free axes keep what they were; ``x @ weight`` is a linear layer."""
        letters = [
            letter
            for operand, names in zip(found.operands, found.names, strict=True)
            for axis, letter in enumerate(names)
            if axis in self.of(operand).axes
        ]
        made: set[str] = set()
        if len(found.operands) > 1 and is_weight(found.operands[-1]):
            made = set(found.names[-1]).difference(*found.names[:-1]) & set(found.out)
        axes = frozenset(axis for axis, letter in enumerate(found.out) if letter in made or letter in letters)
        return Features(axes, bool(made))


_UNKNOWN = Features(frozenset(), False)


def is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _output_features(call: FunctionCall) -> Features | None:
    """The features of a layer's own output."""
    place = LAYERS.get(call.func)
    if place is not None:
        return Features(frozenset((call.result.dim() - place,)), True)
    if call.func in _ADDMM and len(call.args) > 2 and is_weight(call.args[2]):
        return Features(frozenset((1,)), True)
    return None


def marked_axes(call: FunctionCall, marked: Axes) -> list[Axes]:
    """Marked axes of the first argument as axes of each result of one of ``RESHAPES`` or ``VIEWS``."""
    func, args, _, result = call
    first: Tensor = call.first()
    if func in RESHAPES:
        return [axes_after_reshape(first.shape, result.shape, marked)]
    if func is Tensor.__getitem__ and not _is_basic(args[1]):
        return [frozenset()]
    options = tuple(call.options().items())
    if func is Tensor.expand_as:
        rest = tuple(part.to("meta") if isinstance(part, Tensor) else part for part in args[1:])
        return _axes_of_views(func, first.shape, marked, rest, options)
    try:
        return _known_axes_of_views(func, first.shape, marked, args[1:], options)
    except TypeError:  # lists and slices have no hash
        return _axes_of_views(func, first.shape, marked, args[1:], options)


def _axes_of_views(
    func: Any, shape: Sequence[int], marked: Axes, rest: tuple[Any, ...], options: tuple[tuple[str, Any], ...]
) -> list[Axes]:
    """Marked axes are those that move in memory: every view keeps that, whatever its arguments mean."""
    shadow = torch.empty_strided(shape, [int(axis in marked) for axis in range(len(shape))], device="meta")
    views = func(shadow, *rest, **dict(options))
    each = [views] if isinstance(views, Tensor) else views
    return [frozenset(axis for axis in range(one.dim()) if one.stride(axis) and one.shape[axis] > 1) for one in each]


_known_axes_of_views = lru_cache(maxsize=1024)(_axes_of_views)


def _is_basic(index: Any) -> bool:
    """Whether an index gives a view, not a copy."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or isinstance(part, slice) or type(part) is int for part in parts)


@lru_cache(maxsize=1024)
def axes_after_reshape(before: Sequence[int], after: Sequence[int], marked: Axes) -> Axes:
    """Axes of the shape ``after`` that are made of marked axes of ``before`` only, where one is the other reshaped."""
    if 0 in before or 0 in after:
        return frozenset()
    old = [axis for axis, size in enumerate(before) if size > 1]
    new = [axis for axis, size in enumerate(after) if size > 1]
    found: set[int] = set()
    while old and new:
        sources, targets = [old.pop(0)], [new.pop(0)]
        have, want = before[sources[0]], after[targets[0]]
        while have != want:
            if have < want and old:
                sources.append(old.pop(0))
                have *= before[sources[-1]]
            elif have > want and new:
                targets.append(new.pop(0))
                want *= after[targets[-1]]
            else:
                return frozenset()  # another number of elements: a view as another type
        if all(axis in marked for axis in sources):
            found.update(targets)
    return frozenset(found)


@dataclass(frozen=True)
class Product:
    """A product of tensors: the sum over every named axis that is not in ``out``."""

    operands: tuple[Tensor, ...]
    names: tuple[tuple[str, ...], ...]
    """Of each operand's axes."""
    out: tuple[str, ...]


_MATMUL = functions("matmul", "__matmul__", "bmm", "mm", "mv")
_ADDMM = functions("addmm")
_ADDED = functions("baddbmm") | _ADDMM
"""Products to which their first argument is added."""
MATRIX_PRODUCTS = frozenset((*_MATMUL, *_ADDED, torch.einsum, Tensor.__rmatmul__))


def product(call: FunctionCall) -> Product | None:
    """The product that a call computes; None if it is none, or one that is not understood."""
    func, args, kwargs, _ = call
    if func not in MATRIX_PRODUCTS:
        return None
    if func is torch.einsum:
        return _einsum(args)
    if func in _MATMUL:
        given = (*args, *(kwargs[name] for name in ("input", "other", "mat2", "vec") if name in kwargs))
    elif func is Tensor.__rmatmul__:
        given = (args[1], args[0])
    else:
        given = (*args[1:], *(kwargs[name] for name in ("batch1", "batch2", "mat1", "mat2") if name in kwargs))
    left, right = given[:2]
    return _matmul(left, right) if isinstance(left, Tensor) and isinstance(right, Tensor) else None


def _matmul(left: Tensor, right: Tensor) -> Product:
    """Leading axes are named from the right, as they broadcast."""
    rows = () if left.dim() == 1 else ("row",)
    columns = () if right.dim() == 1 else ("column",)
    leading = [tuple(f"batch{place}" for place in range(part.dim() - 2, 0, -1)) for part in (left, right)]
    out = max(leading, key=len) + rows + columns
    return Product((left, right), (leading[0] + rows + ("sum",), leading[1] + ("sum",) + columns), out)


def _einsum(args: tuple[Any, ...]) -> Product | None:
    equation = args[0]
    if not isinstance(equation, str):
        return None
    operands = tuple(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    names = tuple(_subscripts(part, operand.dim()) for part, operand in zip(inputs.split(","), operands, strict=True))
    if arrow:
        ellipses = (sum(name.startswith(".") for name in part) for part in names)
        left = _subscripts(out, max(ellipses) + len(out.replace("...", "")))
    else:
        every = [letter for part in names for letter in part]
        left = tuple(sorted(letter for letter in set(every) if every.count(letter) == 1 or letter.startswith(".")))
    return Product(operands, names, left)


def _subscripts(part: str, dimensions: int) -> tuple[str, ...]:
    """Subscripts with a name for each axis that an ellipsis stands for, counted from the right."""
    if "..." not in part:
        return tuple(part)
    before, after = part.split("...")
    hidden = dimensions - len(before) - len(after)
    return (*before, *(f".{place}" for place in range(hidden, 0, -1)), *after)
