"""What is at work around a call: transforms of ``torch.func``, forward-mode differentiation, compilers, modes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attemper.errors import BackendError

FUNCTORCH: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
"""What ``torch.func`` stands on."""
_EXPORTERS = frozenset(("torch.onnx._internal.exporter._flags", "torch.onnx._internal.torchscript_exporter._globals"))
"""Loaded while anything is exported. Asking torch loads them, which costs seconds that no other call should pay."""
SOFTMAX_INSTEAD = "For ONNX use softmax, with a temperature."
"""What a function of scores can be replaced by."""
P = ParamSpec("P")
R = TypeVar("R")


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that a compiler asks once, while it traces, and whose answer it keeps in the graph.

    PyTorch's own decorator, ``torch.compiler.assume_constant_result``, imports the whole compiler for this one
    attribute: more than a second of the first call, also where nothing is compiled.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def is_undisturbed() -> bool:
    """Whether nothing listens to what is computed: no compiler, tracer, mode (of functions or dispatch), transform of
    functions or forward differentiation.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and _innermost() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def stand_in_memory(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the memory of each tensor holds its numbers: it is no subclass, and has no sign (``conj().imag``) or
    zeros that are yet to be written. The dispatcher writes them.
    """
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_neg() or tensor._is_zerotensor()):
            return False
    return True


_PLAIN = (Tensor, torch.nn.Parameter)


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
    return torch.compiler.is_compiling() and _is_differentiated()


def refuse_in_graph(where: str) -> None:
    """Raises where a graph would hold an operator of ours without its derivative. ``BackendError``:
    :func:`derivative_in_graph`. Where graphs may break, the compiler runs the function as written.
    """
    if derivative_in_graph():
        raise BackendError(
            f"{where} cannot be differentiated by torch.func, or in forward mode, inside of one compiled graph. Leave "
            "out fullgraph=True, or differentiate what torch.compile gave."
        )


@constant_in_graphs
def _is_differentiated() -> bool:
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


def to_front(tensor: Tensor | None, place: int | None, size: int) -> Tensor | None:
    """``tensor`` with the dimension that ``torch.vmap`` maps over in front. ``place``: where it is, None for shared."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if place is None else tensor.movedim(place, 0)


def all_to_front(info: Any, in_dims: Sequence[int | None], *tensors: Any) -> list[Any]:
    """``to_front`` of each, as the ``vmap`` rule of an operator or an ``autograd.Function`` is given them."""
    return [to_front(tensor, place, info.batch_size) for tensor, place in zip(tensors, in_dims, strict=False)]


def nestable(
    kernel: Callable[..., Tensor],
    remember: Callable[..., None],
    gradient: Callable[..., Any],
    tangent: Callable[..., Tensor],
    vmap_rule: Callable[..., Any],
) -> Callable[..., Any]:
    """An operator of one result as transforms nest it: what ``torch.library.register_autograd`` gives does not.

    ``remember`` sets up the context and ``gradient`` reads it, both as registered there; ``tangent`` is made of the
    context and the arguments' tangents, None where one has none; ``vmap_rule`` is that of an ``autograd.Function``.
    """

    class Nestable(torch.autograd.Function):
        backward, vmap = staticmethod(gradient), staticmethod(vmap_rule)

        @staticmethod
        def forward(*args: Any) -> Tensor:
            return kernel(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            remember(ctx, inputs, output)
            ctx.save_for_forward(*ctx.to_save)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Tensor:
            with forward_ad._set_fwd_grad_enabled(True):  # for derivatives around this one
                return forward_ad.unpack_dual(tangent(ctx, *tangents)).primal

    return Nestable.apply


def _innermost() -> Any:
    return FUNCTORCH.peek_interpreter_stack()


@constant_in_graphs
def exports_to_onnx() -> bool:
    """Whether ``torch.onnx.export`` is tracing."""
    # Of the modules' view: a set asked about a dict goes through all of it, thousands of names at every call.
    return not sys.modules.keys().isdisjoint(_EXPORTERS) and torch.onnx.is_in_onnx_export()


def refuse_onnx(what: str, instead: str) -> None:
    if exports_to_onnx():
        raise BackendError(
            f"{what} cannot be exported to ONNX: it is an operator of attemper, which ONNX has no form of. "
            f"torch.export.export(...) takes it. {instead}"
        )
