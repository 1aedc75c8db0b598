"""A checked call on its backend: what comes back."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attemper.backends import reference, table
from attemper.backends.contract import Problem
from attemper.call import autograd
from attemper.call.formulas import LazyStatistics
from attemper.call.known_requests import KnownRequests
from attemper.call.packing import Packing
from attemper.call.request import Options, Request, request_of
from attemper.call.result import AttentionOutput, AttentionStats, facts_of
from attemper.call.sampling import sample
from attemper.call.state import LazyState, State, round_to, state_of
from attemper.call.transforms import exports_to_onnx, refuse_onnx

DENSE_BACKEND = next(backend.name for backend in table.BACKENDS if backend.plain)
"""The backend that holds the weights of a call, n x n in memory: for small inputs and pictures."""


def attend(
    where: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Options, known: KnownRequests
) -> AttentionOutput:
    """Checks a call, unless it is known, and runs it; by the shortest way that there is for it."""
    found = known.find(where, query, key, value, mask, options)
    if isinstance(found, Request):
        return run(found)
    again = found.again(query, key, value)
    if again is None:
        return run(found.with_tensors(query, key, value))
    results, request, stats = again.empty_results(), found.request, None
    if request.names:
        state = LazyState(request.problem.columns, results.state, request.problem.backend)
        values = LazyStatistics(state, request.names, None, request.asked, results.statistics)
        stats = AttentionStats(values, state, found.facts, request.names)
    again.run(query, key, value, results)
    return AttentionOutput(results.output, stats)


def run(request: Request) -> AttentionOutput:
    problem = request.problem
    # Autograd, transforms and exporters look into plain PyTorch. It leaves its state in float64.
    plain = table.by_name(problem.backend).plain
    output, state, key_mass = reference.forward(problem) if plain else _by_operator(request)
    if not request.names:
        return AttentionOutput(output, None)
    dtype = problem.compute_dtype
    given = {"key_mass": key_mass.to(dtype)} if problem.key_mass else None
    values = LazyStatistics(state, request.names, problem.sink, request.asked, given, dtype if plain else None)
    return AttentionOutput(output, AttentionStats(values.settle(), round_to(state, dtype), facts_of(request)))


def _by_operator(request: Request) -> tuple[Tensor, State, Tensor]:
    problem = request.problem
    if exports_to_onnx():
        refuse_onnx(
            f"attention(normalizer={request.normalizer!r}, backend={problem.backend!r})",
            'attention(..., backend="reference") is plain operators, which ONNX has; a tempered model needs its '
            "softmax back: handle.remove().",
        )
    if problem.dropout_p > 0:
        problem = replace(problem, seed=torch.randint(0, 1 << 62, (), dtype=torch.int64))
    output, state, key_mass = autograd.attention(problem)
    derives = table.by_name(problem.backend).direct and not problem.rowwise
    return output, state_of(problem.columns, state, problem.backend if derives else None), key_mass


def measurement(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    options: Options,
    *,
    packing: Packing | None = None,
    first_keys: Tensor | None = None,
    rows: int | None = None,
    generator: torch.Generator | None = None,
    known: KnownRequests | None = None,
) -> Request:
    """The request for the statistics, off the graph, of a call whose output is computed elsewhere.

    ``first_keys`` [B, K] marks the first real tokens. ``rows``: of so many query rows only. ``known``: requests of the
    calls before this one.
    """
    query, key, mask = query.detach(), key.detach(), None if mask is None else mask.detach()
    with torch.no_grad():
        if known is not None and packing is None:
            request = known.request("attention", query, key, None, mask, options)
        else:
            request = request_of("attention", query, key, None, mask, options, packing)
        if first_keys is not None:
            request = request.with_problem(first_keys=first_keys)
        return sample("attention", request, rows, generator)


def weights(problem: Problem) -> Tensor:
    """The weights that a call applies to its values, before dropout, [B, H, Q, K] in the type of the query."""
    return reference.weights(problem).to(problem.query.dtype)


def scores(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, products scale / T times q.k, and which keys are visible, [B, H, Q, K]; float64, 0 where hidden."""
    found, visible = reference.scores(problem)
    products = reference.products(problem, visible)
    return torch.where(visible, found, 0.0), torch.where(visible, products, 0.0), visible
