"""Measures entropy and its derivative with respect to temperature per head during training steps.

The model's own attention runs as it did. A meter listens to its calls and computes the statistics beside them, in
compiled code by an operator that stays in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from attemper.call.attention import run, scores
from attemper.call.attn_mask import shows
from attemper.call.normalizer import normalization
from attemper.call.operator import operator
from attemper.call.partial_call import part_of
from attemper.call.request import Problem, request_of
from attemper.call.result import AttentionStats
from attemper.call.sampling import pick, sample
from attemper.errors import InputError
from attemper.functional.temperature_of_entropy import covariance
from attemper.sites.observation import OPERANDS, AttentionCall, call_of, operands_of
from attemper.sites.sharded import first_head, is_dtensor, local
from attemper.sites.tap import in_backward, token


@dataclass
class Sums:
    """What the rows of a step add up to."""

    total: Tensor
    """[3, H] float64: entropies, slopes dH / d log T, numbers of rows."""
    monotone: bool
    """Whether entropy can only rise with temperature: no call had a bias or a softcap."""

    def add(self, other: Sums) -> None:
        self.total = self.total + other.total
        self.monotone = self.monotone and other.monotone

    def on_host(self) -> Sums:
        return Sums(self.total.cpu(), self.monotone)


def refusal(where: str, module: nn.Module) -> str:
    return (
        f"{where} steers by the slope of softmax's entropy, and {type(module).__name__} attends by another normalizer: "
        "leave it out with sites=."
    )


class EntropyMeter:
    """Measures one module's attention; a ``Listener``.

    Args:
        rows: query rows of each sequence that are measured; None for all.
        unit: "nats", or "normalized" for H / log n.
    """

    stats: tuple[str, ...] = ()
    replaces = False

    def __init__(self, module: nn.Module, where: str, rows: int | None, unit: str) -> None:
        self.where, self.rows, self.unit = where, rows, unit
        self._module = ref(module)  # which holds this meter
        self.sums: Sums | None = None
        self.first_head: int | None = None
        """The number of the first head here in the whole model; None before the first call."""
        self.generator = torch.Generator().manual_seed(0)
        self.key = next(_keys)
        _meters[self.key] = self

    def wants(self, module: nn.Module) -> bool:
        return module.training

    def receive(self, module: nn.Module, call: AttentionCall, stats: AttentionStats | None, output: Tensor) -> Tensor:
        if not normalization(self.where, call.options.normalizer).plain:
            raise InputError(refusal(self.where, module))
        if is_dtensor(call.query):
            self.first_head = first_head(module, call)
            call = local(module, call)
        if call.packing is not None:
            if not in_backward():
                self.measure(call)
            return output
        torch.ops.attemper.entropy_and_slope(token(str(call.query.device)), self.key, *operands_of(call))
        return output

    @torch.no_grad()
    def measure(self, call: AttentionCall) -> None:
        module = self._module()
        if self.first_head is None and module is not None:
            self.first_head = first_head(module, call)
        options = replace(call.options, stats=("entropy", "logit_variance", "visible_keys"))
        mask = None if call.mask is None else as_visible(call.mask.detach())
        request = request_of(self.where, call.query.detach(), call.key.detach(), None, mask, options, call.packing)
        request = sample(self.where, request, self.rows, self.generator)
        stats = run(request).stats
        assert stats is not None
        slope = slope_of(request.problem, stats["logit_variance"])
        per, valid = nats_in(self.unit, stats, slope.dtype)
        parts = [torch.where(valid, part, 0.0).double().sum((0, 2)) for part in (stats["entropy"] * per, slope * per)]
        found = Sums(torch.stack([*parts, valid.sum((0, 2)).double()]), is_monotone(request.problem))
        if self.sums is None or self.sums.total.shape != found.total.shape:
            self.sums = found
        else:
            self.sums.add(found)


def nats_in(unit: str, stats: AttentionStats, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a nat of each row is in ``unit``, and which rows count: of H / log n those that see two keys or more."""
    if unit == "nats":
        return torch.ones_like(stats.valid, dtype=dtype), stats.valid
    visible = stats["visible_keys"]
    return 1 / torch.where(visible > 1, visible, 2).to(dtype).log(), stats.valid & (visible > 1)


def as_visible(mask: Tensor) -> Tensor:
    """``mask`` as a bool mask if it is floating and only hides keys: then entropy can only rise with temperature."""
    if not mask.is_floating_point():
        return mask
    shown = shows(mask)
    return shown if bool(((mask == 0) | ~shown).all()) else mask


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
    parts = [_dense_slope(part_of(problem, slice(index, index + 1))) for index in range(problem.query.shape[0])]
    return torch.cat(parts).to(variance.dtype) if parts else variance


def _dense_slope(problem: Problem) -> Tensor:
    s, x, visible = scores(problem)
    if problem.softcap:
        x = x * (1 - torch.tanh(x / problem.softcap).square())
    return covariance(x, s, visible)


_keys = count(1)
_meters: WeakValueDictionary[int, EntropyMeter] = WeakValueDictionary()


@operator(f"entropy_and_slope(Tensor(a!) token, int meter, {OPERANDS}) -> ()", tags=(torch.Tag.cudagraph_unsafe,))
def _entropy_and_slope(_token: Tensor, meter: int, *operands: Any) -> None:
    if not in_backward() and meter in _meters:  # no recomputation of a pass that was measured, no meter that is gone
        _meters[meter].measure(call_of(operands))
