"""Rows see as many keys as their layer's window has: layers with one and layers without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from attemper.readings.labels import layer_of
from attemper.results.check import Rule
from attemper.rules.moves import changes, movement
from attemper.rules.session import NotDeclaredError, RuleKind, Session, Tests
from attemper.sites.declared import Window
from attemper.text import count


def judge(session: Session, tests: Tests) -> str | Rule:
    declared, tokens = session.declaration("window"), session.batch.shape[1]
    windows = [one for one in declared.value if isinstance(one, Window)]
    tests.reasons += [one for one in declared.value if isinstance(one, str)]
    if not windows and not session.keys.judged["window"]:
        raise NotDeclaredError("; ".join(dict.fromkeys(tests.reasons)) or "no layer has a window")
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
    """Exchanges the first tokens in the order of ``places`` [T], and looks at those behind the reach of each block."""
    tokens, name, base = len(places), session.batch.tokens, session.base
    passed = {one for block in base.rows if (one := _pass_of(block))[0] is not None}
    deepest = max((number + 1 for number, _ in passed if number is not None), default=0)
    layers = max(deepest, len(passed)) if passed else len(session.keys.judged["window"])
    cut, real = max((tokens - reach) // 2, 1), session.real(name).cpu()
    if not layers or cut + reach >= tokens:
        return
    with tests.attempt("the model does not take it: "):
        changed = session.runner.trace(session.exchange(name, (places < cut).to(session.batch.device)))
        moved = changes(base, changed, lambda _, length: real if length == tokens else None)
        ends = {block: real & (places > end) for block, end in _ends(moved, reach, places, cut - 1, layers)}
        found = movement(base, changed, lambda block, _: ends.get(block), session.same_shape)
        tests.add(f"exchanging the {'last' if places[0] else 'first'} {count(cut, 'token')}", found)


def _ends(
    moved: Iterable[tuple[str, Tensor]], reach: int, places: Tensor, last: int, layers: int
) -> Iterator[tuple[str, int]]:
    """Each block, and the last place that it may move where all up to ``last`` were exchanged: a layer as far as its
    window goes beyond those that moved before it. So a narrower layer before it hides nothing.
    """
    layer, before, beyond = None, last, last + layers * reach
    for block, change in moved:
        number, call = _pass_of(block)
        if number is not None and (number, call) != layer:
            layer, before = (number, call), last
        # What stands beside the layers may be behind the last of them.
        end = beyond if number is None else before + reach
        yield block, end
        last = max(last, min(end, int((places * (change > 0)).max())))


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
