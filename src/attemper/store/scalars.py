"""Numbers that a training loop gives of each step, its loss above all: a few bytes a step, beside the samples.

A row of the table ``scalar`` is a block of neighbouring steps of one name. Rows that were written without going back
are a stretch. A later stretch replaces, of all names, the steps from its first one on.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attemper.readings.history import mean
from attemper.store.checksum import SCALARS_VERSION, Ask, damage, get, put

BLOCK = 1024
"""Steps of a block. The last one of a name is written again as it grows."""
MERGED, EIGHT = 4, 8
"""Blocks that become one where a run is thinned. Of eight neighbouring steps the least and the largest are kept."""
SHARE = 4
"""Scalars are thinned where they take more than one part in so many of what a run may take."""
_NUMBER = np.dtype([("apart", "<i8"), ("value", "<f4")])
"""How many steps it is from the one before, and the number."""
_LARGEST = 1 << 24
"""Bytes of the numbers of a block."""
_GROWN = "ON CONFLICT (id) DO UPDATE SET span = excluded.span, numbers = excluded.numbers, crc = excluded.crc"

Steps = Sequence[tuple[int, Mapping[str, float]]]
"""Step -> its numbers by name, in the order in which they came."""


class Series(NamedTuple):
    """The numbers of one name."""

    steps: np.ndarray
    """[n] int64, ascending."""
    values: np.ndarray
    """[n] float32; NaN where the number was NaN."""

    def between(self, start: int | None, stop: int | None) -> Series:
        first = 0 if start is None else np.searchsorted(self.steps, start)
        last = len(self.steps) if stop is None else np.searchsorted(self.steps, stop)
        return Series(self.steps[first:last], self.values[first:last])

    def at(self, steps: np.ndarray) -> np.ndarray:
        """[steps] float32, NaN where a step has no number."""
        found = np.full(len(steps), np.nan, np.float32)
        _, here, there = np.intersect1d(steps, self.steps, return_indices=True)
        found[here] = self.values[there]
        return found


class Columns(NamedTuple):
    """Numbers over a run: each column stands for neighbouring samples, or steps. NaN where nothing is known."""

    steps: np.ndarray
    """[columns] the first step of each."""
    least: np.ndarray
    """[columns, heads] float32 of a statistic, where numbers of the pyramid have 10 bits of mantissa; [columns] float64
    of a number that the loop gave, of the finite ones.
    """
    mean: np.ndarray
    largest: np.ndarray


def scalar_columns(series: Series, most: int) -> Columns:
    """At most ``most`` columns."""
    steps, values = series
    if not len(steps):
        return Columns(steps, *(np.zeros(0) for _ in range(3)))
    many = -(-len(steps) // most)
    finite = np.where(np.isfinite(values), values, np.nan).astype(np.float64)
    rows = np.pad(finite, (0, -len(steps) % many), constant_values=np.nan).reshape(-1, many)
    return Columns(steps[::many], np.fmin.reduce(rows, 1), mean(rows.T), np.fmax.reduce(rows, 1))


class _Stretch(NamedTuple):
    """What was written without going back."""

    row: int
    """The first of its rows."""
    since: int
    """Its first step."""


class _Open(NamedTuple):
    """The last block of a name."""

    row: int
    stretch: _Stretch
    steps: list[int]
    values: list[float]


class OpenBlocks:
    """The stretch that a fragment writes."""

    def __init__(self) -> None:
        self._last: int | None = None
        self._stretch = _Stretch(0, 0)
        self._blocks: dict[str, _Open] = {}

    @property
    def rows(self) -> list[int]:
        """Those that will be written again."""
        return [block.row for block in self._blocks.values()]

    def after(self, connection: sqlite3.Connection, steps: Steps) -> OpenBlocks:
        """With more steps, which are written. Within a transaction: where that fails, these blocks are what counts.

        A step without a number that does not follow the last one ends what was written of later steps.
        """
        new = OpenBlocks()
        new._last, new._stretch = self._last, self._stretch
        new._blocks = {
            name: one._replace(steps=[*one.steps], values=[*one.values]) for name, one in self._blocks.items()
        }
        ((row,),) = connection.execute("SELECT coalesce(max(id) + 1, 0) FROM scalar")
        grown: dict[int, tuple[str, _Open]] = {}
        for step, numbers in steps:
            if not numbers and row == 0:
                continue  # there is nothing to replace
            if new._last is None or step <= new._last:
                new._blocks, new._stretch = {}, _Stretch(row, step if numbers else step + 1)
                if not numbers:
                    put(connection, "scalar", [(row, *new._stretch, 0, "", b"")])
                    row += 1
            new._last = step
            for name, value in numbers.items():
                block = new._blocks.get(name)
                if block is None or len(block.steps) == BLOCK:
                    block = new._blocks[name] = _Open(row, new._stretch, [], [])
                    row += 1
                block.steps.append(step)
                block.values.append(value)
                grown[block.row] = name, block
        rows = [
            (block.row, *block.stretch, len(block.steps), name, pack(_series(block.steps, block.values)))
            for name, block in grown.values()
        ]
        put(connection, "scalar", rows, _GROWN)
        return new


def as_float32(value: float) -> float:
    """A number as it is kept."""
    return float(_series([0], [value]).values[0])


def _series(steps: Sequence[int], values: Sequence[float]) -> Series:
    with np.errstate(over="ignore"):
        return Series(np.array(steps, np.int64), np.array(values, np.float64).astype(np.float32))


def pack(series: Series) -> bytes:
    """zlib of the numbers' bytes, all first ones before all second ones."""
    numbers = np.empty(len(series.steps), _NUMBER)
    numbers["apart"], numbers["value"] = np.diff(series.steps, prepend=0), series.values
    return zlib.compress(np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, _NUMBER.itemsize).T).tobytes(), 1)


def unpack(data: bytes) -> Series:
    """What ``pack`` was given."""
    inflate = zlib.decompressobj()
    try:
        numbers = np.frombuffer(inflate.decompress(data, _LARGEST + 1), np.uint8).reshape(_NUMBER.itemsize, -1)
    except (zlib.error, ValueError) as error:
        raise damage(f"a block of its scalars: {error}") from error
    found = np.ascontiguousarray(numbers.T).reshape(-1).view(_NUMBER)
    steps = np.cumsum(found["apart"])
    if len(found) > _LARGEST // _NUMBER.itemsize or not inflate.eof or not (np.diff(steps) > 0).all():
        raise damage("the steps of a block of its scalars are impossible")
    return Series(steps, found["value"].astype(np.float32))


def state(ask: Ask) -> tuple[int, ...]:
    """What differs once there are other numbers: blocks are added, grow or are merged."""
    ((version,),) = ask("PRAGMA user_version")
    if version < SCALARS_VERSION:
        return ()
    return next(iter(ask("SELECT count(*), coalesce(max(id), 0), coalesce(sum(span), 0) FROM scalar")))


def read(ask: Ask) -> dict[str, Series]:
    """Every name of a fragment and its numbers, as they count. Names are in the order in which they came.
    ``InputError``: the file is damaged.
    """
    rows = get(ask, "scalar", "ORDER BY id") if state(ask) else []
    parts: dict[str, list[Series]] = {name: [] for *_, name, _ in rows if name}
    stop, following, since = np.inf, None, np.inf
    for _, stretch, begins, _, name, numbers in reversed(rows):
        if stretch != following:
            stop, following = min(stop, since), stretch
        since = begins
        if name:
            steps, values = unpack(numbers)
            parts[name].append(Series(steps[steps < stop], values[steps < stop]))
    return {name: _in_order(found) for name, found in parts.items()}


def thinned_until(ask: Ask) -> int | None:
    """Up to which step numbers were thinned; None where all are there."""
    rows = get(ask, "scalar", "WHERE span > ? ORDER BY id DESC LIMIT 1", (BLOCK,)) if state(ask) else []
    return int(unpack(rows[0][-1]).steps[-1]) if rows else None


def _in_order(parts: Iterable[Series]) -> Series:
    """Blocks that were read from the last to the first."""
    steps, values = zip(*reversed([*parts]), strict=True)
    return Series(np.concatenate(steps), np.concatenate(values))


def join(first: Series | None, second: Series) -> Series:
    """Both, and where they have the same step, the number of the first."""
    if first is None:
        return second
    new = ~np.isin(second.steps, first.steps)
    steps = np.concatenate([first.steps, second.steps[new]])
    order = np.argsort(steps)
    return Series(steps[order], np.concatenate([first.values, second.values[new]])[order])


def by_step(series: Mapping[str, Series]) -> list[tuple[int, dict[str, float]]]:
    found: dict[int, dict[str, float]] = {}
    for name, (steps, values) in series.items():
        for step, value in zip(steps.tolist(), values.tolist(), strict=True):
            found.setdefault(step, {})[name] = value
    return sorted(found.items())


def thin(connection: sqlite3.Connection, most: int, open_rows: Collection[int]) -> bool:
    """Merges four blocks, if all take more than their part of ``most`` bytes; whether it did. Within a transaction."""
    ((taken,),) = connection.execute("SELECT coalesce(sum(length(numbers)), 0) FROM scalar")
    group = _group(connection, open_rows) if taken > most / SHARE else None
    if group is None:
        return False
    first, *_ = rows = [get(connection.execute, "scalar", "WHERE id = ?", (row,))[0] for row in group]
    steps, values = (np.concatenate(part) for part in zip(*(unpack(row[-1]) for row in rows), strict=True))
    kept = _farthest(values)
    connection.executemany("DELETE FROM scalar WHERE id = ?", [(row,) for row in group])
    merged = (*first[:3], sum(row[3] for row in rows), first[4], pack(Series(steps[kept], values[kept])))
    put(connection, "scalar", [merged])
    return True


def _group(connection: sqlite3.Connection, open_rows: Collection[int]) -> list[int] | None:
    """Four neighbouring blocks of one name that stand for as many steps: the oldest, for how many these are."""
    rows = connection.execute("SELECT id, stretch, span, name FROM scalar WHERE name <> '' ORDER BY id").fetchall()
    groups: dict[tuple[int, int, str], list[list[int]]] = {}
    for row, *alike in rows:
        if row not in open_rows:
            there = groups.setdefault(tuple(alike), [[]])
            if len(there[-1]) == MERGED:
                there.append([])
            there[-1].append(row)
    full = [(span, group) for (_, span, _), all_ in groups.items() for group in all_ if len(group) == MERGED]
    last = rows[-1][0] if rows else 0
    return max(full, key=lambda one: ((last - one[1][0]) / one[0], -one[1][0]), default=(0, None))[1]


def _farthest(values: np.ndarray) -> np.ndarray:
    """Places of the least and the largest of each eight; NaN and infinity are the largest."""
    padded = np.concatenate([values, np.full(-len(values) % EIGHT, values[-1])]).reshape(-1, EIGHT)
    known = np.where(np.isfinite(padded), padded, np.inf)
    ends = np.stack([known.argmin(1), known.argmax(1)], 1) + np.arange(len(known))[:, None] * EIGHT
    return np.unique(np.minimum(ends, len(values) - 1))
