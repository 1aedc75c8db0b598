"""The weights of one head as the calls of a forward pass make them, and what else was seen in that pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attemper.backends import reference
from attemper.call.request import Problem, Request
from attemper.errors import InputError
from attemper.monitor.calls import CallNumber
from attemper.monitor.collector import Collector
from attemper.monitor.options import Scope
from attemper.sites.padding import CallContext, Tokens
from attemper.statistics import ONE_PASS


@dataclass(frozen=True, eq=False)
class SiteCall:
    """One attention call."""

    number: CallNumber
    kind: str
    shape: tuple[int, int, int, int]
    """[batch, heads, queries, keys]"""
    mode: str


@dataclass(frozen=True)
class HeadWeights:
    """The weights that a call gives to one head of one sequence."""

    call: SiteCall
    weights: Tensor
    """[Q, K], padding still in it."""
    queries: Tensor | None
    """[Q] bool: which queries are tokens; None for all."""
    keys: Tensor | None
    """[K] bool: which keys are tokens; None for all."""
    query_ids: Tensor | None
    key_ids: Tensor | None
    """[Q] and [K]: the token at each place, -1 where it is not known; None where no ids of this length were given."""


class WeightsCollector(Collector):
    """Takes note of every call, and keeps the weights of those that are asked for.

    ``asked``: whether a call is one of them. ``sequence`` None: the only one of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        context: CallContext,
        *,
        asked: Callable[[CallNumber], bool],
        head: int,
        sequence: int | None,
        max_weights: int,
    ) -> None:
        super().__init__(model, context, Scope(ONE_PASS))
        self._asked, self._head, self._sequence, self._max_weights = asked, head, sequence, max_weights
        self.seen: list[SiteCall] = []
        self.kept: list[HeadWeights] = []

    def begin(self) -> None:
        """Forgets a pass that did not go through."""
        super().begin()
        self.seen.clear()
        self.kept.clear()

    def note(self, module: nn.Module, number: CallNumber, kind: str, request: Request, real: Tensor | None) -> None:
        """Takes note of a call; computes the weights at once, since a cache may be written to afterwards.

        Raises:
            InputError: there is no such sequence, or the weights are more than ``max_weights``.
        """
        problem = request.problem
        batch, heads, queries, _ = problem.query.shape
        size = problem.key.shape[2]
        seen = SiteCall(number, kind, (batch, heads, queries, size), "train" if module.training else "eval")
        self.seen.append(seen)
        if not self._asked(number) or self._head >= heads:
            return
        place = self._of_batch(batch)
        if queries * size > self._max_weights:
            raise InputError(
                f"pattern: {number.site} has {queries:,} queries x {size:,} keys = {queries * size:,} weights a head, "
                f"and max_weights is {self._max_weights:,}. Take a shorter text, or pass max_weights={queries * size} "
                "(8 bytes each, several times over while they are computed)."
            )
        keys = self.key_tokens(module, size)
        if keys is None and kind == "self" and queries == size:
            keys = real
        ids = _ids(self.context, kind, seen.shape)
        dtype = torch.promote_types(problem.query.dtype, torch.float32)
        weights = _weights(problem, place, self._head).to(dtype)
        own = ((part, place if part is not None and part.shape[0] > 1 else 0) for part in (real, keys, *ids))
        rows = (None if part is None else part[at].detach().cpu() for part, at in own)
        self.kept.append(HeadWeights(seen, weights, *rows))

    def _of_batch(self, batch: int) -> int:
        if self._sequence is None and batch == 1:
            return 0
        if self._sequence is None or self._sequence >= batch:
            came = "none was chosen" if self._sequence is None else f"sequence={self._sequence} is not among them"
            raise InputError(f"pattern: the batch has sequences 0 to {batch - 1}, and {came}: pass one as sequence=.")
        return self._sequence


def _weights(problem: Problem, sequence: int, head: int) -> Tensor:
    """The weights of one head of one sequence, [Q, K] in float64 on the CPU: of a call of all its rows."""
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


def _ids(context: CallContext, kind: str, shape: tuple[int, int, int, int]) -> tuple[Tensor | None, Tensor | None]:
    """Token ids of queries and keys, [B, Q] and [B, K]; None where nothing that was passed has this length."""
    batch, _, queries, keys = shape
    own = _own_ids(context.stack, batch, queries)
    if kind == "cross":
        return own, _other_ids(context.stack, batch, keys)
    if own is None or keys == queries:
        return own, own
    past = context.tokens.past
    if not isinstance(past, int) or past + queries > keys:
        return own, None
    # Of what a cache holds only the places are known.
    whole = own.new_full((batch, keys), -1)
    whole[:, past : past + queries] = own
    return own, whole


def _own_ids(stack: list[Tokens], batch: int, tokens: int) -> Tensor | None:
    """Ids of the innermost module that was called with any, if those of this length are unambiguous."""
    for level in reversed(stack):
        if level.ids is None:
            return None
        if level.ids:
            fitting = [ids for ids in level.ids.values() if ids.shape == (batch, tokens)]
            return fitting[0] if len(fitting) == 1 else None
    return None


def _other_ids(stack: list[Tokens], batch: int, tokens: int) -> Tensor | None:
    """Ids of the sequence that a cross attention reads: of the outermost module that was called with fitting ones."""
    for level in stack:
        fitting = {name: ids for name, ids in (level.ids or {}).items() if ids.shape == (batch, tokens)}
        if "input_ids" in fitting or len(fitting) == 1:
            return fitting.get("input_ids", next(iter(fitting.values())))
        if fitting:
            return None
    return None
