"""The slope of entropy along the temperature, for the rows of a call."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attemper.backends.reference import softmax
from attemper.call import reference
from attemper.call.options import Call
from attemper.call.sampling import picked
from attemper.functional.temperature import covariance


def is_monotone(call: Call) -> bool:
    """Whether entropy only rises with the temperature of this call: it has no bias and no softcap."""
    return call.softcap is None and (call.mask is None or call.mask.dtype == torch.bool)


def slope_of(call: Call, variance: Tensor) -> Tensor:
    r"""dH / d log T of each row, [B, H, Q] in nats.

    .. math:: \frac{dH}{d \log T} = \mathrm{Cov}_p(s, x\, \mathrm{softcap}'(x)), \quad x = \tfrac{scale}{T} q \cdot k

    Without bias and softcap that is ``variance``, the variance of the logits, which the pass over the keys gives. With
    them the scores of these rows are held, one sequence at a time: sample rows before.
    """
    if is_monotone(call):
        return variance
    if call.rows is not None and call.positions is None:
        call = picked(call, call.rows)  # the kernel took these rows as it loaded them
    parts = [_dense(_sequence(call, index)) for index in range(call.query.shape[0])]
    return torch.cat(parts).to(variance.dtype) if parts else variance


def _dense(call: Call) -> Tensor:
    scores, visible = reference.scores(call)
    x = softmax.scores(call.query, call.key, call.multiplier, None, visible, None)
    x = torch.where(visible, x, 0.0)
    if call.softcap is not None:
        x = x * (1 - torch.tanh(x / call.softcap).square())
    return covariance(x, torch.where(visible, scores, 0.0), visible)


def _sequence(call: Call, index: int) -> Call:
    """One sequence of a batch."""

    def one(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[0] == 1 else tensor[index : index + 1]

    query, key, multiplier = (one(part) for part in (call.query, call.key, call.multiplier))
    assert query is not None
    assert key is not None
    assert multiplier is not None
    return replace(
        call, query=query, key=key, multiplier=multiplier, mask=one(call.mask), first_keys=one(call.first_keys)
    )
