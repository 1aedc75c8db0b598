"""No token moves one of another document of its sequence."""

from __future__ import annotations

from attemper.readings.labels import kind_of
from attemper.results.check import Rule
from attemper.rules.session import RuleKind, Session, Tests
from attemper.text import count

ALL = (
    "Give the attention what separates them: in transformers position_ids that start anew, with use_cache=False and "
    "without attention_mask, or a mask that is block-diagonal; in flash-attention cu_seqlens."
)
REST = (
    "The batch has position_ids that start anew; transformers makes a mask of them only with use_cache=False and "
    "without attention_mask. Pass it so, or pass a mask that is block-diagonal."
)
MASK = (
    "The batch has position_ids that start anew, and the attention does not look at them: pass a mask that is "
    "block-diagonal."
)
STATE = "The state of a recurrent layer and of a convolution has to start anew, too (seq_idx, cu_seqlens)."
_STATES = {"delta rule", "state space", "linear attention", "recurrence", "convolution"}
"""Kinds of layers that carry something from token to token."""


def judge(session: Session, tests: Tests) -> str | Rule:
    declared, name = session.declaration("documents"), session.batch.tokens
    documents = declared.value.to(session.batch.device)
    most = max(len(row[row >= 0].unique()) for row in documents)
    said = f"{count(most, 'document')} in a sequence ({declared.source})"
    if most < 2:
        return Rule("documents", "cannot tell", said, "-", message="no sequence has two documents")
    tests.cause = _missing_part(session, declared.source)
    number = documents.unique(return_inverse=True)[1]  # numbered in their order
    there = (documents >= 0) & session.real(name)
    for group, what in enumerate(("every second document", "the other documents")):
        own = (number % 2 == group) & there
        session.test(tests, f"exchanging {what}", name, own, session.stay(**{name: ~own & there}))
    return said


def _missing_part(session: Session, source: str) -> str:
    """What to do, without what the batch already has, nor what is for layers that the model does not have."""
    given, advice = session.batch.arguments, ALL
    if source.startswith("position_ids"):
        advice = MASK if given.get("use_cache") is False and given.get("attention_mask") is None else REST
    if not any(kind_of(why) in _STATES for why in session.keys.unread.values()):
        return advice
    # Where no attention sees other documents, it is the states that carry them.
    return f"{advice} {STATE}" if session.keys.breaches.get("documents") else STATE


RULE = RuleKind("documents", judge, ALL, "of other documents")
