"""How a run stays below ``max_bytes``: four neighbouring chunks become one that keeps every fourth of their samples.

The older samples are, the fewer are kept: the chunks that are merged next are those whose age, divided by the span that
one of them covers, is largest. Least, mean and largest of what went stay in the pyramid; a level of it goes
when its blocks are shorter than the space between two samples that are left.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

import numpy as np

from attemper.store.checksum import get, put
from attemper.store.chunk import pack, unpack
from attemper.store.compaction import CHUNK, Layout, add_chunk, layouts

MERGED = 4
"""Chunks that become one, and of how many samples one is kept."""


def thin(connection: sqlite3.Connection, following: int) -> bool:
    """Merges four chunks; whether there were four. ``following`` is the number of the next sample. In a transaction."""
    group = _group(connection, following)
    if group is None:
        return False
    first, span = group
    end = first + MERGED * span
    samples = dict(
        connection.execute("SELECT id, layout FROM sample WHERE id >= ? AND id < ? ORDER BY id", (first, end))
    )
    kept = _choose(samples)
    _merge(connection, (first, span), samples, kept)
    _forget(connection, (first, end), [(sample,) for sample in samples if sample not in kept])
    add_chunk(connection, first, MERGED * span)
    connection.execute("DELETE FROM verdict")  # it was of all samples
    spacing = (end - first) // CHUNK
    connection.execute(
        "DELETE FROM pyramid WHERE level <= ? AND first >= ? AND first < ?", (spacing.bit_length() - 1, first, end)
    )
    return True


def _group(connection: sqlite3.Connection, following: int) -> tuple[int, int] | None:
    """First sample and span of the four neighbouring chunks that are merged next; never the newest."""
    found = connection.execute(
        "SELECT min(first), span FROM chunk GROUP BY span, first / (span * :merged) "
        "HAVING count(*) = :merged AND max(first) + span < :following - :chunk "
        "ORDER BY (:following - min(first)) / span DESC, min(first) LIMIT 1",
        {"merged": MERGED, "following": following, "chunk": CHUNK},
    )
    return found.fetchone()


def _choose(samples: Mapping[int, int]) -> set[int]:
    """Every fourth sample of each layout: evaluations that take turns with training are thinned alike."""
    by_layout: dict[int, list[int]] = {}
    for sample, layout in samples.items():
        by_layout.setdefault(layout, []).append(sample)
    return {sample for alike in by_layout.values() for sample in alike[::MERGED]}


def _merge(connection: sqlite3.Connection, group: tuple[int, int], samples: Mapping[int, int], kept: set[int]) -> None:
    first, span = group
    firsts = [first + place * span for place in range(MERGED)]
    known = layouts(connection.execute)
    for pair in sorted({pair for layout in set(samples.values()) for pair in known[layout].pairs}):
        parts = [
            _rest(connection, (*pair, start), _holding(known, pair, samples, range(start, start + span)), kept)
            for start in firsts
        ]
        connection.execute(
            "DELETE FROM cold WHERE statistic = ? AND site = ? AND first >= ? AND first <= ?",
            (*pair, first, firsts[-1]),
        )
        numbers = pack(np.concatenate([part for part in parts if part is not None]))
        put(connection, "cold", [(*pair, first, numbers)])
    connection.execute("DELETE FROM chunk WHERE first >= ? AND first <= ?", (first, firsts[-1]))


def _holding(known: Mapping[int, Layout], pair: tuple[int, int], samples: Mapping[int, int], among: range) -> list[int]:
    """Samples ``among`` some numbers that hold a statistic of a site, in order."""
    statistic, site = pair
    holds = {number for number, one in known.items() if statistic in one.statistics and site in one.sites}
    return [sample for sample, layout in samples.items() if layout in holds and sample in among]


def _rest(
    connection: sqlite3.Connection, place: tuple[int, int, int], holding: list[int], kept: set[int]
) -> np.ndarray | None:
    """[samples that are kept, heads] of one chunk; None where there is none."""
    rows = get(connection.execute, "cold", "WHERE statistic = ? AND site = ? AND first = ?", place)
    if not rows:
        return None
    values = unpack(rows[0][-1])
    assert len(values) == len(holding)
    return values[[sample in kept for sample in holding]]


def _forget(connection: sqlite3.Connection, span: tuple[int, int], gone: list[tuple[int]]) -> None:
    connection.executemany("DELETE FROM sample WHERE id = ?", gone)
    connection.execute(
        "DELETE FROM summary WHERE sample >= ? AND sample < ? AND sample NOT IN (SELECT id FROM sample)", span
    )
