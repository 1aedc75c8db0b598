"""A part of a call: some of its sequences, heads, rows and keys, or one of its packed documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from attemper.backends.contract import Problem

ALL = slice(None)


def part_of(
    problem: Problem, sequences: slice | Sequence[int] = ALL, heads: slice = ALL, rows: slice = ALL, keys: slice = ALL
) -> Problem:
    """The call of some of its sequences, heads (all that share a key head, or one), rows and keys, as views.

    What has one entry for all sequences, heads or rows keeps it. Offsets of documents stay as they are.
    """
    first, last, _ = heads.indices(problem.query.shape[1])
    groups = heads if heads == ALL else slice(first // problem.repeats, -(-last // problem.repeats))
    own = {
        "query": (sequences, heads, rows),
        "key": (sequences, groups, keys),
        "value": (sequences, groups, keys),
        "sink": (heads,),
        "per_head": (heads,),
        "positions": (rows,),
    }
    shared = {
        "mask": (sequences, heads, rows, keys),
        "multiplier": (sequences, heads, rows),
        "first_keys": (sequences, keys),
        "span_keys": (sequences, keys),
    }
    changes: dict[str, Tensor] = {}
    for name, places in (own | shared).items():
        tensor = getattr(problem, name)
        if tensor is not None:
            sizes = tensor.shape if name in shared else [None] * len(places)
            changes[name] = tensor[tuple(ALL if size == 1 else at for at, size in zip(places, sizes, strict=True))]
    return problem.with_fields(**changes)


def side_by_side(numbers: Sequence[int]) -> slice | Sequence[int]:
    """Numbers of sequences as a slice where each follows the one before: then nothing is copied."""
    span = slice(numbers[0], numbers[-1] + 1)
    return span if list(numbers) == list(range(span.start, span.stop)) else list(numbers)


def on_host(problem: Problem) -> Problem:
    """The call on the CPU, off the graph: not every device has float64."""
    tensors = {name: part for name, part in vars(problem).items() if isinstance(part, Tensor)}
    return problem.with_fields(**{name: part.detach().cpu() for name, part in tensors.items()})


@dataclass(frozen=True)
class Document:
    """One document of a packed call (or the whole of a plain one), and where it stands."""

    problem: Problem
    rows: slice
    keys: slice


def documents(problem: Problem) -> list[Document]:
    """A call cut where its documents start; reads the offsets on the host."""
    if problem.cu_seqlens_q is None or problem.cu_seqlens_k is None:
        return [Document(problem, ALL, ALL)]
    edges = zip(*(pairwise(starts.tolist()) for starts in (problem.cu_seqlens_q, problem.cu_seqlens_k)), strict=True)
    bounds = [(slice(*of_rows), slice(*of_keys)) for of_rows, of_keys in edges]
    return [_document(problem, rows, keys, number) for number, (rows, keys) in enumerate(bounds)]


def _document(whole: Problem, rows: slice, keys: slice, number: int) -> Document:
    seed = None if whole.seed is None else whole.seed + 104_729 * number
    part = part_of(whole, rows=rows, keys=keys)
    return Document(part.with_fields(cu_seqlens_q=None, cu_seqlens_k=None, seed=seed), rows, keys)
