"""Gradients, tangents and batching of the attention operators: what autograd and ``torch.func`` ask of them.

``torch.library`` alone registers what plain autograd and compilers need. Transforms of functions nest only operators
that are an ``autograd.Function`` with rules for each of them, and forward mode needs its tangent there: calls under
either go by :class:`Attention`. docs/design/0009.

On its way through ``torch.library``, in Python, a call costs a few tenths of a millisecond, as much as attention over a
hundred tokens. Where nothing listens to it, a call of a backend that computes from addresses goes past the dispatcher;
results and gradients are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attemper.backends import table
from attemper.backends.contract import DIFFERENTIABLE, NAMES, Problem, Upstream
from attemper.call import batching, operator, transforms
from attemper.call import tangents as _tangents
from attemper.call.operator import COUNT, LIBRARY
from attemper.call.transforms import FUNCTORCH
from attemper.errors import BackendError
from attemper.statistics import ROWWISE_BASE, SOFTMAX_BASE

table.probe()


def attention(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """``operator.attention``, by the shortest way."""
    if not passes_dispatcher(problem):
        return attention_under_transforms(problem)
    tensors = problem.differentiable
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return Direct.apply(*problem.values())
    return operator.forward(problem)


def passes_dispatcher(problem: Problem) -> bool:
    """Whether a call may go past PyTorch's dispatcher: its backend computes from addresses, and nothing listens."""
    if not table.by_name(problem.backend).direct or problem.packed or not transforms.is_undisturbed():
        return False
    return transforms.stand_in_memory((*problem.differentiable, *problem.marks))


def attention_under_transforms(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    if transforms.active():
        return Attention.apply(*problem.values())
    return operator.attention(problem)


def gradients(problem: Problem, output: Tensor, state: Tensor, upstream: Upstream, needs: list[bool]) -> list[Tensor]:
    """The backward operator, as transforms can nest it."""
    return _backward(*problem.values(), output, state, *upstream, needs)


def _backward(*args: Any) -> list[Tensor]:
    if transforms.active():
        return list(AttentionBackward.apply(*args))  # pyright: ignore[reportArgumentType]
    return torch.ops.attemper.attention_backward(*args)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps what ``gradient`` needs: the problem's tensors, the output and the state."""
    named = dict(zip(NAMES, inputs, strict=True))
    ctx.names = [name for name, value in named.items() if isinstance(value, Tensor)]
    ctx.plain = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
    ctx.save_for_backward(*(named[name] for name in ctx.names), output[0], output[1])
    ctx.key_mass_shape = output[2].shape
    # A result that nobody differentiates gets None instead of zeros: see ``_backward_problem``.
    ctx.set_materialize_grads(False)


def gradient(
    ctx: Any,
    grad_output: Tensor,
    grad_state: Tensor,
    grad_key_mass: Tensor,
    run: Callable[..., list[Tensor]] = gradients,
) -> tuple[Any, ...]:
    """``run``: the backward operator, or the kernels themselves where a call goes past the dispatcher."""
    _refuse_batched(grad_output, grad_state, grad_key_mass)
    *tensors, output, state = ctx.saved_tensors
    whole = Problem(**dict(zip(ctx.names, tensors, strict=True)), **ctx.plain)
    needs = [bool(need) for need in ctx.needs_input_grad[: len(DIFFERENTIABLE)]]
    problem = _backward_problem(whole, grad_state is not None, grad_key_mass is not None)
    state = state[: len(problem.columns)]
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    if grad_state is None:
        grad_state = torch.zeros_like(state)
    if grad_key_mass is None:
        grad_key_mass = state.new_zeros(ctx.key_mass_shape if problem.key_mass else (0,))
    results = run(problem, output, state, Upstream(grad_output, grad_state, grad_key_mass), needs)
    grads = [
        result if need and tensor is not None else None
        for result, need, tensor in zip(results, needs, problem.differentiable, strict=True)
    ]
    return (*grads, *[None] * (COUNT - len(grads)))


def _backward_problem(problem: Problem, state: bool, key_mass: bool) -> Problem:
    """The call as the backward pass needs it: without the statistics, if no gradient came for the state or key_mass."""
    least = ROWWISE_BASE if problem.rowwise else SOFTMAX_BASE
    key_mass = key_mass or not problem.key_mass
    if state and key_mass:
        return problem
    changes: dict[str, Any] = {} if state else {"columns": least, "maximum_gradient": False}
    wanted = replace(problem, **changes, key_mass=problem.key_mass and key_mass)
    # Dropout is drawn tile by tile, and tiles that hold whole rows are cut otherwise.
    return problem if problem.dropout_p > 0 and problem.whole_rows != wanted.whole_rows else wanted


def _refuse_batched(*above: Tensor | None) -> None:
    """Autograd maps over these with an older mechanism than ``torch.vmap``, without rules for operators."""
    if torch.compiler.is_compiling():
        return
    if any(grad is not None and FUNCTORCH.is_legacy_batchedtensor(grad) for grad in above):
        raise BackendError(
            "attention has no batch of gradients in one backward pass (is_grads_batched=True, "
            "jacobian(vectorize=True)) on this backend. Use torch.func.jacrev or torch.vmap of torch.func.vjp, or "
            "backend='reference'."
        )


def _refuse_second_derivative(*_: Any) -> None:
    raise BackendError(
        "attention has no second derivative on this backend. Use backend='reference', which is dense and "
        "differentiates twice."
    )


torch.library.register_autograd("attemper::attention", gradient, setup_context=setup_context, lib=LIBRARY)
torch.library.register_autograd("attemper::attention_backward", _refuse_second_derivative, lib=LIBRARY)


def _tangents_of(results: Iterable[Tensor]) -> tuple[Tensor, ...]:
    found = (forward_ad.unpack_dual(result) for result in results)
    return tuple(torch.zeros_like(part.primal) if part.tangent is None else part.tangent for part in found)


class Direct(torch.autograd.Function):
    """The kernels themselves, with the gradient of the operator."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        results = operator.forward(Problem(*args))
        setup_context(ctx, args, results)
        return results

    @staticmethod
    def backward(ctx: Any, *above: Any) -> tuple[Any, ...]:
        # create_graph: the backward operator itself says that it has no derivative.
        alone = transforms.is_undisturbed() and transforms.stand_in_memory(above)
        direct = alone and not torch.is_grad_enabled()
        return gradient(ctx, *above, run=operator.backward if direct else gradients)


class Attention(torch.autograd.Function):
    """The operator with every rule that a transform asks for."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        output, state, key_mass = operator.attention(Problem(*args))
        return output.contiguous(), state, key_mass  # a tangent must lie in memory as what it belongs to

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        setup_context(ctx, inputs, output)
        ctx.save_for_forward(*(value for value in inputs if isinstance(value, Tensor)))

    @staticmethod
    def backward(ctx: Any, *above: Any) -> tuple[Any, ...]:
        return gradient(ctx, *above)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        # The saved tensors carry ``tangents`` themselves, once forward mode is on again.
        problem = Problem(**dict(zip(ctx.names, ctx.saved_tensors, strict=True)), **ctx.plain)
        with forward_ad._set_fwd_grad_enabled(True):
            return _tangents_of(_tangents.results(problem))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return batching.forward(attention_under_transforms, info.batch_size, in_dims, args)


class AttentionBackward(torch.autograd.Function):
    """The backward operator: batched, with a tangent, and not to be differentiated in reverse."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return tuple(torch.ops.attemper.attention_backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plain = [None if isinstance(value, Tensor) else value for value in inputs]
        ctx.save_for_forward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.places = [place for place, value in enumerate(inputs) if isinstance(value, Tensor)]

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        _refuse_second_derivative()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
        args = list(ctx.plain)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = tensor
        _, _, *above, needs = args[COUNT:]
        with forward_ad._set_fwd_grad_enabled(True):
            found = _tangents.gradients(Problem(*args[:COUNT]), tuple(above), needs)
            return _tangents_of(found)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        results, places = batching.backward(_backward, info.batch_size, in_dims, args)
        return tuple(results), tuple(places)


def _forward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return batching.forward(operator.attention, info.batch_size, in_dims, args)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    return batching.backward(torch.ops.attemper.attention_backward, info.batch_size, in_dims, args)


torch.library.register_vmap("attemper::attention", _forward_vmap, lib=LIBRARY)
torch.library.register_vmap("attemper::attention_backward", _backward_vmap, lib=LIBRARY)
