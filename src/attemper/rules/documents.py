"""No token moves one of another document of its sequence."""

from __future__ import annotations

from attemper.results.check import Rule
from attemper.rules.session import RuleKind, Session, Tests
from attemper.text import count


def judge(session: Session) -> Rule:
    declared, before = session.declared.documents, session.runner.forwards
    if declared is None:
        return session.none("documents")
    name, tests = session.batch.tokens, Tests()
    documents = declared.value.to(session.batch.device)
    number = documents.unique(return_inverse=True)[1]  # numbered in their order
    most = max(len(row[row >= 0].unique()) for row in documents)
    said = f"{count(most, 'document')} in a sequence ({declared.source})"
    if most < 2:
        return Rule("documents", "cannot tell", said, "-", message="no sequence has two documents")
    there = (documents >= 0) & session.real(name)
    for group in (0, 1):
        own = (number % 2 == group) & there
        stay = session.stay(**{name: ~own & there})
        session.test(
            tests, f"exchanging {'every second document' if group else 'the other documents'}", name, own, stay
        )
    advice = (
        "Give the attention what separates them: in transformers position_ids that start anew with use_cache=False and "
        "no attention_mask, or a mask that is block-diagonal; in flash-attention cu_seqlens. A recurrent or convolving "
        "layer needs its state reset (seq_idx, cu_seqlens)."
    )
    return session.conclude("documents", said, "of other documents", tests, before, advice)


RULE = RuleKind("documents", judge)
