"""The exact weights of heads in one attention call, in float64 on the host, and what tokens rows and keys are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attemper.backends import reference
from attemper.backends.contract import Problem
from attemper.call.partial_call import ALL, on_host, part_of
from attemper.errors import InputError
from attemper.sites.padding import CallContext, Tokens

MOST_WEIGHTS = 1 << 22
"""Queries times keys times heads whose weights are computed at once: some times 32 MB."""


def head_groups(problem: Problem, weights_a_head: int, heads: range) -> Iterator[slice]:
    """``heads`` in parts for ``weights``: those that share keys together, or one by one; ``MOST_WEIGHTS`` at once."""
    step = max(1, MOST_WEIGHTS // max(1, weights_a_head))
    step = step - step % problem.repeats or 1
    return (slice(head, min(head + step, heads.stop)) for head in range(heads.start, heads.stop, step))


def weights(
    problem: Problem, sequence: int, heads: slice = ALL, rows: slice = ALL, keys: slice = ALL
) -> tuple[Any, ...]:
    """The weights of some heads of one sequence, [H, Q, K] in float64 on the CPU, and which keys rows see, bool.

    Args:
        problem: of a call of all its rows.
        heads: that share no key head with others, or one.
        rows: all, or of documents one after another the first ones.
        keys: from the first on; the others are taken to be hidden from these rows.
    """
    read = problem.with_fields(value=None, first_keys=None, span_keys=None, positions=reference.positions(problem)[0])
    part = on_host(part_of(read, slice(sequence, sequence + 1), heads, rows, keys))
    if part.rowwise or part.sink is not None:
        found = reference.scores(part)
        return reference.weights(part, found)[0], found[1][0]
    seen = reference.visible_keys(part)[0]
    return _softmax(part, seen), seen


def each_once(seen: Tensor) -> Tensor:
    """Which keys rows see, [1, Q, K] where they are one head's, spread over all."""
    return seen[:1] if seen.stride(0) == 0 else seen


def _softmax(part: Problem, seen: Tensor) -> Tensor:
    """``reference.weights`` [H, Q, K] of one sequence in place: a fifth of the time, and no gradients."""
    query = part.query[0].double() * part.multiplier[0].double()[..., None]
    key = part.key[0].double()
    found = (query.unflatten(0, (len(key), -1)).flatten(1, 2) @ key.mT).view(seen.shape)
    if part.softcap:
        found.div_(part.softcap).tanh_().mul_(part.softcap)
    if part.mask is not None and part.mask.dtype != torch.bool:
        found.add_(part.mask[0])
    each = each_once(seen)
    if each.all():
        return found.softmax(-1)
    return found.masked_fill_(~each, -math.inf).softmax(-1).masked_fill_(~each, 0.0)


def ids_of_call(context: CallContext, kind: str, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
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


def naming(tokenizer: Any, caller: str) -> Callable[[list[int]], list[str]] | None:
    """How a tokenizer names ids, one by one; None without one.

    Args:
        caller: the public function that was given it, for errors.

    Raises:
        InputError: it cannot name ids; what this gives also raises it, where it names fewer or more.
    """
    if tokenizer is None:
        return None
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return lambda ids: _or_ids(tokenizer.convert_ids_to_tokens(ids), ids, caller)
    if hasattr(tokenizer, "decode"):
        return lambda ids: [str(tokenizer.decode([number])) for number in ids]
    if not callable(tokenizer):
        raise InputError(
            f"{caller}(tokenizer=...) must have convert_ids_to_tokens or decode, or be a function from a list of ids "
            f"to strings; got {type(tokenizer).__name__}."
        )
    function: Callable[[list[int]], Any] = tokenizer
    return lambda ids: _or_ids(function(ids), ids, caller)


def _or_ids(tokens: Sequence[Any], ids: list[int], caller: str) -> list[str]:
    """Tokens; the id for one that is not in the vocabulary."""
    if len(tokens) != len(ids):
        raise InputError(f"{caller}(tokenizer=...) must give a string for each of {len(ids)} ids, gave {len(tokens)}.")
    return [str(number) if token is None else str(token) for token, number in zip(tokens, ids, strict=True)]
