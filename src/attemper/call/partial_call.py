"""A part of a call: some of its sequences, heads, rows and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attemper.backends.contract import Problem

ALL = slice(None)
AXES: Mapping[str, tuple[str, ...]] = {
    "query": ("sequence", "head", "row"),
    "key": ("sequence", "group", "key"),
    "value": ("sequence", "group", "key"),
    "mask": ("sequence", "head", "row", "key"),
    "multiplier": ("sequence", "head", "row"),
    "sink": ("head",),
    "per_head": ("head",),
    "positions": ("row",),
    "first_keys": ("sequence", "key"),
    "span_keys": ("sequence", "key"),
}
"""Tensors of a call that belong to sequences, heads, heads of keys, rows or keys -> their first axes."""
SHARED = ("mask", "multiplier", "first_keys", "span_keys")
"""Of these, what may have one entry for all along an axis."""


def part_of(
    problem: Problem,
    sequences: slice | Sequence[int] = ALL,
    heads: slice = ALL,
    rows: slice = ALL,
    keys: slice = ALL,
    **facts: Any,
) -> Problem:
    """The call of some of its sequences, heads (all that share a key head, or one), rows and keys, as views. Offsets of
    documents stay as they are. ``facts``: other fields that it has.
    """
    first, last, _ = heads.indices(problem.query.shape[1])
    groups = heads if heads == ALL else slice(first // problem.repeats, -(-last // problem.repeats))
    places = {"sequence": sequences, "head": heads, "group": groups, "row": rows, "key": keys}
    cut = [axis for axis, place in places.items() if place is not ALL]
    fields = vars(problem)
    for name, axes in AXES.items():
        tensor = fields[name]
        if tensor is None:
            continue
        # Axes that stay whole at the end are left out, and a tensor of which nothing is cut: documents are many.
        for axis in cut:
            if axis in axes:
                dim = axes.index(axis)
                if not (name in SHARED and tensor.shape[dim] == 1):
                    tensor = tensor[(ALL,) * dim + (places[axis],)]
        if tensor is not fields[name]:
            facts[name] = tensor
    return problem.with_fields(**facts)


def side_by_side(numbers: Sequence[int]) -> slice | Sequence[int]:
    """Numbers of sequences as a slice where each follows the one before: then nothing is copied."""
    span = slice(numbers[0], numbers[-1] + 1)
    return span if list(numbers) == list(range(span.start, span.stop)) else list(numbers)


def on_host(problem: Problem) -> Problem:
    """The call on the CPU, off the graph: not every device has float64."""
    tensors = {name: part for name, part in vars(problem).items() if isinstance(part, Tensor)}
    return problem.with_fields(**{name: part.detach().cpu() for name, part in tensors.items()})
