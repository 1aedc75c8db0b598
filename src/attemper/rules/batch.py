"""Other sequences of the batch move nothing."""

from __future__ import annotations

import torch

from attemper.results.check import Rule
from attemper.rules.moves import Trace, moved
from attemper.rules.session import CannotExchangeError, RuleKind, Session, Tests
from attemper.rules.token_batch import TokenBatch


def judge(session: Session) -> Rule:
    before, tests = session.runner.forwards, Tests()
    batch, base, sequences = session.batch, session.base, session.batch.shape[0]
    try:
        if session.obstacle is not None:
            raise CannotExchangeError(session.obstacle)
        if sequences == 1:
            if any(name.startswith("cu_seq") for name in batch.arguments):
                raise CannotExchangeError("what is packed by cu_seqlens is one sequence")
            batch, sequences = batch.of_sequences(torch.zeros(2, dtype=torch.int64)), 2
            base = session.runner.trace(batch)
        for first in (True, False):
            marks = (torch.arange(sequences) < -(-sequences // 2)) == first
            _test(session, tests, batch, base, marks)
    except CannotExchangeError as error:
        tests.reasons.append(str(error))
    except Exception as error:  # whatever a model raises for a batch of another size
        tests.reasons.append(f"the model does not take two sequences: {type(error).__name__}: {error}"[:200])
    advice = (
        "Batch statistics (BatchNorm in training mode), experts of limited capacity and pooling over the batch do this: "
        "use statistics of each token, or no limit while evaluating."
    )
    return session.conclude("batch", "other sequences move nothing (always)", "", tests, before, advice)


def _test(session: Session, tests: Tests, batch: TokenBatch, base: Trace, keep: torch.Tensor) -> None:
    """Exchanges all tokens of the sequences that are not in ``keep`` [B]."""
    changed = batch
    names = [batch.tokens, *((batch.second,) if batch.second else ())]
    for name in names:
        places = (~keep).to(batch.device)[:, None].expand(keep.shape[0], batch.lengths[name])
        changed = session.exchange(name, places, changed)
    real = {name: session.real(name).cpu().expand(keep.shape[0], -1) & keep[:, None] for name in names}
    stay = session.stay(**real)
    found = moved(base, session.runner.trace(changed), stay, session.noise.same_shape, keep)
    tests.add("exchanging other sequences", found)


RULE = RuleKind("batch", judge)
