"""``attemper.check``: whether every token sees exactly what it should."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from attemper.errors import InputError
from attemper.monitor.checked_model import check_model, explanation, title
from attemper.monitor.forward import observation, run
from attemper.monitor.model_state import ModelState, ObstacleError, random_numbers
from attemper.monitor.shadow import devices_of
from attemper.results.check import Check
from attemper.rules.declared import declare
from attemper.rules.keys import KeyCollector
from attemper.rules.rules import RULES
from attemper.rules.session import Session
from attemper.rules.token_batch import TokenBatch
from attemper.sites.names import names_of


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
        InputError: the model is no module, TorchScript, or not loaded; the batch holds no tokens; an argument is of
            another shape; or a pass could not be taken back.
    """
    check_model("check", model)
    names, tokens = names_of(model), TokenBatch.of(model, batch)
    given = {"documents": documents, "causal": causal, "window": window, "padding": padding}
    declared = declare(model, names, tokens, given)
    try:
        state = ModelState(model, tokens.arguments)
    except ObstacleError as error:
        raise InputError(f"check runs the model many times, and {error}.") from error
    fresh = partial(_begin_anew, model, state)
    with random_numbers(devices_of(model)), state.writes, explanation("check", model):
        try:
            fresh()
            collector = KeyCollector(model, declared)
            with observation(model, collector):
                run("check: the batch", model, batch, collector)
            session = Session(model, names, tokens, declared, collector.found, fresh)
            rules = tuple(kind.verdict(session) for kind in RULES)
        finally:
            left = state.put_back()
    if left is not None:
        raise InputError(f"check runs the model many times, and {left}. The model is not as it was: load it again.")
    found = session.keys
    sites = tuple(dict.fromkeys(site for judged in found.judged.values() for site in judged))
    forwards = session.runner.forwards + 1
    return Check(name or title(model), rules, tokens.shape, forwards, sites, dict(found.unread))


def _begin_anew(model: nn.Module, state: ModelState) -> None:
    """Makes a model forget what earlier passes stored in it, as ``generate`` of transformers does: a pass with a cache
    would add the offsets of other pictures to its positions.
    """
    state.put_back()
    for module in model.modules():
        if "rope_deltas" in vars(module):
            vars(module)["rope_deltas"] = None
