"""No token moves one of another document of its sequence."""

from __future__ import annotations

from attemper.results.check import Rule
from attemper.rules.session import RuleKind, Session, Tests
from attemper.text import count


def judge(session: Session, tests: Tests) -> str | Rule:
    declared, name = session.declaration("documents"), session.batch.tokens
    documents = declared.value.to(session.batch.device)
    most = max(len(row[row >= 0].unique()) for row in documents)
    said = f"{count(most, 'document')} in a sequence ({declared.source})"
    if most < 2:
        return Rule("documents", "cannot tell", said, "-", message="no sequence has two documents")
    number = documents.unique(return_inverse=True)[1]  # numbered in their order
    there = (documents >= 0) & session.real(name)
    for group, what in enumerate(("every second document", "the other documents")):
        own = (number % 2 == group) & there
        session.test(tests, f"exchanging {what}", name, own, session.stay(**{name: ~own & there}))
    return said


RULE = RuleKind(
    "documents",
    judge,
    "Give the attention what separates them: in transformers position_ids that start anew, with use_cache=False and "
    "without attention_mask, or a mask that is block-diagonal; in flash-attention cu_seqlens. The state of a recurrent "
    "layer and of a convolution has to start anew, too (seq_idx, cu_seqlens).",
    "of other documents",
)
