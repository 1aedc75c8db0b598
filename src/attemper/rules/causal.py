"""No token moves an earlier one."""

from __future__ import annotations

import torch

from attemper.rules.session import NotDeclaredError, RuleKind, Session, Tests


def judge(session: Session, tests: Tests) -> str:
    declared = session.declared.causal
    if not any(declared.value.values()):
        raise NotDeclaredError(declared.source + (": rows may see later keys, too" if declared.value else ""))
    name = session.batch.second or session.batch.tokens
    tokens = session.batch.lengths[name]
    places = torch.arange(tokens, device=session.batch.device)
    # At odd places: a leak within blocks of an even size shows.
    for cut in sorted({min(tokens * quarter // 4 | 1, tokens - 1) for quarter in (1, 2, 3)} - {0}):
        stay = session.stay(**{name: (places < cut) & session.real(name)})
        session.test(tests, f"exchanging tokens from place {cut} on", name, places >= cut, stay)
    return declared.source


RULE = RuleKind(
    "causal",
    judge,
    "Give the attention is_causal=True or a mask that hides later keys; a recurrent layer or a convolution may only "
    "look back.",
    "later tokens",
)
