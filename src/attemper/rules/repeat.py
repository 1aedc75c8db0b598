"""Two runs are equal: dropout is off."""

from __future__ import annotations

import torch

from attemper.rules.moves import movement
from attemper.rules.session import RuleKind, Session, Tests


def judge(session: Session, tests: Tests) -> str:
    with tests.attempt("it cannot be compared: "):
        whole = torch.ones(session.batch.shape[0], dtype=torch.bool)
        found = movement(session.base, session.again, session.stay(), session.other_shape, whole)
        tests.add("running the same batch again", found)
    return "two runs are equal (always)"


RULE = RuleKind(
    "repeat",
    judge,
    "Call model.eval(). Where that does not help, code draws random numbers in evaluation, too: F.dropout without "
    "training=self.training, sampling, noise; or it stores in one pass what the next one reads.",
)
