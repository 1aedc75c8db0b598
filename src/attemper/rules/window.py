"""Rows see as many keys as their layer's window has: layers with one and layers without."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.readings.labels import layer_of
from attemper.results.check import Rule
from attemper.rules.moves import Stay
from attemper.rules.session import CannotExchangeError, RuleKind, Session, Tests
from attemper.text import count


def judge(session: Session) -> Rule:
    declared, before = session.declared.window, session.runner.forwards
    if declared is None:
        return session.none("window")
    tokens, windows = session.batch.shape[1], declared.value
    some = sorted({str(one) for one in windows if one is not None})
    said = f"{' and '.join(some) or 'no window'} ({declared.source})"
    if not some and not session.keys.judged["window"]:
        return session.none("window")
    if some and all(one.size >= tokens for one in windows if one is not None):
        message = f"the window is not shorter than the {count(tokens, 'token')} of the batch"
        return Rule("window", "cannot tell", said, "-", message=message)
    tests = Tests()
    first = windows[0]
    if first is not None and len(set(windows)) == 1 and not first.chunked and not session.keys.unread:
        reach = first.size - 1 if session.declared.is_causal("") or _all_causal(session) else first.size
        _test(session, tests, reach)
    advice = "Give each layer the window of the configuration: the kernel's size, whether it counts the row's own key, and a mask that has it."
    return session.conclude("window", said, "outside of the window", tests, before, advice)


def _all_causal(session: Session) -> bool:
    causal = session.declared.causal
    return causal is not None and all(causal.value.values())


def _test(session: Session, tests: Tests, reach: int) -> None:
    """Exchanges the first tokens: rows further on than windows reach, layer after layer, must not move."""
    name, tokens = session.batch.tokens, session.batch.shape[1]
    layers = [number for one in session.base.rows if (number := layer_of(one)) is not None]
    deepest = max(layers, default=len(session.keys.judged["window"]) - 1)
    cut = max((tokens - reach) // 2, 1)
    places = torch.arange(tokens, device=session.batch.device)
    if deepest < 0 or cut + reach >= tokens:
        return
    try:
        marks = (places < cut) & session.exchangeable(name)
    except CannotExchangeError as error:
        tests.reasons.append(str(error))
        return
    session.test(tests, f"exchanging the first {count(cut, 'token')}", name, marks, _stay(session, cut, reach, deepest))


def _stay(session: Session, cut: int, reach: int, deepest: int) -> Stay:
    real, tokens = session.real(session.batch.tokens).cpu(), session.batch.shape[1]

    def stay(block: str, length: int) -> Tensor | None:
        layer = layer_of(block)
        # What stands beside the layers may be before the first of them or behind the last.
        passed = (deepest if layer is None else layer) + 1
        return real & (torch.arange(tokens) >= cut + passed * reach) if length == tokens else None

    return stay


RULE = RuleKind("window", judge)
