"""What stands in padded places moves no token, and adding padding on either side moves none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attemper.rules.declared import Said
from attemper.rules.moves import CannotExchangeError, movement, with_others
from attemper.rules.session import RuleKind, Session, Tests
from attemper.rules.token_batch import HIDING, TokenBatch, takes

ADDED = 5
"""Padded places that are added."""
POSITIONS = (
    "Positions are counted from the left end, padding among them: pass position_ids that begin at the first token of "
    "each sequence, or pad on the right."
)


def judge(session: Session, tests: Tests) -> str:
    declared, real = session.declaration("padding"), session.real(session.batch.tokens)
    padded = int((~real).sum())
    if session.obstacle is not None:
        tests.reasons.append(session.obstacle)
    elif padded:
        with tests.attempt("the model does not take it: "):
            _exchange(session, tests, real)
    for side in ("right", "left") if session.obstacle is None else ():
        with tests.attempt("", f"padding added on the {side} ({{}})"):
            _add(session, tests, declared, side)
    if tests.found is not None and isinstance(session.modules.get(tests.found.site), nn.Embedding):
        tests.cause = POSITIONS  # ids have the same embeddings, so this is a table of positions
    return f"{padded} padded of {real.numel()} ({declared.source})"


def _exchange(session: Session, tests: Tests, real: Tensor) -> None:
    """Other things in padded places: embeddings where ids are read, since code may look for the id of padding."""
    name, tokens = session.batch.tokens, session.batch[session.batch.tokens]
    changed = None if tokens.is_floating_point() else session.runner.trace(session.batch, replace=~real)
    if changed is None or not session.runner.replaced:
        ids = tokens.flip(0, 1)[:, :1]
        other = with_others(tokens, ~real) if tokens.is_floating_point() else torch.where(real, tokens, ids)
        changed = session.runner.trace(session.batch.with_arguments(**{name: other}))
    whole = torch.ones(real.shape[0], dtype=torch.bool)
    found = movement(session.base, changed, session.stay(), session.same_shape, whole)
    tests.add("exchanging what stands in padded places", found)


def _add(session: Session, tests: Tests, declared: Said[Tensor], side: str) -> None:
    if session.is_random:
        raise CannotExchangeError("two runs of the batch differ")
    padded = _with_padding(session, side, declared)
    changed = session.runner.trace(padded)
    (sequences, tokens), real = session.batch.shape, session.real(session.batch.tokens)
    changed = changed.cut(ADDED if side == "left" else 0, tokens, tokens + ADDED)
    # A model that is used with padding on the right may give what its first place has as the whole.
    usual = side == "right" or not bool(real[:, 0].all())
    whole = torch.ones(sequences, dtype=torch.bool) if usual else None
    found = movement(session.base, changed, session.stay(), session.other_shape, whole)
    if found is not None and "position_ids" in padded.arguments.keys() - session.batch.arguments.keys():
        same = session.batch.with_arguments(position_ids=(real.long().cumsum(1) - 1).clamp(min=0))
        if movement(session.base, session.runner.trace(same), session.stay(), session.other_shape) is not None:
            raise CannotExchangeError("the model's own positions do not count from 0")
    tests.add(f"adding padding on the {side}", found)


def _with_padding(session: Session, side: str, declared: Said[Tensor]) -> TokenBatch:
    """The batch with padding on a side."""
    batch, (size, tokens), real = session.batch, session.batch.shape, session.real(session.batch.tokens)
    tensors = {name: part for name, part in batch.arguments.items() if isinstance(part, Tensor)}
    if declared.source.partition(" ")[0] not in tensors and not any(_is_mask(part, real) for part in tensors.values()):
        raise CannotExchangeError("no argument of the batch is the mask")
    changes: dict[str, Tensor] = {}
    for name, part in tensors.items():
        if name.startswith("decoder_") or name == batch.second or tokens not in part.shape:
            continue
        if part.shape[:2] not in ((size, tokens), (1, tokens)) or part.shape[2:].count(tokens):
            raise CannotExchangeError(f"{name} has tokens along other dimensions")
        added = _filling(session, name, part, real).to(part).expand(part.shape[0], ADDED, *part.shape[2:])
        changes[name] = torch.cat([added, part] if side == "left" else [part, added], 1)
    # Positions that are counted from the ids themselves, as RoBERTa's, need none.
    tables = ((name, one) for name, one in session.modules.items() if isinstance(one, nn.Embedding))
    counted = any("position" in name and one.padding_idx is not None for name, one in tables)
    if side == "left" and "position_ids" not in tensors and bool(real[:, 0].all()) and not counted:
        if not takes(session.model, "position_ids"):
            raise CannotExchangeError("the batch has none there, and the model takes no position_ids")
        marks = torch.nn.functional.pad(real.long(), (ADDED, 0))
        changes["position_ids"] = (marks.cumsum(1) - 1).clamp(min=0)
    return batch.with_arguments(**changes)


def _is_mask(part: Tensor, real: Tensor) -> bool:
    same = part.shape == real.shape and part.dtype == torch.bool and not bool(real.all())
    return same and (torch.equal(part, real) or torch.equal(part, ~real))


def _filling(session: Session, name: str, part: Tensor, real: Tensor) -> Tensor:
    """What an argument has in places of padding: what stands there already, or what its name says."""
    pad = getattr(session.config, "pad_token_id", None)
    is_ids = name == session.batch.tokens and not part.is_floating_point()
    if is_ids and isinstance(pad, int) and pad >= 0:
        return torch.tensor(pad)
    if part.shape[:2] == real.shape and not bool(real.all()):
        return part[~real][0]
    if name in HIDING:
        return torch.tensor(-torch.inf if part.is_floating_point() else 1)
    return part[0, 0] if is_ids else torch.tensor(-100 if "label" in name else 0)


RULE = RuleKind(
    "padding",
    judge,
    "Give the mask to whatever mixes tokens, also pooling, convolutions and routers; with padding on the left give "
    "position_ids that begin at the first token.",
    "of padding",
)
