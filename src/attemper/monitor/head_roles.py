"""The scores of every role for all heads of a call, on the first text that it holds; and a text of repeated tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from unicodedata import category

import torch
from torch import Tensor, nn

from attemper.backends import reference
from attemper.backends.contract import UNBOUNDED, Problem
from attemper.call.attn_mask import shows
from attemper.errors import InputError
from attemper.monitor.exact_weights import each_once, head_groups, naming, weights
from attemper.readings.roles import ROLES, Role, RoleText
from attemper.text import count

MOST_TOKENS = 256
"""Rows of the text that are read, from its first token on."""
MOST_REPEATED = 64
"""Random tokens that a text of repeated tokens repeats."""
Scores = dict[str, tuple[float | None, ...]]
"""Role -> the score of each head; None where it is not known."""


class RoleReader:
    """Scores of calls. ``tokenizer``: names ids, by which separators are told; None: nobody can tell. ``InputError``:
    the tokenizer cannot name an id.
    """

    def __init__(self, tokenizer: Any = None, caller: str = "scan") -> None:
        self._tokenizer = tokenizer
        self._names = naming(tokenizer, caller)

    def scores(
        self,
        problem: Problem,
        kind: str,
        real: Tensor | None,
        ids: tuple[Tensor | None, Tensor | None],
        *,
        sequence: int = 0,
        heads: range | None = None,
    ) -> Scores:
        """The scores of a call's heads, all unless told, on one sequence.

        Args:
            problem: of a call of all its rows.
            kind: "self" or "cross".
            real: [B, Q] bool, which queries are tokens; None for all.
            ids: of queries [B, Q] and keys [B, K], -1 where one is not known; None where none is.
        """
        if 0 in (*problem.query.shape[:3], problem.key.shape[2]):
            return {}
        counted = None if real is None else _of(sequence, real).cpu()
        start = 0 if counted is None or problem.packed else int(counted.int().argmax())
        keys = slice(_last_key(problem, start + MOST_TOKENS, sequence))
        rows = slice(start, start + MOST_TOKENS)
        own, others = (None if part is None else _of(sequence, part).cpu() for part in ids)
        text = self._places(problem, kind, rows, keys, sequence) | self._tokens(own, others, rows, keys)
        heads = range(problem.query.shape[1]) if heads is None else heads
        parts: list[list[Any]] = []
        for group in head_groups(problem, keys.stop * (rows.stop - rows.start), heads):
            found, seen = weights(problem, sequence, group, rows, keys)
            made = _role_text(found, seen, None if counted is None else counted[rows], text)
            parts.append(_scores(made))
        return {
            role.name: tuple(_numbers(columns, len(heads)))
            for role, columns in zip(ROLES, zip(*parts, strict=True), strict=True)
        }

    def _places(self, problem: Problem, kind: str, rows: slice, keys: slice, sequence: int) -> dict[str, Any]:
        """What of a ``RoleText`` follows from places."""
        places = reference.key_places(problem).cpu()[keys]
        first = places == 0 if problem.first_keys is None else _of(sequence, problem.first_keys)[keys].cpu()
        same = problem.query.shape[2] == problem.key.shape[2]
        known = same or problem.bottom_right or min(problem.left, problem.right) < UNBOUNDED
        if kind == "cross" or not known:
            return {"first": first}
        return {"first": first, "distance": reference.positions(problem)[0].cpu()[rows, None] - places}

    def _tokens(self, own: Tensor | None, others: Tensor | None, rows: slice, keys: slice) -> dict[str, Any]:
        """What of a ``RoleText`` follows from tokens."""
        found = {}
        if others is not None:
            others = others[keys]
            if self._names is not None:
                found["separators"] = self._is_separator(others)
        if own is not None and others is not None:
            before = torch.cat([others.new_full((1,), -1), others[:-1]])
            own = own[rows, None]
            found |= {"same_token": own == others, "after_same_token": own == before}
        return found

    def _is_separator(self, ids: Tensor) -> Tensor:
        """[K] bool: ends of sentences and texts by their ids, and tokens of nothing but punctuation and separators."""
        names = ("bos", "cls", "eos", "sep")
        special = {getattr(self._tokenizer, f"{name}_token_id", None) for name in names}
        known = [number for number in dict.fromkeys(ids.tolist()) if number >= 0]
        assert self._names is not None
        found = [one for one, name in zip(known, self._names(known), strict=True) if one in special or _separates(name)]
        return torch.isin(ids, ids.new_tensor(found))


_SPACES = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
"""How vocabularies write what cannot be seen."""


def _separates(token: str) -> bool:
    """Whether all its characters are of Unicode's categories P (punctuation), Z (separators) and C (control)."""
    return bool(token) and all(category(letter)[0] in "PZC" for letter in token.translate(_SPACES))


def _role_text(found: Tensor, seen: Tensor, counted: Tensor | None, text: Mapping[str, Any]) -> RoleText:
    """Weights [H, Q, K] so that each row that counts sums to 1: without NaN, with a sum above 0, of ``counted`` [Q]."""
    mass = found.sum(-1, keepdim=True)
    p, rows = found, mass > 0  # neither empty nor NaN
    if not bool(((mass - 1).abs() < 1e-12).all()):
        p = torch.where(rows, found, 0.0) / torch.where(rows, mass, 1.0)
    visible = each_once(seen)
    entropy = p.clamp_min(1e-300).log_().mul_(p).sum(-1) / -torch.log(visible.sum(-1).clamp(min=2).double())
    counts = rows[..., 0] if counted is None else rows[..., 0] & counted
    return RoleText(p, visible, counts, entropy, **text)


def _scores(text: RoleText) -> list[Tensor | None]:
    """The score of each role for the heads of a text. The weights are read once for all."""
    found = {role.name: role.values(text) for role in ROLES if role.values is not None}
    known = {name: values.expand(text.weights.shape[1:]) for name, values in found.items() if values is not None}
    weighed = torch.einsum("hqk,rqk->rhq", text.weights, torch.stack([*known.values()]).to(text.weights))
    sums = dict(zip(known, weighed, strict=True))

    def score(role: Role) -> Tensor | None:
        unknown = role.values is not None and role.name not in sums
        return None if unknown else role.score(text, found.get(role.name), sums.get(role.name))

    return [score(role) for role in ROLES]


def _numbers(columns: tuple[Any, ...], heads: int) -> list[float | None]:
    """The scores of all heads, of parts [heads of the part]; None where one is not finite."""
    if columns[0] is None:
        return [None] * heads
    return [value if math.isfinite(value) else None for value in torch.cat(columns).tolist()]


def _of(sequence: int, part: Tensor) -> Tensor:
    """Of [batch or 1, ...] what is of this sequence."""
    return part[sequence if part.shape[0] > 1 else 0]


def _last_key(problem: Problem, rows: int, sequence: int) -> int:
    """How many keys, from the first on, the first ``rows`` rows see at most, by causality or a mask."""
    keys = problem.key.shape[2]
    if problem.right < UNBOUNDED and not problem.packed:
        last = reference.positions(problem)[0][:rows].max() if rows and problem.query.shape[2] else 0
        keys = min(keys, max(0, int(last) + problem.right + 1))
    if problem.mask is not None and problem.mask.shape[3] > 1:
        mask = _of(sequence, problem.mask)[:, :rows, :keys]
        seen = shows(mask).flatten(0, 1).any(0).nonzero()
        keys = int(seen.max()) + 1 if len(seen) else 0
    return max(1, keys)


def repeated_text(model: nn.Module, batch: Any) -> Any:
    """A batch like ``batch`` of one text: its first token, then random tokens of the model's vocabulary, twice."""
    first = (
        batch.get("input_ids") if isinstance(batch, Mapping) else batch[0] if isinstance(batch, tuple | list) else batch
    )
    if not isinstance(first, Tensor) or first.dim() != 2 or first.is_floating_point():
        raise InputError(
            'scan(roles="repeated") needs ids of tokens, "input_ids" of a dict or the first argument, [B, tokens]: '
            "roles=True takes what the model is given."
        )
    half = min(MOST_REPEATED, (first.shape[1] - 1) // 2)
    vocabulary = _vocabulary(model)
    if half < 2 or vocabulary < half:
        raise InputError(
            'scan(roles="repeated") repeats random tokens within the length of the first batch: '
            f"{count(first.shape[1], 'token')} of a vocabulary of {vocabulary:,} are too few."
        )
    ids = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:half].to(first)
    text = torch.cat([first[0, :1], ids, ids])[None]
    if isinstance(batch, Tensor):
        return text
    if not isinstance(batch, Mapping):
        return (text, *(part[:1] if isinstance(part, Tensor) else part for part in batch[1:]))
    others = {
        name: part[:1] if isinstance(part, Tensor) else part
        for name, part in batch.items()
        # What follows the text token by token, such as masks and positions, is what the model makes of it itself.
        if not isinstance(part, Tensor) or name.startswith("decoder_") or part.shape[:2] != first.shape
    }
    return others | {"input_ids": text}


def _vocabulary(model: nn.Module) -> int:
    """How many ids a model knows."""
    try:
        return int(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise InputError(
            'scan(roles="repeated") draws tokens from the vocabulary of the model, which has no '
            "get_input_embeddings(): pass a text with repeats and roles=True."
        ) from error
