"""``attemper.check``: whether every token sees exactly what it should."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import InputError
from attemper.monitor.checked_model import check_model, title
from attemper.monitor.forward import observation, run
from attemper.monitor.model_state import ModelState, ObstacleError, random_numbers
from attemper.monitor.shadow import devices_of
from attemper.results.check import Check
from attemper.rules import batch as of_batch
from attemper.rules import cache as of_cache
from attemper.rules import causal as of_causal
from attemper.rules import documents as of_documents
from attemper.rules import padding as of_padding
from attemper.rules import repeat as of_repeat
from attemper.rules import scores as of_scores
from attemper.rules import window as of_window
from attemper.rules.declared import declare
from attemper.rules.keys import KeyCollector
from attemper.rules.moves import Noise, Runner, Trace, relative_change
from attemper.rules.session import Session
from attemper.rules.token_batch import TokenBatch
from attemper.sites.find import all_sites
from attemper.sites.names import Names, names_of

RULES = tuple(
    rule.RULE for rule in (of_causal, of_documents, of_padding, of_window, of_batch, of_cache, of_repeat, of_scores)
)
"""All rules, in the order in which they are shown. A rule is a row here and a file."""


def check(
    model: nn.Module,
    batch: Any,
    *,
    documents: Tensor | None = None,
    causal: bool | None = None,
    window: int | None = None,
    padding: Tensor | None = None,
    name: str | None = None,
) -> Check:
    """Whether every token of ``batch`` sees exactly what it should: rule by rule, what is declared and what is seen. ::

        report = attemper.check(model, batch)
        report.raise_if_broken()

    What is declared comes from the arguments, from the batch and from the model's configuration, in this order. What is
    seen comes from two sides: the keys that each row of every attention sees, exactly, from one pass; and what moves
    when tokens are exchanged, block by block, which needs nothing of the model but that it takes a batch. The model
    runs some twenty times, without gradients, in the mode that it is in; what a pass changes in it is put back.
    docs/tasks/does-my-model-attend-where-it-should.md says what each rule means.

    Args:
        model: any module.
        batch: a dict (``model(**batch)``), tuple or list (``model(*batch)``), or tensor (``model(batch)``), with ids
            [B, T] or vectors [B, T, E].
        documents: the number of each token's document, [B, T] whole numbers (below 0: of none), or ``cu_seqlens``
            [documents + 1], where each begins.
        causal: whether a token may see no later one.
        window: how many keys a row of every layer sees, its own among them.
        padding: [B, T], 1 for a token and 0 for padding.
        name: of the model in the report; None for its class and what it was loaded from.

    Returns:
        :class:`attemper.types.Check`: ``.rules``, ``.broken``, ``.raise_if_broken()``, ``.to_json()``,
        ``.to_html(path)``; prints as a table.

    Raises:
        InputError: the model is no module, or TorchScript; the batch holds no tokens; an argument is of another shape;
            or a pass could not be taken back.
    """
    check_model("check", model)
    names, tokens = names_of(model), TokenBatch.of("check", model, batch)
    given = {"documents": documents, "causal": causal, "window": window, "padding": padding}
    declared = declare("check", model, names, tokens, **given)
    try:
        state = ModelState(model, tokens.arguments)
    except ObstacleError as error:
        raise InputError(f"check runs the model many times, and {error}.") from error
    with random_numbers(devices_of(model)):
        try:
            collector = KeyCollector(model, declared)
            with observation(model, collector):
                run("check: the batch", model, batch, collector)
            session = _session(model, names, tokens, collector)
            rules = tuple(kind.verdict(session) for kind in RULES)
        finally:
            left = state.put_back()
    if left is not None:
        raise InputError(f"check runs the model many times, and {left}. The model is not as it was: load it again.")
    found = session.keys
    sites = tuple(dict.fromkeys(site for judged in found.judged.values() for site in judged))
    forwards = session.runner.forwards + 1
    return Check(name or title(model), rules, tokens.shape, forwards, sites, dict(found.unread))


def _session(model: nn.Module, names: Names, batch: TokenBatch, collector: KeyCollector) -> Session:
    """The passes that every rule needs: the batch as it is, twice, and some of its sequences."""
    mixing = [site.name for site in all_sites(names)] + list(collector.found.unread)
    runner = Runner(model, names, [name for name in mixing if name in names.values()])
    base, again = runner.trace(batch), runner.trace(batch, seed=False)
    modules = {name: module for module, name in names.items()}
    session = Session(
        model, batch, collector.declared, runner, collector.found, base, again, Noise(base.eps), modules=modules
    )
    session.is_random = _apart(session, base, again) > session.noise.other_shape("")
    if session.is_random and _apart(session, base, runner.trace(batch)) > session.noise.other_shape(""):
        session.obstacle = "two passes of the same batch differ, also with the same random numbers"
    elif not session.is_random:
        session.noise = Noise(base.eps, _noise(session))
    return session


def _apart(session: Session, one: Trace, two: Trace) -> float:
    """The largest change of any row of a token between two passes."""
    return max(_changes(session, one, two).values(), default=0.0)


def _changes(session: Session, one: Trace, two: Trace, sequences: slice = slice(None)) -> dict[str, float]:
    """Block -> the largest relative change of a token."""
    stay, found = session.stay(), {}
    for name, rows in one.rows.items():
        marks, other = stay(name, rows.shape[1]), two.rows.get(name)
        own = rows[sequences]
        if marks is None or other is None or other.shape[1] != own.shape[1]:
            continue
        change = relative_change(own, other[: len(own)]) * marks[sequences]
        found[name] = float(change.max()) if change.numel() else 0.0
    return found


def _noise(session: Session) -> dict[str, float]:
    """How far blocks move if a batch has another size, and nothing else changes."""
    sequences = session.batch.shape[0]
    half = -(-sequences // 2)
    chosen = torch.arange(half) if sequences > 1 else torch.zeros(2, dtype=torch.int64)
    try:
        other = session.runner.trace(session.batch.of_sequences(chosen), compiled=False)
    except Exception:  # whatever a model raises for another batch: what is packed has no sequences to leave out
        return {}
    return _changes(session, session.base, other, slice(0, half))
