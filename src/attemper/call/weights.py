"""The scores and weights of a call, n x n in memory: for small inputs and pictures."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attemper.backends import reference, table
from attemper.backends.contract import Problem

BACKEND = next(backend.name for backend in table.BACKENDS if backend.plain)
"""The backend that holds them."""


def weights(problem: Problem) -> Tensor:
    """The weights that a call applies to its values, before dropout, [B, H, Q, K] in the type of the query."""
    return reference.weights(problem).to(problem.query.dtype)


def head_weights(problem: Problem, sequence: int, head: int) -> Tensor:
    """``weights`` of one head of one sequence, [Q, K] in float64 on the CPU: of a call of all its rows."""
    batch, heads = problem.query.shape[:2]
    assert batch > sequence

    def part(tensor: Tensor) -> Tensor:
        """Of a tensor [batch or 1, heads or 1, ...] what this head and sequence have."""
        at, of = (place if size > 1 else 0 for place, size in zip((sequence, head), tensor.shape[:2], strict=True))
        return tensor[at : at + 1, of : of + 1].detach().cpu()

    def own(tensor: Tensor | None) -> Tensor | None:
        """Of a tensor [heads] what this head has."""
        return None if tensor is None else tensor[head : head + 1].detach().cpu()

    group = head // (heads // max(problem.key.shape[1], 1))
    one = replace(
        problem,
        query=problem.query[sequence : sequence + 1, head : head + 1].detach().cpu(),
        key=problem.key[sequence : sequence + 1, group : group + 1].detach().cpu(),
        value=None,
        mask=None if problem.mask is None else part(problem.mask),
        multiplier=part(problem.multiplier),
        sink=own(problem.sink),
        per_head=own(problem.per_head),
        first_keys=None,
    )
    return reference.weights(one)[0, 0]


def scores(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, products scale / T times q.k, and which keys are visible, [B, H, Q, K]; float64, 0 where hidden."""
    found, visible = reference.scores(problem)
    products = reference.products(problem, visible)
    return torch.where(visible, found, 0.0), torch.where(visible, products, 0.0), visible
