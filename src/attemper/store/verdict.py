"""A run judged again: by the limits of its watch, or by others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from attemper.readings.alarms import ALARMS, DEFAULT_LIMITS
from attemper.readings.judge import BESIDE, COUNTS, Judge
from attemper.readings.limits import AlarmLimits
from attemper.readings.reading import FEWEST_KEYS
from attemper.readings.run_judge import RunJudge
from attemper.store.about import UNMEASURED
from attemper.store.columns import columns
from attemper.store.ranks import Ranks
from attemper.store.series import between
from attemper.text import count

ROWS = COUNTS[0]
"""How many rows were valid."""
JUDGED = frozenset((*(kind.quantity for kind in ALARMS), *COUNTS, *BESIDE))
"""Statistics that alarms look at."""


def why_unmeasured(ranks: Ranks) -> str | None:
    """Why nothing was measured in a run; None where any row was: only then is no alarm good news."""
    with ranks.snapshot():
        if len(ranks.steps()):
            rows = (columns(ranks, ROWS, key, 1).largest for key in ranks.sites if ROWS in ranks.statistics)
            measured = any((one > 0).any() for one in rows) or ROWS not in ranks.statistics
            return None if measured else "no row of its samples was valid"
        if (known := ranks.about.get(UNMEASURED)) is not None:
            return str(known).rstrip(".")
        if lost := sum(one.samples for one in ranks.lost):
            return f"{count(lost, 'sample was', 'samples were')} lost, and no other came"
    if any(reader.live for reader in ranks.readers):
        return "its first sample has not come yet"
    return "its watch ended before the first sampled step did"


class Verdict:
    """Judges a run whenever it is asked, and of a run that has grown only what is new."""

    def __init__(
        self, ranks: Ranks, limits: AlarmLimits | Mapping[str, Any] | None = None, stop: int | None = None
    ) -> None:
        """
        Args:
            limits: None for those of the watch that wrote the run.
            stop: only steps below it are judged; None for all.
        """
        self._ranks, self._limits, self._stop = ranks, limits, stop
        self._judge: RunJudge | None = None
        self._seen: list[np.ndarray] = []

    def judge(self) -> Judge:
        """After all samples that are there.

        Raises:
            InputError: a limit is not one, or not a number.
        """
        with self._ranks.snapshot():
            now = [between(reader.moments, None, self._stop) for reader in self._ranks.readers]
            same = len(now) == len(self._seen) and all(map(np.array_equal, self._seen, now))
            if self._judge is not None and same:
                return self._judge
            start = len(self._seen[0]) if len(now) == len(self._seen) == 1 else 0
            if self._judge is None or not start or not np.array_equal(now[0][:start], self._seen[0]):
                self._judge, start = self._new(), 0
            self._judge.feed_all(self._ranks.blocks([moments[start:] for moments in now], JUDGED))
            self._seen = now
        return self._judge

    def _new(self) -> RunJudge:
        about = self._ranks.about
        limits = _known_limits(about.get("limits")) if self._limits is None else self._limits
        return RunJudge(limits, about.get("fewest_keys") or FEWEST_KEYS)


def _known_limits(limits: Any) -> dict[str, Any]:
    """The limits that a watch noted, without kinds that this version does not know."""
    if not isinstance(limits, Mapping):
        return {}
    sites = limits.get("sites") or {}
    return _numbers(limits) | {"sites": {glob: _numbers(one) for glob, one in sites.items()}}


def _numbers(limits: Mapping[str, Any]) -> dict[str, float | None]:
    """Limits as numbers: JSON has no infinity, which is kept as text."""
    return {
        name: float(limit) if limit in ("inf", "-inf") else limit
        for name, limit in limits.items()
        if name in DEFAULT_LIMITS
    }
