"""Other sequences of the batch move nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from attemper.rules.moves import Trace, movement
from attemper.rules.session import CannotExchangeError, RuleKind, Session, Tests
from attemper.rules.token_batch import TokenBatch


def judge(session: Session, tests: Tests) -> str:
    batch, base, sequences = session.batch, session.base, session.batch.shape[0]
    try:
        if session.obstacle is not None:
            raise CannotExchangeError(session.obstacle)
        if sequences == 1:
            if any(name.startswith("cu_seq") for name in batch.arguments):
                raise CannotExchangeError("what is packed by cu_seqlens is one sequence")
            sequences = 3 if batch.shape[1] == 2 else 2  # never as many as tokens
            batch = batch.of_sequences(torch.zeros(sequences, dtype=torch.int64))
            base = session.runner.trace(batch)
        half = torch.arange(sequences) < -(-sequences // 2)
        for keep in (half, ~half):
            _test(session, tests, batch, base, keep)
    except CannotExchangeError as error:
        tests.reasons.append(str(error))
    except Exception as error:  # whatever a model raises for a batch of another size
        tests.reasons.append(f"the model does not take two sequences: {type(error).__name__}: {error}"[:200])
    return "other sequences move nothing (always)"


def _test(session: Session, tests: Tests, batch: TokenBatch, base: Trace, keep: Tensor) -> None:
    """Exchanges all tokens of the sequences that are not in ``keep`` [B]."""
    changed, names = batch, list(batch.lengths)
    for name in names:
        places = (~keep).to(batch.device)[:, None].expand(-1, batch.lengths[name])
        changed = session.exchange(name, places, changed)
    stay = session.stay(**{name: session.real(name).cpu() & keep[:, None] for name in names})
    found = movement(base, session.runner.trace(changed), stay, session.noise.same_shape, keep)
    tests.add("exchanging other sequences", found)


RULE = RuleKind(
    "batch",
    judge,
    "Statistics of the batch (BatchNorm in training mode), experts of limited capacity and pooling over the batch do "
    "this: evaluate with statistics of the training, and without a limit.",
)
