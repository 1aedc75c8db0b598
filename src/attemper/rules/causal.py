"""No token moves an earlier one."""

from __future__ import annotations

import torch

from attemper.results.check import Rule
from attemper.rules.session import CannotExchangeError, RuleKind, Session, Tests

CUTS = (1, 2, 3)
"""Quarters of the sequence behind which all tokens are exchanged."""


def judge(session: Session) -> Rule:
    declared, before = session.declared.causal, session.runner.forwards
    if declared is None or not any(declared.value.values()):
        return session.none("causal", "" if declared is None else f"{declared.source}: rows see later keys, too")
    name, tests = session.batch.second or session.batch.tokens, Tests()
    tokens = session.batch.lengths[name]
    places = torch.arange(tokens, device=session.batch.device)
    # At odd places: a leak within blocks of an even size shows.
    for cut in sorted({min(tokens * quarter // 4 | 1, tokens - 1) for quarter in CUTS} - {0}):
        try:
            marks = (places >= cut) & session.exchangeable(name)
        except CannotExchangeError as error:
            tests.reasons.append(str(error))
            break
        stay = session.stay(**{name: (places < cut) & session.real(name)})
        session.test(tests, f"exchanging tokens from place {cut} on", name, marks, stay)
    advice = "Give the attention is_causal=True or a mask that hides later keys; a recurrent or convolving layer may only look back."
    return session.conclude("causal", declared.source, "later tokens", tests, before, advice)


RULE = RuleKind("causal", judge)
