"""What stands in padded places moves no token, and adding padding on either side moves none."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attemper.rules.declared import Said
from attemper.rules.moves import movement
from attemper.rules.session import CannotExchangeError, RuleKind, Session, Tests
from attemper.rules.token_batch import HIDING, TokenBatch, takes

ADDED = 5
"""Padded places that are added."""


def judge(session: Session, tests: Tests) -> str:
    declared, real = session.declaration("padding"), session.real(session.batch.tokens)
    padded = int((~real).sum())
    if session.obstacle is not None:
        tests.reasons.append(session.obstacle)
    elif padded:
        _exchange(session, tests, real)
    for side in ("right", "left") if session.obstacle is None else ():
        _add(session, tests, declared, side)
    return f"{padded} padded of {real.numel()} ({declared.source})"


def _exchange(session: Session, tests: Tests, real: Tensor) -> None:
    """Other things in padded places: embeddings where ids are read, since code may look for the id of padding."""
    name = session.batch.tokens
    whole = torch.ones(real.shape[0], dtype=torch.bool)
    tokens = session.batch[name]
    changed = None if tokens.is_floating_point() else session.runner.trace(session.batch, replace=~real)
    if changed is None or not session.runner.replaced:
        drawn = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(2)).to(tokens)
        places = (~real).view(*real.shape, *(1,) * (tokens.dim() - 2))
        other = drawn if tokens.is_floating_point() else tokens.flip(0, 1)[:, :1].expand_as(tokens)
        changed = session.runner.trace(session.batch.with_arguments(**{name: torch.where(places, other, tokens)}))
    found = movement(session.base, changed, session.stay(**{name: real}), session.noise.same_shape, whole)
    tests.add("exchanging what stands in padded places", found)


def _add(session: Session, tests: Tests, declared: Said[Tensor], side: str) -> None:
    try:
        if session.is_random:
            raise CannotExchangeError("the model draws random numbers")
        changed = session.runner.trace(_with_padding(session, side, declared))
    except CannotExchangeError as error:
        tests.reasons.append(f"padding added on the {side} ({error})")
        return
    except Exception as error:  # whatever a model raises for more tokens
        tests.reasons.append(f"padding added on the {side} ({type(error).__name__}: {error}"[:200] + ")")
        return
    (sequences, tokens), real = session.batch.shape, session.real(session.batch.tokens)
    first = ADDED if side == "left" else 0
    changed = changed.cut(first, tokens, tokens + ADDED)
    # A model that is used with padding on the right may give what its first place has as the whole.
    usual = side == "right" or not bool(real[:, 0].all())
    stay, whole = session.stay(), torch.ones(sequences, dtype=torch.bool) if usual else None
    found = movement(session.base, changed, stay, session.noise.other_shape, whole)
    tests.add(f"adding padding on the {side}", found)


def _with_padding(session: Session, side: str, declared: Said[Tensor]) -> TokenBatch:
    """The batch with padding on a side.

    Raises:
        CannotExchangeError: it is not known how.
    """
    batch, shape, real = session.batch, session.batch.shape, declared.value
    mask = next((name for name in ("attention_mask", *HIDING) if name in declared.source), None)
    if mask is None:
        same = (one for one, part in batch.arguments.items() if isinstance(part, Tensor) and _is_mask(part, real))
        mask = next(same, None)
    if mask is None:
        raise CannotExchangeError("no argument of the batch is the mask")
    changes: dict[str, Tensor] = {}
    for name, part in batch.arguments.items():
        other = name.startswith("decoder_") or name == batch.second
        if not isinstance(part, Tensor) or other or shape[1] not in part.shape:
            continue
        if part.shape[:2] not in (shape, (1, shape[1])) or part.shape[2:].count(shape[1]):
            raise CannotExchangeError(f"{name} has tokens along other dimensions")
        changes[name] = _extend(part, side, _filling(session, name, part, name == mask))
    # Positions that are counted from the ids themselves, as RoBERTa's, need none.
    counted = any(
        isinstance(one, nn.Embedding) and one.padding_idx is not None and "position" in name
        for name, one in session.modules.items()
    )
    if side == "left" and "position_ids" not in batch.arguments and bool(real[:, 0].all()) and not counted:
        if not takes(session.model, "position_ids"):
            raise CannotExchangeError("the batch has none there, and the model takes no position_ids")
        marks = torch.nn.functional.pad(real.long(), (ADDED, 0))
        changes["position_ids"] = (marks.cumsum(1) - 1).clamp(min=0)
    return batch.with_arguments(**changes)


def _is_mask(part: Tensor, real: Tensor) -> bool:
    same = part.shape == real.shape and part.dtype == torch.bool and bool(real.all()) is False
    return same and (torch.equal(part, real.to(part.device)) or torch.equal(part, ~real.to(part.device)))


def _filling(session: Session, name: str, part: Tensor, is_mask: bool) -> float:
    if is_mask:
        hides = part.dtype == torch.bool and not torch.equal(part, session.real(session.batch.tokens))
        return 1.0 if hides else 0.0
    if name == session.batch.tokens and not part.is_floating_point():
        pad = getattr(session.config, "pad_token_id", None)
        return float(pad if isinstance(pad, int) and pad >= 0 else part[0, 0])
    return -100.0 if "label" in name else 0.0


def _extend(part: Tensor, side: str, value: float) -> Tensor:
    added = torch.full((part.shape[0], ADDED, *part.shape[2:]), value, device=part.device).to(part.dtype)
    return torch.cat([added, part] if side == "left" else [part, added], 1)


RULE = RuleKind(
    "padding",
    judge,
    "Give the mask to whatever mixes tokens, also pooling, convolutions and routers; with padding on the left give "
    "position_ids that begin at the first token.",
    "of padding",
)
