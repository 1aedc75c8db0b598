"""Some of the query rows of each sequence: a measured sample of them, and the keys that they see."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attemper.backends import reference, table
from attemper.backends.contract import Problem
from attemper.call import transforms
from attemper.call.request import Request
from attemper.checks import whole_number
from attemper.errors import InputError

_HIDING = -5e3
"""A number that is added to a score, beside the largest of the row, from which on it leaves no weight: engines take
-1e4 and less.
"""


def sample(where: str, request: Request, rows: int | None, generator: torch.Generator | None) -> Request:
    """The request on ``rows`` of its queries, evenly strided from a random start; as it is where it has no more than
    that, or for None. Of packed documents, which are one row of queries, each gives its share.
    """
    if rows is None:
        return request
    rows = whole_number(f"{where}(rows=...)", rows, none=", or None for all rows")
    if "key_mass" in request.names:
        raise InputError(f"{where}(rows=...) cannot sample key_mass, a sum over all rows: leave it out of stats=.")
    problem = request.problem
    if rows >= problem.query.shape[2]:
        return request
    chosen = _choose_rows(problem, rows, generator)
    # A kernel that gathers takes these rows as it loads them, each at its own place.
    part = replace(problem, rows=chosen) if gathers(problem) else pick(problem, chosen)
    return replace(request, problem=part, rows=chosen)


def pick(problem: Problem, rows: Tensor) -> Problem:
    """The problem of these rows of its queries, [rows], each at its own place among the keys."""
    places, starts_q, starts_k = _places(problem, rows)

    def choose(tensor: Tensor) -> Tensor:
        return tensor if tensor.shape[2] == 1 else tensor.index_select(2, rows.to(tensor.device))

    return replace(
        problem,
        query=choose(problem.query),
        mask=None if problem.mask is None else choose(problem.mask),
        multiplier=choose(problem.multiplier),
        positions=places,
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        rows=None,
        bottom_right=False,
    )


def gathers(problem: Problem) -> bool:
    """Whether the kernel itself takes rows as it loads them, which it can where there is no gradient."""
    graph = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in problem.differentiable
    )
    return table.by_name(problem.backend).gathers and not graph and not transforms.active()


def _choose_rows(problem: Problem, rows: int, generator: torch.Generator | None) -> Tensor:
    """Which rows: on the CPU, or on the query's device where nothing may wait for it."""
    device = problem.query.device
    device = torch.device("cpu") if table.waits(problem.backend, device.type) else device
    drawn = device if generator is None else generator.device
    # A start from the CPU is one number among the arguments of the device's first operation: nothing is copied.
    start = torch.rand((), generator=generator, dtype=torch.float64, device=drawn)
    queries = problem.query.shape[2]
    strided = (start + torch.arange(rows, dtype=torch.float64, device=device)) * (queries / rows)
    return strided.floor().to(torch.int64).clamp(max=queries - 1)


def _places(problem: Problem, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The diagonal key of each of ``rows``, counted within its document, and where documents start among the rows and
    the keys.
    """
    if problem.cu_seqlens_q is None or problem.cu_seqlens_k is None:
        return rows + problem.offset, None, None
    starts_q, starts_k = (
        starts if rows.device.type == "cpu" else starts.to(rows.device, non_blocking=True)
        for starts in (problem.cu_seqlens_q, problem.cu_seqlens_k)
    )
    rows = rows.to(starts_q)
    document = torch.searchsorted(starts_q, rows, right=True) - 1
    places = rows - starts_q[document]
    if problem.bottom_right:
        places += (starts_k.to(rows.device).diff() - starts_q.diff())[document]
    return places.to(torch.int64), torch.searchsorted(rows, starts_q).to(starts_q), starts_k


def unless_hidden(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Visible keys [..., R, K] without those that a finite number hides: one engine's -1e4 is another's -inf."""
    if mask is None or mask.dtype == torch.bool:
        return visible
    added = mask.double().masked_fill(~visible, -torch.inf)
    low = added <= added.amax(-1, keepdim=True) + _HIDING
    # What is added by distance gets there in small steps.
    step = added.masked_fill(low, torch.inf).amin(-1, True) - added.masked_fill(~low, -torch.inf).amax(-1, True)
    return visible & ~(low & (step > -_HIDING / 2))


def rows_that_see(problem: Problem, rows: Tensor) -> Tensor:
    """[B or 1, H or 1, R, K] bool: the keys that ``rows`` [R] of a call see, from its mask, windows and documents."""
    picked = pick(problem, rows.to(problem.query.device))
    return unless_hidden(picked.mask, reference.shared_visible_keys(picked))
