"""The slope of entropy along the temperature, for the rows of a call."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attemper.call.options import Problem
from attemper.call.sampling import pick
from attemper.call.weights import scores
from attemper.functional.temperature import covariance


def is_monotone(problem: Problem) -> bool:
    """Whether entropy only rises with the temperature of this call: it has no bias and no softcap."""
    return not problem.softcap and (problem.mask is None or problem.mask.dtype == torch.bool)


def slope_of(problem: Problem, variance: Tensor) -> Tensor:
    r"""dH / d log T of each row, [B, H, Q] in nats.

    .. math:: \frac{dH}{d \log T} = \mathrm{Cov}_p(s, x\, \mathrm{softcap}'(x)), \quad x = \tfrac{scale}{T} q \cdot k

    Without bias and softcap that is ``variance``, the variance of the logits, which the pass over the keys gives. With
    them the scores of these rows are held, one sequence at a time: sample rows before.
    """
    if is_monotone(problem):
        return variance
    if problem.rows is not None:
        problem = pick(problem, problem.rows)
    parts = [_dense(_sequence(problem, index)) for index in range(problem.query.shape[0])]
    return torch.cat(parts).to(variance.dtype) if parts else variance


def _dense(problem: Problem) -> Tensor:
    s, x, visible = scores(problem)
    if problem.softcap:
        x = x * (1 - torch.tanh(x / problem.softcap).square())
    return covariance(x, s, visible)


def _sequence(problem: Problem, index: int) -> Problem:
    """One sequence of a batch."""

    def one(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[0] == 1 else tensor[index : index + 1]

    names = ("query", "key", "multiplier", "mask", "first_keys")
    return replace(problem, **{name: one(getattr(problem, name)) for name in names})
