"""Products of tensors read as one thing: operands, a name for each of their axes, and the axes that are left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Product:
    """A sum of products over every name that is not in ``out``."""

    operands: tuple[Tensor, ...]
    names: tuple[tuple[str, ...], ...]
    """Of each operand's axes."""
    out: tuple[str, ...]


_MATMUL = {
    torch.matmul, torch.bmm, torch.mm, torch.mv, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm, Tensor.mv,
}  # fmt: skip
_ADDED = {torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm}
"""Products to which their first argument is added."""


def product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Product | None:
    """The product that a call computes; None if it is none, or one that is not understood."""
    if func is torch.einsum:
        return _einsum(args)
    if func in _MATMUL:
        given = (*args, *(kwargs[name] for name in ("input", "other", "mat2", "vec") if name in kwargs))
    elif func is Tensor.__rmatmul__:
        given = (args[1], args[0])
    elif func in _ADDED:
        given = (*args[1:], *(kwargs[name] for name in ("batch1", "batch2", "mat1", "mat2") if name in kwargs))
    else:
        return None
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
    names = tuple(_spelled(part, operand.dim()) for part, operand in zip(inputs.split(","), operands, strict=True))
    if arrow:
        left = _spelled(out, max(_count(name) for name in names) + len(out.replace("...", "")))
    else:
        every = [letter for part in names for letter in part]
        left = tuple(sorted(letter for letter in set(every) if every.count(letter) == 1 or letter.startswith(".")))
    return Product(operands, names, left)


def _count(names: tuple[str, ...]) -> int:
    return sum(name.startswith(".") for name in names)


def _spelled(part: str, dimensions: int) -> tuple[str, ...]:
    """Subscripts with a name for each axis that an ellipsis stands for, counted from the right."""
    if "..." not in part:
        return tuple(part)
    before, after = part.split("...")
    hidden = dimensions - len(before) - len(after)
    return (*before, *(f".{place}" for place in range(hidden, 0, -1)), *after)
