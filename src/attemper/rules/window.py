"""Rows see as many keys as their layer's window has: layers with one and layers without."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.readings.labels import layer_of
from attemper.results.check import Rule
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
        _test(session, tests, windows[0].size - (bool(causal) and all(causal.values())))
    return said


def _test(session: Session, tests: Tests, reach: int) -> None:
    """Exchanges the first tokens: rows further on than windows reach, layer after layer, must not move."""
    tokens = session.batch.shape[1]
    layers = [number for one in session.base.rows if (number := layer_of(one)) is not None]
    deepest = max(layers, default=len(session.keys.judged["window"]) - 1)
    cut, places = max((tokens - reach) // 2, 1), torch.arange(tokens)
    real = session.real(session.batch.tokens).cpu()

    def stay(block: str, length: int) -> Tensor | None:
        layer = layer_of(block)
        # What stands beside the layers may be behind the last of them.
        passed = (deepest if layer is None else layer) + 1
        return real & (places >= cut + passed * reach) if length == tokens else None

    if deepest >= 0 and cut + reach < tokens:
        first, what = (places < cut).to(session.batch.device), f"exchanging the first {count(cut, 'token')}"
        session.test(tests, what, session.batch.tokens, first, stay)


RULE = RuleKind(
    "window",
    judge,
    "Give each layer the window of the configuration: look at the kernel's size, whether it counts the row's own key, "
    "and the mask.",
    "outside of the window",
)
