"""Which transforms of ``torch.func`` and which forward-mode differentiation are at work while this is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def active() -> bool:
    """Whether an operator must be one that transforms can nest: under ``torch.func``, or in forward mode.

    Never inside a compiler, which has its own way with operators.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or _innermost() is not None


def forward_mode() -> bool:
    """Whether tensors may carry tangents (``torch.func.jvp``, ``jacfwd``, ``forward_ad``): asked in eager code only."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def second_derivative() -> bool:
    """Whether a gradient is taken of a gradient, as by ``torch.func.jacrev(torch.func.jacrev(f))``. That of a plain
    ``create_graph=True`` cannot be told beforehand.
    """
    if torch.compiler.is_compiling() or _innermost() is None:
        return False
    functorch: Any = torch._C._functorch
    return sum(interpreter.key().name == "Grad" for interpreter in functorch.get_interpreter_stack()) > 1


def mapped(tensor: Tensor | None, place: int | None, size: int) -> Tensor | None:
    """``tensor`` with the dimension that ``torch.vmap`` maps over in front; ``place``: where it was, None for shared."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if place is None else tensor.movedim(place, 0)


def all_mapped(info: Any, in_dims: Sequence[int | None], *tensors: Any) -> list[Any]:
    """``mapped`` of each, as the ``vmap`` rule of an operator or an ``autograd.Function`` is given them."""
    return [mapped(tensor, place, info.batch_size) for tensor, place in zip(tensors, in_dims, strict=False)]


def _innermost() -> Any:
    return torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
