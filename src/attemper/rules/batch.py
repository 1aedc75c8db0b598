"""Other sequences of the batch move nothing."""

from __future__ import annotations

from itertools import product

import torch

from attemper.rules.moves import CannotExchangeError, movement
from attemper.rules.session import RuleKind, Session, Tests


def judge(session: Session, tests: Tests) -> str:
    batch, base, sequences = session.batch, session.base, session.batch.shape[0]
    with tests.attempt("the model does not take two sequences: "):
        if sequences == 1:
            if any(name.startswith("cu_seq") for name in batch.arguments):
                raise CannotExchangeError("what is packed by cu_seqlens is one sequence")
            sequences = 3 if batch.shape[1] == 2 else 2  # never as many as tokens
            batch = batch.of_sequences(torch.zeros(sequences, dtype=torch.int64))
            base = session.runner.trace(batch)
        half = torch.arange(sequences) < -(-sequences // 2)
        # Tokens that are all alike, too: of others, experts of limited capacity may take as many as they took.
        for alike, keep in product((False, True), (half, ~half)):
            changed = batch
            for name in batch.lengths:
                changed = session.exchange(name, (~keep).to(batch.device)[:, None], changed, alike=alike)
            stay = session.stay(**{name: session.real(name).cpu() & keep[:, None] for name in batch.lengths})
            found = movement(base, session.runner.trace(changed), stay, session.same_shape, keep)
            tests.add("exchanging other sequences" + " for one token" * alike, found)
    return "other sequences move nothing (always)"


RULE = RuleKind(
    "batch",
    judge,
    "Statistics of the batch (BatchNorm in training mode), experts of limited capacity and pooling over the batch do "
    "this: evaluate with statistics of the training, and without a limit.",
)
