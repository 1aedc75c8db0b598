"""Rows see as many keys as their layer's window has: layers with one and layers without."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.readings.labels import layer_of
from attemper.results.check import Rule
from attemper.rules.moves import changes, movement
from attemper.rules.session import NotDeclaredError, RuleKind, Session, Tests
from attemper.text import count


def judge(session: Session, tests: Tests) -> str | Rule:
    declared, tokens = session.declaration("window"), session.batch.shape[1]
    windows = [one for one in declared.value if one is not None]
    if not windows and not session.keys.judged["window"]:
        raise NotDeclaredError("no layer has a window")
    said = f"{' and '.join(sorted({str(one) for one in windows})) or 'no window'} ({declared.source})"
    if windows and all(one.size >= tokens for one in windows):
        message = f"the window is not shorter than the {count(tokens, 'token')} of the batch"
        return Rule("window", "cannot tell", said, "-", message=message)
    alike = len(windows) == len(declared.value) and len(set(windows)) == 1
    if alike and not windows[0].chunked and not session.keys.unread:
        causal = session.declared.causal.value
        back = bool(causal) and all(causal.values())
        for places in (torch.arange(tokens), torch.arange(tokens).flip(0))[: 1 if back else 2]:
            _test(session, tests, windows[0].size - back, places)
    return said


def _test(session: Session, tests: Tests, reach: int, places: Tensor) -> None:
    """Exchanges the first tokens in the order of ``places`` [T]. A layer may move rows as far as its window goes beyond
    those that moved before it, whatever its own could have moved: a narrower layer before it hides nothing.
    """
    tokens, layer = len(places), None
    bounds: dict[str, int] = {}
    passed = {one for block in session.base.rows if (one := _pass_of(block))[0] is not None}
    deepest = max((number + 1 for number, _ in passed if number is not None), default=0)
    layers = max(deepest, len(passed)) if passed else len(session.keys.judged["window"])
    cut, real = max((tokens - reach) // 2, 1), session.real(session.batch.tokens).cpu()
    last = before = cut - 1
    if not layers or cut + reach >= tokens:
        return
    with tests.attempt("the model does not take it: "):
        first = (places < cut).to(session.batch.device)
        changed = session.runner.trace(session.exchange(session.batch.tokens, first))
        for block, moved in changes(session.base, changed, lambda _, length: real if length == tokens else None):
            number, call = _pass_of(block)
            if number is not None and (number, call) != layer:
                layer, before = (number, call), last
            # What stands beside the layers may be behind the last of them.
            bounds[block] = cut - 1 + layers * reach if number is None else before + reach
            last = max(last, min(bounds[block], int((places * (moved > 0)).max())))
        found = movement(
            session.base,
            changed,
            lambda block, _: real & (places > bounds[block]) if block in bounds else None,
            session.same_shape,
        )
        tests.add(f"exchanging the {'last' if places[0] else 'first'} {count(cut, 'token')}", found)


def _pass_of(block: str) -> tuple[int | None, str]:
    """The number of the layer that a block is in, and which of the layer's calls it is: a shared layer runs again."""
    return layer_of(block), block.partition("#")[2]


RULE = RuleKind(
    "window",
    judge,
    "Give each layer the window of the configuration: look at the kernel's size, whether it counts the row's own key, "
    "and the mask.",
    "outside of the window",
)
