"""The attention operator without PyTorch's dispatcher, where nobody stands between the caller and the native kernels.

On its way through ``torch.library``, in Python, a call costs a few tenths of a millisecond, as much as attention over a
hundred tokens. Compilers, modes, transforms and tensor subclasses get the operator; results and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attemper.backends import table
from attemper.backends.contract import Problem
from attemper.backends.native.library import why_unusable
from attemper.backends.native.statistics import statistics as _native_statistics
from attemper.backends.native.sums import sums as _native_sums
from attemper.backends.sums import SUMMED
from attemper.call import autograd, operator
from attemper.statistics import Column

# Told to the table before the first call, so that "auto" never takes a library that cannot be loaded.
if (_reason := why_unusable()) is not None:
    table.UNUSABLE["native"] = _reason


def attention(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """``operator.attention``, by the shortest way."""
    if not table.named(problem.backend).direct or problem.packed or not _alone(problem):
        return autograd.attention(problem)
    tensors = problem.differentiable
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _Attention.apply(*problem.values())
    return operator.forward(problem)


class _Attention(torch.autograd.Function):
    """The operator's forward and gradient as they are registered."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        results = operator.forward(Problem(*args))
        autograd.setup_context(ctx, args, results)
        return results

    @staticmethod
    def backward(ctx: Any, *above: Any) -> tuple[Any, ...]:
        # create_graph: the backward operator itself says that it has no derivative.
        direct = not torch.is_grad_enabled() and _nobody_listens() and all(map(_stands_in_memory, above))
        return autograd.gradient(ctx, *above, run=operator.backward if direct else autograd.gradients)


def statistics(columns: tuple[Column, ...], state: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Statistics that follow from a state of the native kernels, [F, B, H, Q], by one pass instead of thirty operators:
    those of ``names`` that it computes. Empty where a gradient is wanted or somebody listens.
    """
    if state.requires_grad or not state.is_contiguous() or not (_nobody_listens() and type(state) is Tensor):
        return {}
    return _native_statistics(columns, state, names)


def sums(columns: tuple[Column, ...], state: Tensor, included: Tensor | None, first_tokens: int) -> Tensor | None:
    """The same rows as sums per head, [H, WIDTH] of ``backends/sums.py``; None where the state lacks a column."""
    if not (columns[: len(SUMMED)] == SUMMED and state.is_contiguous() and _nobody_listens() and type(state) is Tensor):
        return None
    return _native_sums(state.detach(), included, first_tokens)


def _alone(problem: Problem) -> bool:
    return _nobody_listens() and all(map(_stands_in_memory, problem.values()[:_TENSORS]))


def _stands_in_memory(tensor: Tensor | None) -> bool:
    """Whether a tensor's memory holds its numbers: it is no subclass, and has no sign (``conj().imag``) or zeros that
    are yet to be written. The dispatcher writes them.
    """
    return tensor is None or (type(tensor) in _PLAIN and not tensor.is_neg() and not tensor._is_zerotensor())


_PLAIN = (Tensor, torch.nn.Parameter)
_TENSORS = 9
"""The first arguments, as far as a call that is not packed has tensors there."""


def _nobody_listens() -> bool:
    """No compiler, tracer, mode (of functions or dispatch), transform of functions or forward differentiation."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None  # pyright: ignore[reportAttributeAccessIssue]
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )
