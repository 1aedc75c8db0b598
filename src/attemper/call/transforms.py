"""Which transforms of ``torch.func`` and which forward-mode differentiation are at work while this is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attemper.call.compiling import constant_in_graphs
from attemper.errors import BackendError

FUNCTORCH: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
"""What ``torch.func`` stands on."""


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
    return not torch.compiler.is_compiling() and _innermost() is not None and _kinds().count("Grad") > 1


def derivative_in_graph() -> bool:
    """Whether a compiler traces what ``torch.func`` or forward mode differentiates: its graphs know no rule of ours."""
    return torch.compiler.is_compiling() and _differentiated()


def refuse_in_graph(where: str) -> None:
    """Raises where a graph would hold an operator of ours without its derivative.

    Raises:
        BackendError: :func:`derivative_in_graph`. Where graphs may break, the compiler runs the function as written.
    """
    if derivative_in_graph():
        raise BackendError(
            f"{where} cannot be differentiated by torch.func, or in forward mode, inside of one compiled graph. Leave "
            "out fullgraph=True, or differentiate what torch.compile gave."
        )


@constant_in_graphs
def _differentiated() -> bool:
    """Asked while a graph is traced, which is made anew when transforms change."""
    return forward_ad._current_level >= 0 or any(kind in ("Grad", "Jvp") for kind in _kinds())


def _kinds() -> list[str]:
    """The transforms at work, the outermost first: "Grad", "Jvp", "Vmap" and others."""
    return [interpreter.key().name for interpreter in FUNCTORCH.get_interpreter_stack() or ()]


def is_mapped(tensor: Tensor) -> bool:
    """Whether ``torch.vmap`` maps over ``tensor``, at any level: its numbers cannot be read."""
    while FUNCTORCH.is_functorch_wrapped_tensor(tensor):
        if FUNCTORCH.is_batchedtensor(tensor):
            return True
        tensor = FUNCTORCH.get_unwrapped(tensor)
    return False


def mapped(tensor: Tensor | None, place: int | None, size: int) -> Tensor | None:
    """``tensor`` with the dimension that ``torch.vmap`` maps over in front. ``place``: where it is, None for shared."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if place is None else tensor.movedim(place, 0)


def all_mapped(info: Any, in_dims: Sequence[int | None], *tensors: Any) -> list[Any]:
    """``mapped`` of each, as the ``vmap`` rule of an operator or an ``autograd.Function`` is given them."""
    return [mapped(tensor, place, info.batch_size) for tensor, place in zip(tensors, in_dims, strict=False)]


def _innermost() -> Any:
    return FUNCTORCH.peek_interpreter_stack()
