"""Token by token, and in two chunks, a model with a cache gives what one pass gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attemper.results.check import Rule
from attemper.rules.moves import Trace, movement
from attemper.rules.session import NotDeclaredError, RuleKind, Session, Tests
from attemper.rules.token_batch import TokenBatch, takes
from attemper.sites.declared import Window

NAMES = ("past_key_values", "cache", "cache_params")
"""How models call their cache, as an argument and in their result."""
PREFIX, BEYOND = 16, 48
"""Tokens that are read, and at most so many where a window is to be passed."""


def judge(session: Session, tests: Tests) -> str | Rule:
    name = next((one for one in NAMES if takes(session.model, one)), None)
    uses = bool(getattr(session.config, "use_cache", False))  # whose argument may be among **kwargs
    if name is None or not uses or not any(session.declared.causal.value.values()):
        raise NotDeclaredError("the model has no cache")
    if session.batch.arguments.get("use_cache") is False:
        raise NotDeclaredError("use_cache=False in the batch")
    written = session.batch.second or session.batch.tokens
    vectors = "the batch holds no ids" if session.batch[written].is_floating_point() else None
    why = session.obstacle or vectors or ("two runs of the batch differ" if session.is_random else None)
    if why is not None:
        return Rule("cache", "cannot tell", "config.use_cache", "-", message=why)
    with tests.attempt("the model does not read with a cache: "):
        prefix = _prefix(session, written)
        tokens = prefix.lengths[written]
        every, limit = torch.ones((1, tokens), dtype=torch.bool), session.other_shape
        base = _read(session, prefix, written, name, [tokens], cached=False)
        halves = [tokens // 2 + 1, tokens - tokens // 2 - 1] if tokens > 2 else [tokens]
        for what, sizes in (("reading token by token", [1] * tokens), ("reading in two chunks", halves)):
            changed = _read(session, prefix, written, name, sizes)
            tests.add(what, movement(base, changed, lambda _, length: every if length == tokens else None, limit))
    return "config.use_cache"


def _prefix(session: Session, written: str) -> TokenBatch:
    """The first tokens of the first sequence, and what an encoder reads whole."""
    windows = session.declared.window.value if session.declared.window is not None else ()
    beyond = [one.size + 8 for one in windows if isinstance(one, Window) and one.size + 8 <= BEYOND]
    real = session.real(written)[0]
    count = min(max([PREFIX, *beyond]), int(real.sum()))
    first = int(real.int().argmax())
    one = session.batch.of_sequences(torch.zeros(1, dtype=torch.int64))
    kept = {written: one[written][:, first : first + count]}
    if session.batch.second is not None:
        encoder = ("attention_mask", session.batch.tokens)
        kept |= {name: one[name] for name in encoder if name in one.arguments}
    return TokenBatch(kept, 0, session.batch.tokens, session.batch.second)


def _read(
    session: Session, prefix: TokenBatch, written: str, name: str, sizes: Sequence[int], *, cached: bool = True
) -> Trace:
    """Outputs of the tokens that are written, read in parts of these sizes."""
    found: Trace | None = None
    cache, start = None, 0
    for size in sizes:
        own: dict[str, Any] = {written: prefix[written][:, start : start + size], "use_cache": cached}
        own |= {} if cache is None else {name: cache}
        trace = session.runner.trace(prefix.with_arguments(**own), cache=name)
        cache, start = trace.cache, start + size
        if cached and cache is None and start < sum(sizes):
            raise ValueError(f"its result has no {name}")
        found = trace if found is None else found.join(trace)
    assert found is not None
    return found


RULE = RuleKind(
    "cache",
    judge,
    "Look at the positions and the mask of a pass that begins with a cache, and at what the cache keeps.",
)
