"""The weights of one head as the calls of a forward pass make them, and what else was seen in that pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attemper.call.options import Request
from attemper.call.weights import head_weights
from attemper.errors import InputError
from attemper.monitor.collector import Collector
from attemper.monitor.options import Scope
from attemper.sites.padding import CallContext, Tokens
from attemper.statistics import ONE_PASS


@dataclass(frozen=True)
class SiteCall:
    """One attention call of a site."""

    site: str
    kind: str
    shape: tuple[int, int, int, int]
    """[batch, heads, queries, keys]"""


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

    ``asked``: whether a site of this name is one of them. ``sequence`` None: the only one of the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        context: CallContext,
        *,
        asked: Callable[[str], bool],
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

    def note(self, module: nn.Module, name: str, kind: str, request: Request, real: Tensor | None) -> None:
        """Takes note of a call; computes the weights at once, since a cache may be written to afterwards.

        Raises:
            InputError: there is no such sequence, or the weights are more than ``max_weights``.
        """
        problem = request.problem
        batch, heads, queries, _ = problem.query.shape
        size = problem.key.shape[2]
        seen = SiteCall(name, kind, (batch, heads, queries, size))
        self.seen.append(seen)
        if not self._asked(name) or self._head >= heads:
            return
        place = self._of_batch(batch)
        if queries * size > self._max_weights:
            raise InputError(
                f"pattern: {name} has {queries:,} queries x {size:,} keys = {queries * size:,} weights a head, and "
                f"max_weights is {self._max_weights:,}. Take a shorter text, or pass max_weights={queries * size} (8 "
                "bytes each, several times over while they are computed)."
            )
        keys = self.key_tokens(module, size)
        if keys is None and kind == "self" and queries == size:
            keys = real
        ids = _ids(self.context, kind, seen.shape)
        dtype = torch.promote_types(problem.query.dtype, torch.float32)
        weights = head_weights(problem, place, self._head).to(dtype)
        self.kept.append(HeadWeights(seen, weights, *(_of(part, place) for part in (real, keys, *ids))))

    def _of_batch(self, batch: int) -> int:
        if self._sequence is None and batch == 1:
            return 0
        if self._sequence is None or self._sequence >= batch:
            came = "none was chosen" if self._sequence is None else f"sequence={self._sequence} is not among them"
            raise InputError(f"pattern: the batch has {batch} sequences, and {came}: pass sequence=0 to {batch - 1}.")
        return self._sequence


def _of(part: Tensor | None, sequence: int) -> Tensor | None:
    """[tokens] of [B or 1, tokens]."""
    return None if part is None else part[sequence if part.shape[0] > 1 else 0].detach().cpu()


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
