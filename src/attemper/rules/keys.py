"""What rows see at every attention site, held against what is declared: exact, from one forward pass.

Masks tell which keys a row sees, block of rows after block; only rows that see forbidden keys have their scores
computed, for the weight that goes there. Nothing is as large as all rows times all keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attemper.backends import reference
from attemper.backends.contract import Problem
from attemper.call.sampling import pick
from attemper.call.seen_keys import rows_that_see
from attemper.monitor.checked_model import attention_type
from attemper.monitor.collector import Collector, PreparedCall
from attemper.monitor.options import Scope
from attemper.rules.declared import RULES_OF_KEYS, Declaration
from attemper.sites.observation import AttentionCall
from attemper.sites.padding import CallContext
from attemper.statistics import ONE_PASS
from attemper.text import counts

ELSEWHERE = "are not the tokens of the batch"
"""How the reason ends where an attention is over something else: a picture, say."""
_ROWS = 256
"""Rows of a block, and the most whose weights are computed at a site."""
_LARGEST = 2**23
"""Weights that are computed at a time."""
_OUTPUTS = 16
"""Rows whose output is computed again, to see what the scores became."""


@dataclass(frozen=True)
class Breach:
    """Rows of one site that do not see what a rule declares."""

    site: str
    rows: int
    """Of all sequences."""
    seen: float
    """Keys that these rows see, on average over them and heads; and that they should see:"""
    expected: float
    extra: float
    """Keys that they see and must not; and that they should and do not:"""
    missing: float
    weight: float | None
    """Of the forbidden keys, on average over these rows and heads."""


@dataclass(frozen=True)
class FinalScores:
    """How the scores of one site became weights."""

    site: str
    softcap: float | None
    sink: bool
    mismatch: float | None
    """How far the model's output is from that of its own queries, keys and values under these, relative to its size."""


@dataclass
class SeenKeys:
    """What one pass has shown."""

    judged: dict[str, list[str]] = field(default_factory=lambda: {rule: [] for rule in RULES_OF_KEYS})
    """Rule -> the sites that were held against it, in their order."""
    breaches: dict[str, list[Breach]] = field(default_factory=lambda: {rule: [] for rule in RULES_OF_KEYS})
    unread: dict[str, str] = field(default_factory=dict)
    """Layers and calls that could not be read, and why."""
    scores: list[FinalScores] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Counts:
    """Of one rule and the rows [B, Q] of a call: keys seen, declared, forbidden and lacking, means over heads."""

    seen: Tensor
    expected: Tensor
    extra: Tensor
    missing: Tensor


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    shaped = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
    return shaped and one.is_neg() == other.is_neg() and one.data_ptr() == other.data_ptr()


class KeyCollector(Collector):
    """Holds every call of a pass that went through against ``declared``."""

    def __init__(self, model: nn.Module, declared: Declaration) -> None:
        super().__init__(model, CallContext(), Scope(ONE_PASS, "reference", replace=False))
        self.declared = declared
        self.found = SeenKeys()
        self._kept: dict[int, tuple[Any, list[tuple[str, Breach | None]], FinalScores | None]] = {}
        """By the identity of a call's ``places``."""
        self._masks: list[Tensor | None] = []
        self._known: dict[Hashable, dict[str, _Counts]] = {}
        """Counts by the number of the mask: layers share theirs."""

    def _see(self, module: nn.Module, call: AttentionCall) -> None:
        seen = self._note_call(module, call)
        made = self.prepare(module, call, seen)
        if made is None:
            return
        side, site = self.declared.side(self.name_of(made.place)), self.name_of(made.place)
        batch, _, queries, _ = made.problem.query.shape
        keys = made.problem.key.shape[2]
        cross = made.kind == "cross" and keys == self.declared.shape[1] and batch == self.declared.shape[0]
        fits = made.kind == "self" and (batch, queries, keys) == (*side.shape, side.shape[1])
        judged: list[tuple[str, Breach | None]] = []
        if fits or cross:
            sparse = attention_type(made.place, made.kind, made.problem) == "sparse"
            found = self._counts(side if fits else self.declared, site, made, sparse)
            judged = [(rule, self._breach(rule, seen.name, site, made, one)) for rule, one in found.items()]
        else:
            seen.reason = f"its {counts(query=queries, key=keys)} {ELSEWHERE}"
        self._kept[id(seen.places)] = seen.places, judged, _final_scores(seen.name, made)

    def commit(self) -> None:
        calls = self.take_calls()
        for seen in calls:
            if seen.reason is not None:
                self.found.unread[seen.name] = seen.reason
            _, judged, scores = self._kept.get(id(seen.places), (None, [], None))
            for rule, breach in judged:
                self.found.judged[rule].append(seen.name)
                self.found.breaches[rule] += [] if breach is None else [breach]
            if scores is not None:
                self.found.scores.append(FinalScores(seen.name, scores.softcap, scores.sink, scores.mismatch))
        called = {seen.number.name if seen.module is None else seen.module for seen in calls}
        self.found.unread |= self.mixers.unread(self.context.forwards, called)
        self.found.unread |= {skip.name: skip.reason for skip in self.skips(())}
        self._kept.clear()
        self._known.clear()
        self._masks.clear()

    def _counts(self, declared: Declaration, site: str, made: PreparedCall, sparse: bool) -> dict[str, _Counts]:
        problem, mask = made.problem, made.problem.mask
        number = next((at for at, seen in enumerate(self._masks) if _is_same(seen, mask)), len(self._masks))
        self._masks += [mask] if number == len(self._masks) else []
        packed = None if problem.cu_seqlens_q is None else tuple(problem.cu_seqlens_q.tolist())
        law = (id(declared), declared.is_causal(site), declared.window_of(site), made.kind, sparse)
        key = (*law, number, packed, problem.left, problem.right, problem.bottom_right)
        if key not in self._known:
            self._known[key] = _count(declared, site, made, sparse)
        return self._known[key]

    def _breach(self, rule: str, name: str, site: str, made: PreparedCall, counts: _Counts) -> Breach | None:
        wrong = (counts.extra > 0) | (counts.missing > 0 if rule == "window" else False)
        if not bool(wrong.any()):
            return None
        weight = None
        if bool((counts.extra > 0).any()):
            side = self.declared.side(site) if made.kind == "self" else self.declared
            weight = _forbidden_weight(rule, side, site, made, counts.extra > 0)
        if weight == 0 and not bool((wrong & (counts.extra == 0)).any()):
            return None  # hidden in effect: a number so low that nothing is left
        mean = {part: float(getattr(counts, part)[wrong].mean()) for part in ("seen", "expected", "extra", "missing")}
        return Breach(name, int(wrong.sum()), **mean, weight=weight)


def _allows(rule: str, declared: Declaration, site: str, rows: Tensor, cross: bool) -> Tensor | None:
    """[B or 1, R, K]; keys of another sequence have no places, only padding."""
    return None if cross and rule != "padding" else declared.allows(rule, site, rows)


def _count(declared: Declaration, site: str, made: PreparedCall, sparse: bool) -> dict[str, _Counts]:
    """Rule -> counts of a call, of the rules that bind it."""
    cross, problem = made.kind == "cross", made.problem
    batch, _, queries, _ = problem.query.shape
    real = torch.ones((batch, queries), dtype=torch.bool, device=problem.query.device)
    for tokens in (made.real, None if cross or declared.padding is None else declared.padding.value):
        real = real if tokens is None else real & tokens.to(real.device)
    binding = [rule for rule in RULES_OF_KEYS if _binds(rule, declared, site, cross)]
    parts: dict[str, list[tuple[Tensor, ...]]] = {rule: [] for rule in binding}
    for rows in torch.arange(queries, device=real.device).split(_ROWS) if binding else ():
        visible = rows_that_see(problem, rows)
        expected = None if cross else declared.expectation(site, rows)[:, None]
        for rule in binding:
            allowed = _allows(rule, declared, site, rows, cross)
            extra = torch.zeros_like(visible) if allowed is None else visible & ~allowed[:, None]
            missing = torch.zeros_like(visible)
            if rule == "window" and not sparse and declared.whole and not cross:
                missing = declared.expectation(site, rows, least=True)[:, None] & ~visible
                if declared.causal is None:  # rows that see no later key may be right
                    missing &= torch.arange(visible.shape[3], device=rows.device) <= rows[:, None]
            found = (visible, visible if expected is None else expected, extra, missing)
            parts[rule].append(tuple(_mean_over_heads(one, batch) for one in found))
    whole = {rule: [torch.cat(one, 1) for one in zip(*found, strict=True)] for rule, found in parts.items()}
    return {
        rule: _Counts(seen, expected, extra * real, missing * real)
        for rule, (seen, expected, extra, missing) in whole.items()
    }


def _binds(rule: str, declared: Declaration, site: str, cross: bool) -> bool:
    if rule == "window" and not cross:
        return declared.window is not None  # layers without a window, too: they should see all
    return _allows(rule, declared, site, torch.zeros(1, dtype=torch.int64), cross) is not None


def _mean_over_heads(marks: Tensor, batch: int) -> Tensor:
    """[B, R] of [B or 1, H or 1, R, K] bool."""
    return marks.sum(-1).float().mean(1).expand(batch, -1)


def _forbidden_weight(rule: str, declared: Declaration, site: str, made: PreparedCall, wrong: Tensor) -> float:
    """The mean weight on forbidden keys of the rows that see some, [B, Q] ``wrong``; of 256 of them at most."""
    rows = wrong.any(0).nonzero()[:, 0]
    rows = rows[:: -(-len(rows) // _ROWS)]
    total = count = 0.0
    size = max(_LARGEST // (made.problem.query.shape[:2].numel() * made.problem.key.shape[2]), 1)
    for part in rows.split(size):
        allowed = _allows(rule, declared, site, part, made.kind == "cross")
        assert allowed is not None
        weights = reference.weights(_off_device(pick(made.problem, part)))
        there = (weights * ~allowed[:, None].to(weights.device)).sum(-1).mean(1)  # [B, R]
        marks = wrong[:, part].to(there.device)
        total, count = total + float(there[marks].sum()), count + int(marks.sum())
    return total / count


def _off_device(problem: Problem) -> Problem:
    """The problem where float64 exists."""
    if problem.query.device.type != "mps":
        return problem
    parts = {name: part.cpu() for name, part in vars(problem).items() if isinstance(part, Tensor)}
    return problem.with_fields(**parts)


def _final_scores(name: str, made: PreparedCall) -> FinalScores:
    problem, call = made.problem, made.call
    softcap, sink = problem.softcap or None, problem.sink is not None
    value, output = call.value, call.output
    queries = problem.query.shape[2]
    if value is None or output is None or value.shape[2] != problem.key.shape[2] or output.shape[2] != queries:
        return FinalScores(name, softcap, sink, None)
    rows = torch.arange(queries - 1, -1, -max(queries // _OUTPUTS, 1), device=problem.query.device)[:_OUTPUTS].flip(0)
    weights = reference.weights(_off_device(pick(problem, rows)))
    own = reference.weigh(weights, value.detach(), 0.0)
    given = output.detach().index_select(2, rows.to(output.device)).to(own)
    if given.shape != own.shape:
        return FinalScores(name, softcap, sink, None)
    real = made.real[:, rows.to(made.real.device)].to(own.device)[:, None, :, None] if made.real is not None else True
    apart, size = ((part * real).norm() for part in (given - own, own))
    return FinalScores(name, softcap, sink, float(apart / size) if size > 0 else None)


def sites_in_words(sites: Mapping[str, str] | list[str], most: int = 3) -> str:
    """Names of sites, the first few of them."""
    names = list(sites)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
