"""A penalty's gradient, put in where each attention output flows back.

A term that is collected beside the model is lost under activation checkpointing. A term that is tied to the attention
output is not: a recomputation of the output recomputes the tie. The backward pass of the tie needs the weight of a row.
:class:`AttachPenalty` on the loss runs backward before any tie, and sets it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attemper.call import transforms
from attemper.call.operator import operator
from attemper.errors import InputError
from attemper.sites.tap import in_backward, token


@dataclass
class SiteSums:
    """What the rows of one site added since the last attach."""

    sums: Tensor | None = None
    """[H] float64"""
    counts: Tensor | None = None
    """[H] float64: rows that count."""
    ties: int = 0
    """Calls whose tie must run in the backward pass."""

    def add(self, values: Tensor, counts: Tensor, tied: bool) -> None:
        self.ties += int(tied)
        self.sums = values if self.sums is None else self.sums + values
        self.counts = counts if self.counts is None else self.counts + counts


@dataclass
class Round:
    """What the sites added from one attach to the next, and the state of its backward pass."""

    sites: dict[str, SiteSums] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """[H]: the weight of a row's gradient, per unit of ``gain``."""
    gain: Tensor | None = None
    """The gradient that reached the loss."""
    ran: dict[str, int] = field(default_factory=dict)
    """Ties that ran backward, by site."""


class Ledger:
    """The counts of one penalty, and the round whose backward pass is running."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.pending = Round()
        self.running: Round | None = None
        self.removed = False
        """Whether the penalty was taken off the model: what is missing then is missing on purpose."""

    def add(self, name: str, values: Tensor, counts: Tensor, tied: bool) -> None:
        self.running = None  # of a backward pass that did not end
        self.pending.sites.setdefault(name, SiteSums()).add(values, counts, tied)

    def weigh(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient of a site's statistic [B, H, Q], in the backward pass."""
        current = self.running
        if current is None or current.gain is None:
            raise InputError(
                f"{self.where}: a backward pass reached {name} without the penalty: call "
                "`loss = penalty.attach(loss)` before `loss.backward()`."
            )
        if name not in current.weights:
            raise InputError(
                f"{self.where}: {name} ran forward after the loss was attached. Attach the loss after the last forward "
                "pass that it is made of."
            )
        current.ran[name] = current.ran.get(name, 0) + 1
        worth = (current.weights[name] * current.gain.to(current.weights[name])).to(gradient.dtype)
        return gradient * worth[None, :, None]

    def start(self, current: Round, gain: Tensor) -> None:
        if self.running is not None and self.running is not current:
            raise InputError(
                f"{self.where}: two attached losses flow back in one backward pass: add them first, and attach the sum."
            )
        self.running, current.gain = current, gain.detach()
        current.ran = {}
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(current))  # pyright: ignore

    def _end(self, current: Round) -> None:
        self.running = None
        missed = {
            name: (counted.ties, current.ran.get(name, 0))
            for name, counted in current.sites.items()
            if counted.ties != current.ran.get(name, 0)
        }
        if missed and not self.removed:
            name, (ties, ran) = next(iter(missed.items()))
            raise InputError(
                f"{self.where}: {name} was called {ties} times and its gradient flowed back {ran} times "
                f"(sites in all: {len(missed)}), so the penalty's gradient is not whole. If a part of the model is not "
                "in the loss, or runs without gradients, leave it out with sites= or put it in eval mode; after a "
                "forward pass that raised or is thrown away call penalty.reset()."
            )


class SiteEntry:
    """A site of a ledger, which operators find by its key."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self.ledger, self.name = ledger, name
        self.key = next(_keys)
        _entries[self.key] = self


_keys = count(1)
_entries: WeakValueDictionary[int, SiteEntry] = WeakValueDictionary()


def tie(output: Tensor, statistic: Tensor, values: Tensor, gradient: Tensor, valid: Tensor, key: int) -> Tensor:
    """``output`` with a tie to a row statistic; counts its rows.

    Args:
        output: of an attention, any shape.
        statistic: [B, H, Q], on the graph.
        values, gradient: what each row adds, and its derivative by the statistic; off the graph.
        valid: bool, rows that count.
        key: of the site.
    """
    if transforms.active():
        raise InputError(
            f"{_where(key)}: the penalty's gradient goes back with loss.backward(), which torch.func and forward mode "
            "do not call. Put the model in eval mode, where the penalty rests, or add the term to the loss yourself: "
            'attemper.attention(..., stats="entropy") and attemper.functional.entropy_target.'
        )
    shown = torch.where(valid, values.detach(), 0.0)
    rows = valid.expand(shown.shape).sum((0, 2)).to(torch.float64)
    tied = statistic.requires_grad or not torch.is_grad_enabled()
    torch.ops.attemper.penalised(token(str(output.device)), shown.to(torch.float64).sum((0, 2)), rows, key, tied)
    if not statistic.requires_grad:
        return output
    return _Tie.apply(output, statistic, torch.where(valid, gradient.detach(), 0.0), key)  # pyright: ignore


def _where(key: int) -> str:
    return _entries[key].ledger.where if key in _entries else "regularize"


@operator(
    "penalised(Tensor(a!) token, Tensor values, Tensor counts, int site, bool tied) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _penalise(_token: Tensor, values: Tensor, counts: Tensor, site: int, tied: bool) -> None:
    if in_backward() or site not in _entries:
        return  # a recomputation of rows that are counted, or a penalty that is gone
    entry = _entries[site]
    entry.ledger.add(entry.name, values.clone(), counts.clone(), tied)


@operator(
    "injected(Tensor grad, Tensor gradient, int site) -> Tensor",
    lambda grad, gradient, site: torch.empty_like(gradient),
    tags=(torch.Tag.cudagraph_unsafe,),
)
def _inject(grad: Tensor, gradient: Tensor, site: int) -> Tensor:
    del grad  # an argument so that no compiler runs this before the backward pass
    if site not in _entries:
        return torch.zeros_like(gradient)
    entry = _entries[site]
    return entry.ledger.weigh(entry.name, gradient)


class _Tie(torch.autograd.Function):
    """The identity on an output. Its backward pass gives the statistic the gradient of the penalty."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, statistic: Tensor, gradient: Tensor, key: int) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.key = key
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore
        (gradient,) = ctx.saved_tensors
        return grad, torch.ops.attemper.injected(grad, gradient, ctx.key), None, None


class AttachPenalty(torch.autograd.Function):
    """Adds the penalty's value to the loss. It runs backward first, and hands the loss's gradient to the ties."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor, ledger: Ledger, current: Round) -> Tensor:
        ctx.ledger, ctx.round = ledger, current
        return loss + value.to(loss.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        ctx.ledger.start(ctx.round, grad)
        return grad, None, None, None
