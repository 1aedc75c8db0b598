"""Two runs are equal: dropout is off."""

from __future__ import annotations

from attemper.results.check import Rule
from attemper.rules.moves import moved
from attemper.rules.session import RuleKind, Session, Tests


def judge(session: Session) -> Rule:
    tests, before = Tests(), session.runner.forwards - 2
    found = moved(session.base, session.again, session.stay(), session.noise.other_shape)
    tests.add("running the same batch again", found)
    advice = (
        "The model is in training mode: call model.eval()."
        if session.model.training
        else "Something draws random numbers in eval mode: F.dropout without training=self.training, sampling, noise."
    )
    rule = session.conclude("repeat", "two runs are equal (always)", "", tests, before, advice)
    return rule


RULE = RuleKind("repeat", judge)
