"""How detectors are judged: limits fitted on half of the configurations, rings counted on the other half.

A detector's limit is the largest score of the healthy runs that it is fitted on: there it rings in none. Twins have one
configuration, hence stand in one half. All functions take plain cases: a test can make up runs whose answer it knows.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from attemper.readings.alarm_laws import Array

MOST_MEMBERS = 3
"""Of a combination."""
CONFIDENCE = 0.95


class Course(NamedTuple):
    """A detector's scores in one run."""

    steps: Array
    """[T], rising."""
    scores: Array
    """[T]; NaN where it has nothing to say."""

    def peak(self, since: int = 0) -> float:
        """The largest score from a step on; -inf without any."""
        found = self.scores[(self.steps >= since) & ~np.isnan(self.scores)]
        return float(found.max()) if len(found) else -math.inf

    def ring(self, limit: float, since: int = 0) -> int | None:
        """The first step from ``since`` on whose score is above the limit."""
        above = (self.steps >= since) & (self.scores > limit)
        return int(self.steps[above.argmax()]) if above.any() else None


@dataclass(frozen=True, eq=False)
class Case:
    """One run as it is judged."""

    configuration: str
    seed: int
    courses: Mapping[str, Course]
    """Detector -> its scores."""
    kind: str = ""
    """Of the fault; empty in a healthy run."""
    since: int = 0
    """The step where the fault begins: what rings earlier rings in the twin, too."""
    hurt: bool = False
    told: int | None = None
    """The step where held-out loss on the way left the twin's by more than the noise floor."""


class Share(NamedTuple):
    """``hits`` of ``total``."""

    hits: int
    total: int

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of Clopper and Pearson 1934: exact, never too narrow."""
        return clopper_pearson(self.hits, self.total)


@dataclass(frozen=True)
class Judgement:
    """What one detector, or a combination, did on runs that its limit was not fitted on."""

    found: Share
    """Faults that hurt and in which it rang."""
    false: Share
    """Healthy runs in which it rang."""
    by_kind: Mapping[str, Share]
    leads: tuple[int, ...]
    """Steps from its ring to that of the loss detector, of the faults that both found."""
    held_out_leads: tuple[int, ...]
    """The same to the step where held-out loss told, of the faults found and told."""
    members: tuple[str, ...] = ()
    """Of a combination, in either half."""


Limits = Mapping[str, float]
"""Detector -> limit. Several together are a combination: it rings where any of them does."""


def halves(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """The cases of the first half of the configurations, and the others."""
    first = first_half(case.configuration for case in cases)
    return [case for case in cases if case.configuration in first], [
        case for case in cases if case.configuration not in first
    ]


def first_half(configurations: Iterable[str]) -> set[str]:
    """Every second of these configurations, in an order that no name follows."""
    return set(sorted(set(configurations), key=lambda name: hashlib.sha256(name.encode()).digest())[::2])


def healthy(cases: Iterable[Case]) -> list[Case]:
    """Those without a fault."""
    return [case for case in cases if not case.kind]


def hurting(cases: Iterable[Case]) -> list[Case]:
    """Those whose fault hurt."""
    return [case for case in cases if case.hurt]


def fit(cases: Iterable[Case], name: str, allowed: int = 0) -> float:
    """The least limit of a detector at which it rings in at most ``allowed`` of the healthy runs; inf without runs."""
    peaks = sorted((case.courses[name].peak() for case in healthy(cases)), reverse=True)
    return peaks[allowed] if len(peaks) > allowed else math.inf


def ring(case: Case, limits: Limits) -> int | None:
    """The first step at which any of the detectors rings in a run, from its fault on."""
    found = [case.courses[name].ring(limit, case.since) for name, limit in limits.items()]
    return min((step for step in found if step is not None), default=None)


def combine(cases: Sequence[Case], names: Sequence[str]) -> dict[str, float]:
    """A few detectors that together ring in the most faults that hurt, each with its own limit: chosen one by one.

    Chosen and fitted on ``cases``; another is taken only if it finds a fault that those before do not.
    """
    limits = {name: fit(cases, name) for name in names}
    rung = {
        name: {place for place, case in enumerate(hurting(cases)) if ring(case, {name: limits[name]}) is not None}
        for name in names
    }
    chosen: list[str] = []
    covered: set[int] = set()
    while len(chosen) < MOST_MEMBERS:
        best = max(names, key=lambda name: len(rung[name] - covered))
        if not rung[best] - covered:
            break
        chosen.append(best)
        covered |= rung[best]
    return {name: limits[name] for name in chosen}


def judge(cases: Sequence[Case], names: Sequence[str], loss: str, *, combined: bool = False) -> Judgement:
    """One detector, or a combination of several, fitted on either half and judged on the other; both pooled.

    Args:
        names: one detector, or those that a combination chooses from.
        loss: the detector that leads are counted to, with a limit fitted alike: of the loss, or another.
        combined: whether to choose.
    """
    rings: list[tuple[Case, int | None, int | None]] = []
    members: list[str] = []
    for fitted, judged in _folds(cases):
        limits = combine(fitted, names) if combined else {name: fit(fitted, name) for name in names}
        members += [name for name in limits if name not in members]
        tells = {loss: fit(fitted, loss)}
        rings += [(case, ring(case, limits), ring(case, tells)) for case in judged]
    return _summary(rings, tuple(members) if combined else ())


def judge_left_out(cases: Sequence[Case], names: Sequence[str], loss: str) -> dict[str, Judgement]:
    """Kind of fault -> the combination chosen without that kind, judged on its faults in the other half."""
    found = {}
    for kind in sorted({case.kind for case in hurting(cases)}):
        rings: list[tuple[Case, int | None, int | None]] = []
        members: list[str] = []
        for fitted, judged in _folds(cases):
            limits = combine([case for case in fitted if case.kind != kind], names)
            members += [name for name in limits if name not in members]
            tells = {loss: fit(fitted, loss)}
            asked = [case for case in judged if case.kind in ("", kind)]
            rings += [(case, ring(case, limits), ring(case, tells)) for case in asked]
        found[kind] = _summary(rings, tuple(members))
    return found


def recall_at(cases: Sequence[Case], name: str, false_alarms: int) -> Share:
    """Faults that hurt and are found at the limit at which so many of all healthy runs ring: no split."""
    limit = fit(cases, name, false_alarms)
    asked = hurting(cases)
    return Share(sum(ring(case, {name: limit}) is not None for case in asked), len(asked))


def recall_together(cases: Sequence[Case], names: Sequence[str], false_alarms: int = 0) -> Share:
    """Faults that hurt and are found by the combination chosen and fitted on all cases: no split, so at best as good as
    this on others. So many healthy runs may ring, by one of its members: that for which it finds most.
    """
    limits, asked = combine(cases, names), hurting(cases)
    tried = [limits, *({**limits, name: fit(cases, name, false_alarms)} for name in limits)]
    return Share(max(sum(ring(case, one) is not None for case in asked) for one in tried), len(asked))


def shuffle_labels(cases: Sequence[Case], seed: int) -> list[Case]:
    """A control without an answer: of each fault that hurt and its twin, a coin says which is called faulty.

    All other runs are left out, and a twin of several faults takes part with one, so that as many are called faulty as
    healthy, and both were drawn from the same.
    """
    drawn = random.Random(seed)
    found = {(case.configuration, case.seed): case for case in healthy(cases)}
    shuffled: list[Case] = []
    for case in hurting(cases):
        twin = found.pop((case.configuration, case.seed), None)
        if twin is None:
            continue
        swapped = drawn.random() < 0.5
        faulty, other = (twin, case) if swapped else (case, twin)
        shuffled.append(replace(faulty, kind=case.kind, since=case.since, hurt=True, told=case.told))
        shuffled.append(replace(other, kind="", since=0, hurt=False, told=None))
    return shuffled


def _folds(cases: Sequence[Case]) -> tuple[tuple[list[Case], list[Case]], ...]:
    first, second = halves(cases)
    return (first, second), (second, first)


def _summary(rings: Sequence[tuple[Case, int | None, int | None]], members: tuple[str, ...]) -> Judgement:
    hurt = [(case, at, loss) for case, at, loss in rings if case.hurt]
    false = [at for case, at, _ in rings if not case.kind]
    by_kind = {
        kind: Share(sum(at is not None for case, at, _ in hurt if case.kind == kind), count)
        for kind in sorted({case.kind for case, _, _ in hurt})
        for count in (sum(case.kind == kind for case, _, _ in hurt),)
    }
    seen = [(case, at, loss) for case, at, loss in hurt if at is not None]
    return Judgement(
        found=Share(len(seen), len(hurt)),
        false=Share(sum(at is not None for at in false), len(false)),
        by_kind=by_kind,
        leads=tuple(loss - at for _, at, loss in seen if loss is not None),
        held_out_leads=tuple(case.told - at for case, at, _ in seen if case.told is not None),
        members=members,
    )


def typical(leads: Sequence[int]) -> float | None:
    """The median; None without any."""
    return median(leads) if leads else None


def clopper_pearson(hits: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of a share that leaves (1 - confidence) / 2 on either side, by bisection of the binomial's tails.

    Source: Clopper and Pearson 1934.

    Example:
        >>> [round(bound, 4) for bound in clopper_pearson(0, 100)]
        [0.0, 0.0362]
    """
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else _solve(lambda p: 1 - _at_most(hits - 1, total, p), tail)
    high = 1.0 if hits == total else _solve(lambda p: -_at_most(hits, total, p), -tail)
    return low, high


def _at_most(hits: int, total: int, p: float) -> float:
    if not 0 < p < 1:
        return float(p <= 0)
    whole = math.lgamma(total + 1)
    ways = (whole - math.lgamma(k + 1) - math.lgamma(total - k + 1) for k in range(hits + 1))
    return sum(math.exp(way + k * math.log(p) + (total - k) * math.log1p(-p)) for k, way in enumerate(ways))


def _solve(rising: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2
