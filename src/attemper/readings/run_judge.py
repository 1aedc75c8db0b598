"""A judge of whole runs: many samples at once, in arrays over time, with the alarms of one after another."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from attemper.readings.alarm_laws import LAWS, Array
from attemper.readings.alarms import OF_HEADS, AlarmKind, rings_above
from attemper.readings.judge import (
    BESIDE,
    COUNTS,
    FIGURES,
    LATEST,
    MOST_ENDED,
    STEP,
    UNIFORM,
    WHOLE_FIRST,
    WORST,
    Judge,
    KindState,
    PastAlarm,
    State,
    beyond_floor,
    figure_of,
)
from attemper.readings.memory import Stretch
from attemper.readings.sample import Samples, SiteLabel

FEWEST, MOST = 16, 4096
"""Samples that are judged together: at first, as baselines change in the first samples, and at most."""
MOST_NUMBERS = 1 << 18
"""Numbers of a quantity that are judged together: 2 MB."""

ORIGIN, ENDED = 3, 3 + 3 * FIGURES + 3
"""Numbers of an origin: whether there is one, its value, its step. Of an alarm that has ended: kind, column and step,
figures, origin.
"""
KINDS = {kind.name: kind for kind in OF_HEADS}
IN_ORDER = sorted(WHOLE_FIRST, key=lambda kind: "centre" in LAWS[kind.law].looks_at)
"""A stretch settles while no warning stands, and no warning looks at it."""


class Block(NamedTuple):
    """Samples that are judged together."""

    steps: Array
    found: Mapping[str, Array]
    """Quantity -> [samples, H]."""
    replaced: np.ndarray
    near: np.ndarray
    """[samples] how many heads are near uniform, while the model looks untrained."""
    stretches: Mapping[str, Stretch]


class Episodes(NamedTuple):
    """The alarms of a kind over a block, [samples, H]."""

    on: np.ndarray
    measure: Array
    awake: np.ndarray
    """[samples, 1] whether the kind was judged."""


class RunJudge(Judge):
    """Judges whole runs; ``feed`` goes on from there."""

    _together = FEWEST
    """Samples that the next block has: few while baselines change."""

    def feed_all(self, blocks: Iterable[Samples]) -> None:
        """As ``feed`` of each sample. The alarms are the same in every field."""
        for part in _parts(blocks):
            while part and self.step is not None and part[0].steps[0] <= self.step:
                self.feed(next(part[0].each()))  # the loop went back, or a step had two passes
                part = _cut(part, 1, _many(part))
            self._feed_part(part)

    def _feed_part(self, part: Sequence[Samples]) -> None:
        start, last = 0, _many(part) - 1
        while start < last:
            here = _cut(part, start, min(start + self._together, last))
            self._keep()
            heads = len(self._columns)
            for sites in {id(one.sites): one.sites for one in here}.values():
                self._columns.find(sites)
            if len(self._columns) > heads:
                self._grow()
            with np.errstate(all="ignore"):
                done = self._judge_together(here)
            start += done
            self._together = min(MOST, 2 * self._together) if done == _many(here) else FEWEST
        for block in _cut(part, last, last + 1):
            self.feed(next(block.each()))

    def _judge_together(self, samples: Sequence[Samples]) -> int:
        """Judges the first samples, up to the one that changes a baseline; how many these are."""
        block = self._block(samples)
        trained = (block.near == 0)[:, None]
        followed: dict[str, Episodes | None] = {}
        healthy = np.ones(block.replaced.shape, bool)
        done = None
        for kind in IN_ORDER:
            if done is None and "centre" in LAWS[kind.law].looks_at:
                done = min(stretch.first_full(healthy & trained) for stretch in block.stretches.values())
                if done < len(healthy):
                    return self._judge_together(_cut(samples, 0, done))
                for stretch in block.stretches.values():
                    stretch.settle(healthy & trained)
            whole = followed.get(kind.part_of)
            held_back = block.replaced | (self._whole(whole.on) if whole is not None else False)
            held_back = held_back | (block.near > 0)[:, None] if kind.trained else held_back
            found = followed[kind.name] = self._follow_all(kind, block, held_back)
            if found is not None and kind.is_ill:
                healthy &= ~((self._whole(found.on) if kind.whole else found.on) & found.awake)
        self._conclude(block, followed, healthy)
        for stretch in block.stretches.values():
            stretch.keep(healthy & trained)
        return len(healthy)

    def _block(self, samples: Sequence[Samples]) -> Block:
        found, replaced = self._columns.spread_all(samples, (*self._memories, *COUNTS, *BESIDE))
        self._add_means(found)
        steps = np.array([step for block in samples for step in block.steps], float)
        near = np.zeros(len(steps), np.int64)
        if self._before.untrained:
            near = self._near_uniform(found[UNIFORM.quantity])
            near *= np.logical_and.accumulate(near > 0)
        stretches = {name: Stretch(memory, steps, found[name]) for name, memory in self._memories.items()}
        return Block(steps, found, replaced, near, stretches)

    def _follow_all(self, kind: AlarmKind, block: Block, held_back: np.ndarray) -> Episodes | None:
        """None where no alarm of the kind stands in the block."""
        old, law, stretch = self._before.kinds[kind.name].on, LAWS[kind.law], block.stretches[kind.quantity]
        few = block.found["judged_rows" if kind.judged else "rows"] < kind.least_rows
        floor = able = np.ones(few.shape, bool)
        if kind.floor is None:
            measure = np.where(few, np.nan, stretch.samples_of(law.measure(stretch.window)))
            measure = self._of_sites(measure, np.fmax.reduceat, kind.least_heads) if kind.whole else measure
        else:
            floor, able = beyond_floor(kind, stretch.latest), ~np.isnan(stretch.earlier(law.depth - 1)) & ~few
            measure = stretch.measure(law, floor & able)
            heads = old | (self._beyond(kind, measure)[0] & floor).any(0)
            if heads.any():
                measure = stretch.measure(law, (floor | heads) & able)
        beyond, back = self._beyond(kind, measure)
        begins = beyond & floor & ~held_back
        if begins.any():
            places = (stretch.samples_of(law.place(stretch.window, stretch.window.recent[at])) for at in (-1, -2))
            begins &= ~self._nearer(kind, *places)
        if not (begins.any() or old.any()):
            return None
        on = _last_of(begins, back | held_back, old)
        awake = _awake(_before(on, old) | floor, able)
        if (_before(on, old) & held_back & ~awake).any():
            on = _one_by_one(begins, back | held_back, floor, able, old)
            awake = _awake(_before(on, old) | floor, able)
        return Episodes(on, measure, awake)

    def _conclude(self, block: Block, followed: Mapping[str, Episodes | None], healthy: np.ndarray) -> None:
        """What stands after the block, and what has ended in it."""
        kinds, ended = dict(self._before.kinds), list[tuple[int, PastAlarm]]()
        for kind in WHOLE_FIRST:
            found = followed[kind.name]
            if found is not None:
                kinds[kind.name] = self._state(kind, block, found, ended)
        self._ended += [one for _, one in sorted(ended, key=lambda one: one[0])]
        near = int(block.near[-1])
        self._now = State(int(block.steps[-1]), kinds, healthy[-1], near > 0, near)

    def _state(
        self, kind: AlarmKind, block: Block, followed: Episodes, ended: list[tuple[int, PastAlarm]]
    ) -> KindState:
        """The alarms of a kind after the block; adds those that ended, with their samples."""
        on, measure, _ = followed
        old, stretch = self._before.kinds[kind.name], block.stretches[kind.quantity]
        figures = self._figures(kind, measure, stretch.values, stretch.normal, block.found, block.steps)
        seen, kept, origins = on & ~np.isnan(measure), old.figures.copy(), dict(old.origins)
        before = _before(on, old.on)
        for column in np.flatnonzero((on | before).any(0)).tolist():
            start = 0
            edges = np.flatnonzero(on[:, column] != before[:, column]).tolist()
            for edge in [*edges, len(on)]:
                if edge == len(on) or not on[edge, column]:
                    rows = start + np.flatnonzero(seen[start:edge, column])
                    self._note(kind, figures[:, rows, column], kept[:, :, column])
                    if edge < len(on):
                        origin, step = origins.pop(column), int(block.steps[edge])
                        ended.append((edge, PastAlarm(kind, column, kept[:, :, column].copy(), origin, step)))
                else:
                    kept[:, :, column] = figures[:, edge, column]
                    origins[column] = self._origin(kind, column, partial(stretch.origin, edge))
                start = edge
        return KindState(on[-1], kept, origins)

    def _note(self, kind: AlarmKind, figures: Array, kept: Array) -> None:
        """Keeps the worst and the latest of [FIGURES, samples] in [3, FIGURES] of an alarm that stands."""
        if not figures.shape[1]:
            return
        values, sign = figures[figure_of(kind)], 1 if rings_above(kind) else -1
        worst = int(np.where(np.isnan(values), -np.inf, sign * values).argmax())
        if sign * values[worst] > sign * kept[WORST, figure_of(kind)]:
            kept[WORST] = figures[:, worst]
        kept[LATEST] = figures[:, -1]

    # --- what a file keeps of it ---

    def to_bytes(self) -> bytes:
        """All that follows from the samples so far, as numbers of this machine."""
        ended = (*self._ended, *self._now.ended)
        places = {name: place for place, name in enumerate(KINDS)}
        whole = np.array([(places[one.kind.name], one.column, one.step) for one in ended], np.int64)
        others = np.array([(*one.figures.flat, *_to_row(one.origin)) for one in ended])
        return zlib.compress(b"".join(one.tobytes() for one in (*self._numbers(), whole, others)), 1)

    def restore(self, sites: Iterable[tuple[SiteLabel, ...]], data: bytes) -> bool:
        """Makes a new judge one that has seen samples, as a judge by the same laws left it; False if that cannot be.

        Args:
            sites: of these samples, each tuple once, in the order in which they came.
            data: of ``to_bytes``.
        """
        for one in sites:
            self._columns.find(one)
        self._grow()
        try:
            self._restore(data)
        except (ValueError, OverflowError, zlib.error):
            return False
        return True

    def _restore(self, data: bytes) -> None:
        forms = self._numbers()
        size = sum(one.nbytes for one in forms)
        most = size + 8 * ENDED * (MOST_ENDED + len(KINDS) * len(self._columns))
        numbers, parts, at = zlib.decompressobj().decompress(data, most + 1), list[np.ndarray](), 0
        many, rest = divmod(len(numbers) - size, 8 * ENDED)
        if rest or many < 0 or len(numbers) > most:
            raise ValueError("it has not the numbers of these sites")
        for form in (*forms, np.empty((many, ORIGIN), np.int64), np.empty((many, ENDED - ORIGIN))):
            parts.append(np.frombuffer(numbers, form.dtype, form.size, at).reshape(form.shape).copy())
            at += form.nbytes
        self._take(parts)

    def _numbers(self) -> list[np.ndarray]:
        """All that it knows but for alarms that have ended."""
        now = self._now
        missing = (name in self._missing for name in self._memories)
        found = [np.array([now.step or 0, now.untrained, now.near_uniform, len(now.ended), *missing], np.int64)]
        found += [now.healthy, *(one for memory in self._memories.values() for one in memory.numbers)]
        for state in (now.kinds[name] for name in KINDS):
            origins = np.zeros((len(self._columns), ORIGIN))
            for column, origin in state.origins.items():
                origins[column] = _to_row(origin)
            found += [state.on, state.figures, origins]
        return found

    def _take(self, parts: list[np.ndarray]) -> None:
        """What ``_numbers`` gave, with two arrays of the alarms that have ended."""
        *parts, whole, others = parts
        rest = iter(parts)
        step, untrained, near, last, *missing = next(rest).tolist()
        healthy = next(rest)
        for memory in self._memories.values():
            memory.numbers = [next(rest) for _ in memory.numbers]
        kinds = dict[str, KindState]()
        for name in KINDS:
            on, figures, origins = (next(rest) for _ in range(3))
            _check_steps(figures[:, STEP, on])
            columns = np.flatnonzero(on).tolist()
            kinds[name] = KindState(on, figures, {column: _to_origin(origins[column].tolist()) for column in columns})
        figures = others[:, :-ORIGIN].reshape(-1, 3, FIGURES)
        _check_steps(figures[:, :, STEP])
        known = (whole[:, :2] >= 0) & (whole[:, :2] < (len(KINDS), len(self._columns)))
        if not (known.all() and 0 <= last <= len(whole)):
            raise ValueError("an alarm is of no head")
        table = tuple(KINDS.values())
        ended = [
            PastAlarm(table[kind], column, figures[row], _to_origin(others[row, -ORIGIN:].tolist()), end)
            for row, (kind, column, end) in enumerate(whole.tolist())
        ]
        self._missing = tuple(name for name, one in zip(self._memories, missing, strict=True) if one)
        self._ended.extend(ended[: len(ended) - last])
        latest = tuple(ended[len(ended) - last :])
        self._before = self._now = State(step, kinds, healthy, bool(untrained), near, latest)


def _to_row(origin: tuple[float, int] | None) -> tuple[float, float, float]:
    return (0.0, 0.0, 0.0) if origin is None else (1.0, *origin)


def _to_origin(row: Sequence[float]) -> tuple[float, int] | None:
    known, value, step = row
    return (value, int(step)) if known else None


def _check_steps(steps: Array) -> None:
    if not np.isfinite(steps).all():
        raise ValueError("a step is none")


def _parts(blocks: Iterable[Samples]) -> Iterator[list[Samples]]:
    """Samples that may be judged together: of no head two at one step, and none that goes back."""
    part: list[Samples] = []
    for block in blocks:
        most = min(MOST, 1 + MOST_NUMBERS // max(1, block.values.shape[2]))
        edges = {*range(0, len(block.steps), most), *(np.flatnonzero(np.diff(block.steps) <= 0) + 1).tolist()}
        for start, end in pairwise(sorted({*edges, len(block.steps)})):
            piece = block.cut(start, end)
            if part and (
                _many(part) + end - start > most or piece.steps[0] < part[-1].steps[-1] or _meets(piece, part)
            ):
                yield part
                part = []
            part.append(piece)
    if part:
        yield part


def _many(part: Sequence[Samples]) -> int:
    return sum(len(block.steps) for block in part)


def _cut(part: Sequence[Samples], start: int, end: int) -> list[Samples]:
    found, first = list[Samples](), 0
    for block in part:
        here = max(start - first, 0), min(end - first, len(block.steps))
        if here[0] < here[1]:
            found.append(block.cut(*here))
        first += len(block.steps)
    return found


def _meets(block: Samples, part: Sequence[Samples]) -> bool:
    """Whether another sample of the same step has one of its sites."""
    here = {site.key for site in block.sites} if part[-1].steps[-1] == block.steps[0] else set()
    for other in reversed(part):
        if other.steps[-1] != block.steps[0]:
            return False
        if not here.isdisjoint(site.key for site in other.sites):
            return True
    return False


def _before(on: np.ndarray, old: np.ndarray) -> np.ndarray:
    """[samples, H] what stood at the sample before."""
    return np.concatenate([old[None], on[:-1]])


def _awake(possible: np.ndarray, able: np.ndarray) -> np.ndarray:
    """[samples, 1] whether any head is judged."""
    return np.expand_dims((possible & able).any(1), -1)


def _last_of(begins: np.ndarray, ends: np.ndarray, old: np.ndarray) -> np.ndarray:
    """[samples, H] whether what came last is a beginning."""
    on = np.zeros(begins.shape, bool)
    heads = np.flatnonzero(old | begins.any(0))
    rows = np.arange(1, len(begins) + 1)[:, None]
    began, over = (np.maximum.accumulate(rows * one[:, heads], 0) for one in (begins, ends))
    on[:, heads] = (began > over) | ((began == over) & old[heads])
    return on


def _one_by_one(
    begins: np.ndarray, ends: np.ndarray, floor: np.ndarray, able: np.ndarray, on: np.ndarray
) -> np.ndarray:
    """As ``_last_of``, where nothing begins or ends in a sample in which the kind is not judged."""
    found = np.zeros(begins.shape, bool)
    for row in range(len(begins)):
        if ((on | floor[row]) & able[row]).any():
            on = begins[row] & ~on | on & ~ends[row]
        found[row] = on
    return found
