"""A run judged again: by the limits of its watch, or by others."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from attemper.readings.alarms import DEFAULT_LIMITS, LOSS, OF_HEADS
from attemper.readings.judge import BESIDE, COUNTS, Judge
from attemper.readings.limits import AlarmLimits
from attemper.readings.loss_judge import LossJudge
from attemper.readings.reading import FEWEST_KEYS
from attemper.readings.run_judge import RunJudge
from attemper.store.checksum import put
from attemper.store.compaction import CHUNK
from attemper.store.ranks import Ranks, columns
from attemper.store.scalars import Series
from attemper.store.schema import Tables
from attemper.store.series import FragmentReader, between
from attemper.store.store import UNMEASURED
from attemper.text import count

if TYPE_CHECKING:
    from attemper.store.fragment import Fragment

ROWS = COUNTS[0]
"""How many rows were valid."""
FEWEST_KEPT = 1024
"""Fewer samples are judged in a second, and it would be much beside them."""
TOGETHER = 512
"""Samples that are judged at a time while a run is written."""
GROWTH = 8
"""A verdict is kept again when a part of so many is new: a reader judges no more of a run that was killed."""
JUDGED = frozenset((*(kind.quantity for kind in OF_HEADS), *COUNTS, *BESIDE))
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
        self._losses: Series | None = None
        """What ``_loss`` has judged."""
        self._loss: LossJudge | None = None

    def judge(self) -> Judge:
        """After all samples and all losses that are there."""
        with self._ranks.snapshot():
            judge = self._judge_samples()
            judge.loss = self._judge_loss(judge.limits)
            return judge

    def _judge_loss(self, limits: AlarmLimits) -> LossJudge:
        losses = self._ranks.scalars.get(LOSS)
        if self._loss is None or self._losses is not losses:
            self._losses, self._loss = losses, LossJudge(limits)
            self._loss.expected = True
            if losses is not None:
                self._loss.feed(*losses.between(None, self._stop))
        return self._loss

    def _judge_samples(self) -> RunJudge:
        now = [between(moments, None, self._stop) for moments in self._ranks.moments]
        same = len(now) == len(self._seen) and all(map(np.array_equal, self._seen, now))
        if self._judge is not None and same:
            return self._judge
        start = len(self._seen[0]) if len(now) == len(self._seen) == 1 else 0
        if self._judge is None or not start or not np.array_equal(now[0][:start], self._seen[0]):
            self._judge, start = self._first_judge(now)
        self._judge.feed_all(self._ranks.blocks([moments[start:] for moments in now], JUDGED))
        self._seen = now
        return self._judge

    def _first_judge(self, now: list[np.ndarray]) -> tuple[RunJudge, int]:
        about = self._ranks.about
        if len(now) == 1:  # what several ranks wrote together none of them has judged
            return kept_judge(self._ranks.readers[0], now[0], about, self._limits)
        return judge_of(about, self._limits), 0


class Keeper:
    """Judges what a fragment takes, and keeps in its file what a judge knows then: readers go on from there.

    It is kept with how many samples were judged and with the CRC-32 of their moments. A reader takes it only where its
    first samples are these, so it may be of fewer than there are, or of some that were replaced.
    """

    def __init__(self, fragment: Fragment) -> None:
        self._fragment = fragment
        self._judge: RunJudge | None = None
        self._samples = self._crc = self._next = self._kept = 0
        """How many samples were judged, the CRC-32 of their moments, the number of the next one, and how many had been
        judged of what was kept last.
        """
        self._over = fragment.path is None

    def follow(self, until: float, *, end: bool = False) -> None:
        """Judges samples that are new, until a moment (monotonic). ``end``: no more will come.

        After an error, and in a run that was thinned, none is judged any more: readers judge them.
        """
        if self._over:
            return
        tables = Tables(self._fragment.connection, self._fragment.lock)
        reader = FragmentReader(tables, since=self._next - self._next % CHUNK)
        about, self._over = reader.about, True
        if about.get("thinned"):
            return
        if end or len(self._new(reader)) >= TOGETHER:
            if self._judge is None or self._judge.laws != judge_of(about).laws or self._is_replaced(reader):
                reader = FragmentReader(tables)
                self._judge, self._kept = kept_judge(reader, reader.moments, about)
                self._samples = self._crc = self._next = 0
                self._count(reader.moments[: self._kept])
            self._feed(self._judge, reader, until, 0 if end else TOGETHER - 1)
        self._over = False
        least = max(FEWEST_KEPT, self._kept + (1 if end else self._kept // GROWTH))
        if self._judge is not None and self._samples >= least:
            self._keep(self._judge)

    def _new(self, reader: FragmentReader) -> np.ndarray:
        return reader.moments[np.searchsorted(reader.moments["id"], self._next) :]

    def _feed(self, judge: RunJudge, reader: FragmentReader, until: float, left: int) -> None:
        """Judges what is new but for the last ``left`` at most."""
        new = self._new(reader)
        for first in range(0, len(new) - left, TOGETHER):
            if first and time.monotonic() > until:
                break
            part = new[first : first + TOGETHER]
            judge.feed_all(reader.blocks(part, JUDGED))
            self._count(part)

    def _is_replaced(self, reader: FragmentReader) -> bool:
        """Whether a later segment replaces samples that were judged."""
        step = self._judge.step if self._judge is not None else None
        return step is not None and any(
            start.first_sample >= self._next and start.first_step <= step for start in reader.starts
        )

    def _count(self, moments: np.ndarray) -> None:
        self._samples += len(moments)
        self._crc = zlib.crc32(moments.tobytes(), self._crc)
        self._next = int(moments["id"][-1]) + 1 if len(moments) else self._next

    def _keep(self, judge: RunJudge) -> None:
        """Keeps what was judged, and what was kept before: a run that goes back a little goes on from that."""
        row = (judge.laws, self._samples, self._crc, judge.to_bytes())
        with self._fragment.transaction() as connection:
            connection.execute("DELETE FROM verdict WHERE laws <> ? OR samples <> ?", (judge.laws, self._kept))
            put(connection, "verdict", [row])
        self._kept = self._samples


def kept_judge(
    reader: FragmentReader,
    moments: np.ndarray,
    about: Mapping[str, Any],
    limits: AlarmLimits | Mapping[str, Any] | None = None,
) -> tuple[RunJudge, int]:
    """A judge of the first of these moments, as a writer kept it, and of how many; a new one where none was kept."""
    laws = judge_of(about, limits).laws
    for samples, judged, numbers in reader.verdicts(laws):
        judge = judge_of(about, limits)
        seen = moments[:samples]
        fits = samples <= len(moments) and zlib.crc32(seen.tobytes()) == judged
        if fits and judge.restore(reader.sites_of(seen), numbers):
            return judge, samples
    return judge_of(about, limits), 0


def judge_of(about: Mapping[str, Any], limits: AlarmLimits | Mapping[str, Any] | None = None) -> RunJudge:
    """A new judge by these limits; None for those that a run tells of itself."""
    limits = _known_limits(about.get("limits")) if limits is None else limits
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
