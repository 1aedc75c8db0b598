"""What rows see at every attention site, held against what is declared: exact, from one forward pass.

Masks tell which keys a row sees, block of rows after block; only rows that see forbidden keys have their scores
computed, for the weight that goes there. Nothing is as large as all rows times all keys.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from attemper.backends import reference
from attemper.backends.contract import Problem
from attemper.call.partial_call import on_host
from attemper.call.sampling import pick, rows_that_see
from attemper.monitor.checked_model import attention_type
from attemper.monitor.collector import Collector, PreparedCall
from attemper.monitor.options import Scope
from attemper.rules.declared import RULES_OF_KEYS, Declaration
from attemper.sites.observation import AttentionCall
from attemper.sites.padding import CallContext
from attemper.statistics import ONE_PASS
from attemper.text import count, counts

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

    def in_words(self, sites: int, forbidden: str) -> str:
        """All of it, at the first of so many sites; ``forbidden``: what the keys are that rows must not see."""
        more = f" (and {count(sites - 1, 'more site')})" if sites > 1 else ""
        seen = f"{self.seen:.4g} keys are seen on average where {self.expected:.4g} are declared"
        said = f"{self.site}{more}: in {count(self.rows, 'row')}, {seen}"
        if self.weight is None:
            return f"{said}, and {self.missing:.4g} are missing"
        return f"{said}, and {self.extra:.4g} of these are {forbidden}, with {self.weight:.3g} of the weight"


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


class KeyCollector(Collector):
    """Holds every call of a pass that went through against ``declared``."""

    def __init__(self, model: nn.Module, declared: Declaration) -> None:
        super().__init__(model, CallContext(), Scope(ONE_PASS, "reference", replace=False))
        self.declared = declared
        self.found = SeenKeys()
        self._known: dict[Hashable, tuple[dict[str, Tensor], Tensor | None]] = {}
        """Counts, and the mask that they are of, by what tells them: layers share a mask."""

    def _take(self, module: nn.Module, call: AttentionCall, done: object = None) -> None:
        seen = self._note_call(module, call)
        made = self.prepare(module, call, seen)
        if made is None:
            return
        site, shape = self.name_of(made.place), (*made.problem.query.shape[::2], made.problem.key.shape[2])
        side, cross = self.declared.side(site), made.kind == "cross"
        judged: list[tuple[str, Breach | None]] = []
        against = self.declared if cross else side
        if (shape[::2] if cross else shape) == (against.shape if cross else (*side.shape, side.shape[1])):
            found = self._counts(against, site, made)
            judged = [(rule, _breach(rule, against, site, made, one)) for rule, one in found.items()]
        else:
            seen.reason = f"its {counts(query=shape[1], key=shape[2])} {ELSEWHERE}"
        seen.made = judged, _final_scores(site, made)

    def commit(self) -> None:
        calls, found = self.take_calls(), self.found
        for seen in calls:
            if seen.reason is not None:
                found.unread[seen.name] = seen.reason
            judged, scores = seen.made or ([], None)
            for rule, breach in judged:
                found.judged[rule].append(seen.name)
                found.breaches[rule] += [] if breach is None else [replace(breach, site=seen.name)]
            found.scores += [] if scores is None else [replace(scores, site=seen.name)]
        called = {seen.number.name if seen.module is None else seen.module for seen in calls}
        found.unread |= self.mixers.unread(self.context.forwards, called)
        read = {seen.name for seen in calls if seen.reason is None}
        found.unread |= {skip.name: skip.reason for skip in self.skips(read)}
        self._known.clear()

    def _counts(self, declared: Declaration, site: str, made: PreparedCall) -> dict[str, Tensor]:
        """Rule -> ``_count`` of the rules that bind a call."""
        problem, sparse = made.problem, attention_type(made.place, made.kind, made.problem) == "sparse"
        mask = problem.mask  # kept with what is known of it: no other takes its place in memory
        place = None if mask is None else (mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, mask.is_neg())
        packed = None if problem.cu_seqlens_q is None else tuple(problem.cu_seqlens_q.tolist())
        law = (id(declared), declared.is_causal(site), declared.window_of(site), made.kind, sparse)
        key = (*law, place, packed, problem.left, problem.right, problem.bottom_right)
        if key not in self._known:
            self._known[key] = _count(declared, site, made, sparse), mask
        return self._known[key][0]


def _count(declared: Declaration, site: str, made: PreparedCall, sparse: bool) -> dict[str, Tensor]:
    """Rule -> keys seen, expected, extra and missing by the rows of a call, [4, B, Q], means over heads."""
    cross, problem = made.kind == "cross", made.problem
    batch, _, queries, _ = problem.query.shape
    real = torch.ones((batch, queries), dtype=torch.bool, device=problem.query.device)
    for tokens in (made.real, None if cross or declared.padding is None else declared.padding.value):
        real = real if tokens is None else real & tokens.to(real.device)
    first = torch.zeros(1, dtype=torch.int64)
    bound = {rule for rule in RULES_OF_KEYS if declared.allows(rule, site, first, cross=cross) is not None}
    # Layers without a window, too: they should see all.
    bound |= {"window"} if not cross and not isinstance(declared.window_of(site), str) else set()
    parts: dict[str, list[Tensor]] = {rule: [] for rule in RULES_OF_KEYS if rule in bound}
    for rows in torch.arange(queries, device=real.device).split(_ROWS) if bound else ():
        visible = rows_that_see(problem, rows)
        expected = visible if cross else declared.expectation(site, rows)[:, None]
        for rule, found in parts.items():
            allowed = declared.allows(rule, site, rows, cross=cross)
            extra = torch.zeros_like(visible) if allowed is None else visible & ~allowed[:, None]
            missing = torch.zeros_like(visible)
            if rule == "window" and not sparse and declared.whole:
                missing = declared.expectation(site, rows, least=True)[:, None] & ~visible
                if not declared.causal.value:  # rows that see no later key may be right
                    missing &= torch.arange(visible.shape[3], device=rows.device) <= rows[:, None]
            marks = (one.sum(-1).float().mean(1).expand(batch, -1) for one in (visible, expected, extra, missing))
            found.append(torch.stack([*marks]))
    counted = torch.stack([torch.ones_like(real), torch.ones_like(real), real, real])
    return {rule: torch.cat(found, 2) * counted for rule, found in parts.items()}


def _breach(rule: str, declared: Declaration, site: str, made: PreparedCall, counts: Tensor) -> Breach | None:
    more, less = counts[2:] > 0
    wrong, weight = more | less, None
    if not bool(wrong.any()):
        return None
    if bool(more.any()):
        weight = _forbidden_weight(rule, declared, site, made, more)
    if weight == 0 and not bool((wrong & ~more).any()):
        return None  # hidden in effect: a number so low that nothing is left
    return Breach(site, int(wrong.sum()), *counts[:, wrong].mean(1).tolist(), weight=weight)


def _forbidden_weight(rule: str, declared: Declaration, site: str, made: PreparedCall, wrong: Tensor) -> float:
    """The mean weight on forbidden keys of the rows that see some, [B, Q] ``wrong``; of 256 of them at most."""
    rows = wrong.any(0).nonzero()[:, 0]
    rows = rows[:: -(-len(rows) // _ROWS)]
    total = many = 0.0
    size = max(_LARGEST // (made.problem.query.shape[:2].numel() * made.problem.key.shape[2]), 1)
    for part in rows.split(size):
        allowed = declared.allows(rule, site, part, cross=made.kind == "cross")
        assert allowed is not None
        there = (_weights(made.problem, part) * ~allowed[:, None].cpu()).sum(-1).mean(1)  # [B, R]
        marks = wrong[:, part].cpu()
        total, many = total + float(there[marks].sum()), many + int(marks.sum())
    return total / many


def _weights(problem: Problem, rows: Tensor) -> Tensor:
    """[B, H, R, K] of some rows, on the CPU: not every device has float64."""
    return reference.weights(on_host(pick(problem, rows)))


def _final_scores(site: str, made: PreparedCall) -> FinalScores:
    problem, value, output = made.problem, made.call.value, made.call.output
    found = FinalScores(site, problem.softcap or None, problem.sink is not None, None)
    queries, keys = problem.query.shape[2], problem.key.shape[2]
    if value is None or output is None or value.shape[2] != keys or output.shape[2] != queries:
        return found
    rows = torch.arange(queries - 1, -1, -max(queries // _OUTPUTS, 1), device=problem.query.device)[:_OUTPUTS].flip(0)
    own = reference.weigh(_weights(problem, rows), value.detach().cpu(), 0.0)
    given = output.detach().index_select(2, rows.to(output.device)).to(own)
    if given.shape != own.shape:
        return found
    real = 1 if made.real is None else made.real[:, rows.to(made.real.device)].to(own)[:, None, :, None]
    apart, size = ((part * real).norm() for part in (given - own, own))
    return replace(found, mismatch=float(apart / size) if size > 0 else None)
