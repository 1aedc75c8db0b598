"""``torch.vmap`` of the attention operators: the mapped dimension becomes more of the batch.

What all of a batch shares has no place for it there: a sink, a seed, offsets of documents, positions of rows. Calls
that map one of these, or need its gradient for each sample, run sample by sample, and so do packed ones and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attemper.backends.contract import DIFFERENTIABLE, NAMES, Problem
from attemper.call.operator import COUNT
from attemper.call.partial_call import AXES, SHARED
from attemper.call.transforms import to_front

_WITH_BATCH = tuple(name for name, axes in AXES.items() if axes[0] == "sequence")
_PER_HEAD = ("sink", "per_head")
"""Differentiable, and the same for a whole batch."""

Places = Sequence[Any]
"""For each argument, the dimension that is mapped over; None for an argument that all samples share."""


def forward(run: Callable[[Problem], tuple[Tensor, ...]], size: int, in_dims: Places, args: Sequence[Any]) -> Any:
    """Results of ``attemper::attention`` for ``size`` samples, and where their dimension is, by calls of ``run``."""
    if not _joins_batch(args, in_dims):
        found = [run(Problem(*sample)) for sample in _samples(size, in_dims, args)]
        return tuple(torch.stack(each) for each in zip(*found, strict=True)), (0, 0, 0)
    batch = _sizes(args, in_dims)
    output, state, key_mass = run(_fold(size, in_dims, args, frozenset()))
    has_mass = Problem(*args).key_mass
    results = (
        output.unflatten(0, (size, batch)),
        state.unflatten(1, (size, batch)),
        key_mass.unflatten(0, (size, batch)) if has_mass else key_mass,
    )
    return results, (0, 1, 0 if has_mass else None)


def backward(run: Callable[..., Sequence[Tensor]], size: int, in_dims: Places, args: Sequence[Any]) -> Any:
    """The same of ``attemper::attention_backward``; every sample has gradients of its own."""
    needs = args[-1]
    own = frozenset(name for name, need in zip(DIFFERENTIABLE, needs, strict=True) if need)
    if not own.isdisjoint(_PER_HEAD) or not _joins_batch(args[:COUNT], in_dims[:COUNT]):
        found = [run(*sample) for sample in _samples(size, in_dims, args)]
        return [torch.stack(each) for each in zip(*found, strict=True)], [0] * len(DIFFERENTIABLE)
    batch = _sizes(args, in_dims)
    call = _fold(size, in_dims[:COUNT], args[:COUNT], own)
    output, state, grad_output, grad_state, grad_mass = (
        to_front(tensor, place, size) for tensor, place in zip(args[COUNT:-1], in_dims[COUNT:-1], strict=True)
    )
    assert grad_mass is not None
    above = (
        _to_batch(output, 1),
        _to_batch(state, 2),
        _to_batch(grad_output, 1),
        _to_batch(grad_state, 2),
        _to_batch(grad_mass, 1) if call.key_mass else grad_mass[0],
    )
    grads = run(*call.values(), *above, needs)
    results = [
        _unfold(grad, size, batch, args[number], in_dims[number]) if need else grad
        for number, (grad, need) in enumerate(zip(grads, needs, strict=True))
    ]
    return results, [0 if need and args[number] is not None else None for number, need in enumerate(needs)]


def _joins_batch(args: Sequence[Any], in_dims: Places) -> bool:
    call = dict(zip(NAMES, zip(args, in_dims, strict=True), strict=True))
    if call["cu_seqlens_q"][0] is not None or call["dropout_p"][0] > 0:
        return False
    tensors = {name: place for name, (value, place) in call.items() if isinstance(value, Tensor)}
    return all(name in _WITH_BATCH or place is None for name, place in tensors.items())


def _samples(size: int, in_dims: Places, args: Sequence[Any]) -> list[list[Any]]:

    def sample(number: int) -> list[Any]:
        return [
            argument.select(place, number) if isinstance(argument, Tensor) and place is not None else argument
            for argument, place in zip(args, in_dims, strict=True)
        ]

    return [sample(number) for number in range(size)]


def _sizes(args: Sequence[Any], in_dims: Places) -> int:
    """The batch of one sample."""
    query = args[0] if in_dims[0] is None else args[0].movedim(in_dims[0], 0)[0]
    return query.shape[0]


def _fold(size: int, in_dims: Places, args: Sequence[Any], own: frozenset[str]) -> Problem:
    """The call on all samples; what they share stays shared, but for ``own``, which each sample needs for itself."""
    call = Problem(*args)
    places = dict(zip(NAMES, in_dims, strict=True))
    batch = _sizes(args, in_dims)
    changes: dict[str, Tensor] = {}
    for name in _WITH_BATCH:
        tensor = getattr(call, name)
        place = places[name]
        if tensor is None:
            continue
        shared = name in SHARED and place is None and tensor.shape[0] == 1
        if shared and name not in own:
            continue
        whole = to_front(tensor, place, size)
        assert whole is not None
        if name in SHARED:
            whole = whole.expand(size, batch, *whole.shape[2:])
        changes[name] = _to_batch(whole, 1)
    return replace(call, **changes)


def _to_batch(tensor: Tensor | None, axis: int) -> Tensor:
    """[size, ...] with the samples joined to the batch at ``axis`` (of the tensor with samples in front)."""
    assert tensor is not None
    return tensor.movedim(0, axis - 1).flatten(axis - 1, axis)


def _unfold(grad: Tensor, size: int, batch: int, argument: Any, place: int | None) -> Tensor:
    """Gradients by sample, [size, ...]; summed over the batch where one tensor stood for all of it."""
    if argument is None:
        return grad
    by_sample = grad.unflatten(0, (size, batch))
    own = argument.shape if place is None else argument.movedim(place, 0).shape[1:]
    return by_sample.sum(1, keepdim=True) if own[0] == 1 and batch != 1 else by_sample
