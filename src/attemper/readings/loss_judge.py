"""Alarms of the loss: each step judged against the steps before, live and of a stored run by the same arithmetic."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np

from attemper.readings.alarm_laws import ALONE, LOSSES, STEADY, spike
from attemper.readings.alarms import KINDS, LOSS
from attemper.readings.limits import AlarmLimits
from attemper.readings.reading import Alarm, number

SPIKE, NONFINITE = KINDS["loss_spike"], KINDS["nonfinite_loss"]
MOST_ENDED = 10_000
"""Of the alarms that have ended, the latest so many are kept."""
TOGETHER = 1 << 14
"""Steps that are judged together: 7 MB."""
FEWEST = 8
"""Columns that a law is given at least: of fewer NumPy adds in another order, and the last bit would differ."""
Array = np.ndarray


class LossJudge:
    """Judges the loss of each step, in their order, in a memory that does not grow with their number."""

    def __init__(self, limits: AlarmLimits) -> None:
        limit = limits.at(LOSS)[SPIKE.name]
        self._limit = np.nan if limit is None else limit
        self._recent: list[float] = []
        """The latest losses that are finite, as many as the law looks at but for one."""
        self._measure = -np.inf
        """What was held against the limit last."""
        self._standing: dict[str, Alarm] = {}
        self._ended: deque[Alarm] = deque(maxlen=MOST_ENDED)
        self.step: int | None = None
        """The last that was judged."""
        self.expected = False
        """Whether there should be a loss: a loop has told of a step."""

    def feed(self, steps: Array, values: Array) -> list[Alarm]:
        """Judges more steps, ascending, with their losses as they are kept; the alarms that begin or end there."""
        changed: list[Alarm] = []
        for first in range(0, len(steps), TOGETHER):
            part = slice(first, first + TOGETHER)
            changed += self._feed(steps[part], values[part].astype(np.float64))
        return changed

    def feed_one(self, step: int, loss: float) -> list[Alarm]:
        if not self._is_quiet(loss):
            return self.feed(np.array([step]), np.array([loss]))
        self.step, self._measure = step, -np.inf
        self._recent = [*self._recent[1:], loss]
        return []

    @property
    def standing(self) -> list[Alarm]:
        return [self._standing[kind.name] for kind in (NONFINITE, SPIKE) if kind.name in self._standing]

    @property
    def alarms(self) -> list[Alarm]:
        """Every alarm so far, as they began; of those that have ended, the latest ``MOST_ENDED``."""
        return sorted((*self._ended, *self.standing), key=lambda alarm: (alarm.since or 0, alarm.kind))

    @property
    def notes(self) -> tuple[str, ...]:
        """That there is no loss, where one is expected."""
        missing = self.expected and self.step is None
        return (f"not judged: {SPIKE.name}, {NONFINITE.name} (needs {LOSS}).",) if missing else ()

    def _is_quiet(self, loss: float) -> bool:
        """Whether nothing can begin or end with one more loss: a step of training does not wait for the law then.

        Of the 50 losses at most 50 / (1 + d^2) are d standard deviations above their mean (Cantelli), so what is as far
        above has at most so many above it. Below alike.
        """
        full, limit = len(self._recent) == LOSSES - 1, self._limit
        if not (full and not self._standing and math.isfinite(loss) and limit > 0):
            return False
        steady, latest = sorted(self._recent[:STEADY]), sorted((*self._recent[STEADY:], loss))
        three, alone = (min(STEADY - 1, int(STEADY / (1 + apart**2))) for apart in (limit, ALONE * limit))
        return steady[-1 - three] >= latest[-3] and steady[alone] <= loss <= steady[-1 - alone]

    def _feed(self, steps: Array, values: Array) -> list[Alarm]:
        self.step = int(steps[-1])
        finite = np.isfinite(values)
        nothing = np.full((2, len(steps)), np.nan)
        changed = self._follow(NONFINITE.name, steps, ~finite, finite, nothing, nothing[0])
        steps, values = steps[finite], values[finite]
        seen = np.concatenate([self._recent, values])
        before, self._recent = len(self._recent), seen[1 - LOSSES :].tolist()
        measure, figures = np.full(len(seen), np.nan), np.full((2, len(seen)), np.nan)
        if len(seen) >= LOSSES:
            windows = np.lib.stride_tricks.sliding_window_view(seen, LOSSES).T
            windows = np.pad(windows, ((0, 0), (0, max(0, FEWEST - windows.shape[1]))))
            found, mean = (one[: len(seen) - LOSSES + 1] for one in spike(windows))
            measure[LOSSES - 1 :], figures[:, LOSSES - 1 :] = found, (seen[LOSSES - 1 :], mean)
        measure, figures = measure[before:], figures[:, before:]
        begins = (measure > self._limit) & ~(np.append(self._measure, measure[:-1]) > measure)
        self._measure = measure[-1] if len(measure) else self._measure
        ends = measure <= SPIKE.end(self._limit, above=True)
        return changed + self._follow(SPIKE.name, steps, begins, ends, figures, measure)

    def _follow(
        self, name: str, steps: Array, begins: Array, ends: Array, figures: Array, measure: Array
    ) -> list[Alarm]:
        """The alarms of a kind that begin or end in these steps. ``figures`` [2, steps]: the loss, and its mean."""
        changed, at = list[Alarm](), 0
        while at < len(steps):
            standing = self._standing.get(name)
            if standing is None:
                first = at + int(begins[at:].argmax())
                if not begins[first]:
                    break
                standing = self._alarm(name, int(steps[first]), measure[first], figures[:, first])
                changed.append(standing)
                at = first + 1
            over = at + int(ends[at:].argmax()) if ends[at:].any() else len(steps)
            self._standing[name] = _later(standing, steps[at:over], measure[at:over])
            if over < len(steps):
                ended = replace(self._standing.pop(name), ended=int(steps[over]))
                self._ended.append(ended)
                changed.append(ended)
            at = over + 1
        return changed

    def _alarm(self, name: str, step: int, value: float, figures: Array) -> Alarm:
        limit = None if name == NONFINITE.name else float(self._limit)
        now, before = figures.tolist()
        at = dict.fromkeys(("step", "since", "worst_step", "latest_step"), step)
        told = {"worst": number(value), "latest": number(value)}
        return KINDS[name].alarm(
            LOSS, None, float(value), limit, None, {"now": now, "before": before}, None, **at, **told
        )


def _later(alarm: Alarm, steps: Array, measure: Array) -> Alarm:
    """An alarm that stands for more steps."""
    if not len(steps):
        return alarm
    worst = int(np.where(np.isnan(measure), -np.inf, measure).argmax())
    if measure[worst] > (np.inf if alarm.worst is None else alarm.worst):
        alarm = replace(alarm, worst=number(measure[worst]), worst_step=int(steps[worst]))
    return replace(alarm, latest=number(measure[-1]), latest_step=int(steps[-1]))
