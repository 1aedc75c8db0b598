"""How samples become few bytes: rounded, 128 folded into one block of each statistic and site, and thinned with age.

A head's numbers change little from sample to sample, so their bytes are put side by side (all first bytes, then all
second bytes, ...) before zlib compresses them. The last bits of a mean over rows are noise and take most of the room:
``round_bits`` leaves the bits that the run was asked to keep.

A picture of a whole run is drawn from the pyramid: least, mean, largest and count of blocks of 32, 128, 512, ...
samples. Level k has blocks of 2^k samples; block b holds the samples with numbers from b 2^k on. k is 5, 7, 9, ...: an
earlier level would cost more than the data, and what lies between two levels follows by ``join_blocks``. A row of the
table holds 32 blocks of one level, so that a picture with 300 columns reads at most 40 rows of a statistic and a site.
"""

from __future__ import annotations

import sqlite3
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from attemper.errors import InputError
from attemper.file_schema import COUNT, check_document, parse_json
from attemper.readings.sample import QUANTITIES, Sample, SiteLabel
from attemper.store.checksum import Ask, check, damage, get, put, whole
from attemper.store.schema import DAMAGED, LATEST
from attemper.store.store import MANTISSA

# --- numbers as bytes ---

COUNTS = frozenset(name for name, one in QUANTITIES.items() if one.exact)
_HEADER = struct.Struct("<BHI")
"""Version, samples, numbers of one sample."""
_VERSION = 1
_LEVEL = 1
"""zlib's fastest: higher levels gain 2% and take three times as long."""
_LARGEST = 1 << 24
"""Bytes of the numbers of a block: 128 samples of 32,768 heads."""


def round_bits(values: np.ndarray, bits: int | None) -> np.ndarray:
    """``values`` as float32 with ``bits`` bits of mantissa, to the nearest and ties to even; None keeps all 23.

    NaN and infinity stay. A number that would round to infinity is cut instead.
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    if bits is None or bits >= MANTISSA:
        return values
    drop = MANTISSA - bits
    whole = values.view("<u4")
    odd = (whole >> drop) & 1
    near = ((whole + (odd + ((1 << (drop - 1)) - 1)).astype("<u4")) >> drop << drop).view("<f4")
    finite = np.isfinite(values)
    if finite.all() and np.isfinite(near).all():
        return near
    cut = (whole >> drop << drop).view("<f4")
    return np.where(finite, np.where(np.isfinite(near), near, cut), values).astype("<f4")


def as_kept(sample: Sample, bits: int | None) -> Sample:
    """A sample with the bits that are stored: all bits of counts."""
    if bits is None or bits >= MANTISSA:
        return sample
    values = sample.values.copy()
    rough = [row for row, name in enumerate(sample.quantities) if name not in COUNTS and not name.endswith(REST)]
    values[rough] = round_bits(values[rough], bits)
    return replace(sample, values=values)


REST = "_rest"
"""Of the name under which what float32 lacks of a count is kept."""


def split_counts(sample: Sample) -> Sample:
    """A sample in float32: a count that float32 cannot hold becomes the nearest one it can, and what is missing."""
    if sample.values.dtype == np.float32:
        return sample
    near = sample.values.astype(np.float32)
    rests = np.where(np.isfinite(near), sample.values - near, 0.0).astype(np.float32)
    split = [row for row, name in enumerate(sample.quantities) if name in COUNTS and rests[row].any()]
    names = tuple(f"{sample.quantities[row]}{REST}" for row in split)
    return replace(sample, values=near).plus(names, rests[split])


def join_counts(quantities: tuple[str, ...], values: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """[quantities, ..., heads] without the rests of counts, which go back to their counts, in float64."""
    rests = [name for name in quantities if name.endswith(REST)]
    if not rests:
        return quantities, values
    names = tuple(name for name in quantities if name not in rests)
    joined = values[[quantities.index(name) for name in names]].astype(np.float64)
    for name in rests:
        joined[names.index(name.removesuffix(REST))] += np.nan_to_num(values[quantities.index(name)])
    return names, joined


def pack(values: np.ndarray) -> bytes:
    """[samples, ...] float32 as bytes. A number's samples stand one after another: they are alike."""
    rows = np.asarray(values, dtype="<f4").reshape(len(values), -1)
    shuffled = np.ascontiguousarray(rows.T).reshape(-1).view(np.uint8).reshape(-1, 4).T
    return _HEADER.pack(_VERSION, *rows.shape) + zlib.compress(shuffled.tobytes(), _LEVEL)


def unpack(data: bytes) -> np.ndarray:
    """[samples, numbers of one sample] float32 that ``pack`` was given."""
    try:
        version, samples, size = _HEADER.unpack_from(data)
        if not version:
            raise InputError("a block of this run is damaged: it has no version.")
        if version > _VERSION:
            raise InputError(
                f"a block of this run is damaged, or of the newer version {version}; this attemper reads version "
                f"{_VERSION}."
            )
        expected, inflate = 4 * samples * size, zlib.decompressobj()
        if expected > _LARGEST:
            raise InputError(f"a block of this run is damaged: it claims {expected:,} B, and none has as many.")
        # One byte more than is expected shows a block that holds too much, and is all that is made of it.
        numbers = inflate.decompress(memoryview(data)[_HEADER.size :], expected + 1)
        if len(numbers) != expected or not inflate.eof:
            raise InputError(f"a block of this run is damaged: it has not the {expected:,} B that it claims.")
        shuffled = np.frombuffer(numbers, np.uint8).reshape(4, -1)
        values = np.ascontiguousarray(shuffled.T).reshape(-1).view("<f4")
        return values.reshape(size, samples).T
    except (struct.error, zlib.error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"a block of this run is damaged: {error}.") from error


# --- which numbers are whose ---

CHUNK = 128
"""Samples that are folded at a time."""
MOST_HEADS = 1 << 20
"""Of a sample. A file that says more is damaged: room is made for as many as it says."""

MOMENT = np.dtype(
    [("id", "<i8"), ("segment", "<i8"), ("step", "<i8"), ("time", "<f8"), ("tokens", "<i8"), ("layout", "<i8")]
)
"""A row of the table ``sample``: a sample but for its numbers."""
Pair = tuple[int, int]
"""Numbers of a statistic and of a site."""


@dataclass(frozen=True)
class Layout:
    """Which statistics of which sites stand where in the hot rows of some samples."""

    statistics: list[int]
    sites: dict[int, slice]
    """Site -> its heads among all."""

    @cached_property
    def heads(self) -> int:
        return max((places.stop for places in self.sites.values()), default=0)

    @cached_property
    def pairs(self) -> dict[Pair, tuple[int, slice]]:
        """(statistic, site) -> row and heads."""
        return {
            (statistic, site): (row, heads)
            for site, heads in self.sites.items()
            for row, statistic in enumerate(self.statistics)
        }


def layouts(ask: Ask) -> dict[int, Layout]:
    """Every layout of a file; ``ask`` is ``Tables.rows``, or a connection's ``execute``."""
    heads = {site: SiteLabel(*label).heads for site, *label in whole(ask, "site")}
    rows = whole(ask, "layout")
    return {number: _layout(_numbers(statistics), _numbers(sites), heads) for number, statistics, sites in rows}


def _numbers(text: str) -> list[int]:
    return check_document(parse_json(text, f"{DAMAGED} a layout"), [COUNT], "a layout of the run")


def moments(ask: Ask, since: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[samples] of ``MOMENT``, by id, and where chunks begin, with the end of the last. Within a snapshot.

    A chunk has the moments of its samples in one piece: rows by the thousand take long. ``since``: where the first of
    the chunks begins.
    """
    chunks = get(ask, "chunk", "WHERE first >= ? ORDER BY first", (since,))
    edges = np.array([since, *(first + span for first, span, _ in chunks)])
    hot = get(ask, "sample", "WHERE id >= ? ORDER BY id", (int(edges[-1]),))
    numbered = [sample for (sample,) in ask("SELECT sample FROM hot ORDER BY sample")]
    if [first for first, *_ in chunks] != edges[:-1].tolist() or [row[0] for row in hot] != numbered:
        raise damage("some of its samples are gone")
    cold = b"".join(data for *_, data in chunks)
    if len(cold) % MOMENT.itemsize:
        raise InputError(f"{DAMAGED} a chunk has half a sample.")
    found = np.concatenate([np.frombuffer(cold, MOMENT), np.array(hot, MOMENT)])
    ids, times = found["id"], found["time"]
    if not ((ids >= 0).all() and (ids < 1 << 53).all() and (np.diff(ids) > 0).all() and (found["tokens"] >= 0).all()):
        raise InputError(f"{DAMAGED} its samples are out of order.")
    if not ((times >= 0) & (times < LATEST)).all():
        raise InputError(f"{DAMAGED} a time is none.")
    return found, edges


def add_chunk(connection: sqlite3.Connection, first: int, span: int) -> None:
    """Notes that samples are cold, and which they are."""
    rows = get(connection.execute, "sample", "WHERE id >= ? AND id < ? ORDER BY id", (first, first + span))
    put(connection, "chunk", [(first, span, np.array(rows, MOMENT).tobytes())])


def _layout(statistics: list[int], sites: list[int], heads: Mapping[int, int]) -> Layout:
    places, start = {}, 0
    repeated = len(set(sites)) < len(sites) or len(set(statistics)) < len(statistics)
    if repeated or not all(site in heads and 0 <= heads[site] <= MOST_HEADS for site in sites):
        raise damage("a layout is impossible")
    for site in sites:
        places[site] = slice(start, start + heads[site])
        start += heads[site]
    if start > MOST_HEADS:
        raise damage(f"a sample claims too many heads: {start:,}")
    return Layout(statistics, places)


# --- the pyramid ---

FIRST_LEVEL = 5
LEVEL_STEP = 2
ROW_BLOCKS = 32
LEAST, MEAN, LARGEST, KNOWN = range(4)
"""Places in the second dimension of blocks."""
PYRAMID_BITS = 10
"""Mantissa bits that are kept of these numbers: 4.9e-4 relative, less than a pixel."""


def row_span(level: int) -> int:
    return ROW_BLOCKS << level


def level_for(samples: int, columns: int) -> int:
    """The coarsest level with at least ``columns`` blocks over ``samples``; 0 where samples themselves are needed."""
    level = FIRST_LEVEL
    while samples >> (level + LEVEL_STEP) >= columns:
        level += LEVEL_STEP
    return level if samples >> level >= columns else 0


def blocks_of(values: np.ndarray) -> np.ndarray:
    """[blocks, samples of a block, ...] -> [blocks, 4, ...]. NaN counts for nothing; it comes out of nothing else."""
    known = ~np.isnan(values)
    count = known.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(1, np.float64) / count
    parts = (np.fmin.reduce(values, 1), mean, np.fmax.reduce(values, 1), count)
    return np.stack(parts, 1).astype(np.float32)


def join_blocks(rows: np.ndarray, many: int) -> np.ndarray:
    """[n * many, 4, ...] -> [n, 4, ...]: every ``many`` blocks joined to one."""
    grouped = rows.reshape(len(rows) // many, many, *rows.shape[1:])
    counts = grouped[:, :, KNOWN].astype(np.float64)
    total = counts.sum(1)
    sums = np.where(counts > 0, grouped[:, :, MEAN], 0.0) * counts
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums.sum(1) / total
    parts = (np.fmin.reduce(grouped[:, :, LEAST], 1), mean, np.fmax.reduce(grouped[:, :, LARGEST], 1), total)
    return np.stack(parts, 1).astype(np.float32)


def empty_blocks(many: int, heads: int) -> np.ndarray:
    """[many, 4, heads]: blocks without a sample."""
    empty = np.full((many, 4, heads), np.nan, np.float32)
    empty[:, KNOWN] = 0.0
    return empty


# --- folding ---


def fold(connection: sqlite3.Connection, first: int) -> None:
    """Folds the hot samples from ``first`` on. Within a transaction."""
    known, by_layout = layouts(connection.execute), {}
    ends = first, first + CHUNK
    layout_of = dict(connection.execute("SELECT id, layout FROM sample WHERE id >= ? AND id < ?", ends))
    rows = get(connection.execute, "hot", "WHERE sample >= ? AND sample < ? ORDER BY sample", ends)
    if layout_of.keys() != {sample for sample, _ in rows}:
        raise damage("some of its samples are gone")
    for sample, numbers in rows:
        by_layout.setdefault(layout_of[sample], []).append((sample - first, np.frombuffer(numbers, "<f4")))
    values: dict[Pair, list[np.ndarray]] = {}
    places: dict[Pair, list[np.ndarray]] = {}
    found: dict[Pair, list[np.ndarray]] = {}
    for number, samples in by_layout.items():
        layout = known[number]
        where = np.array([place for place, _ in samples])
        stacked = np.stack([row for _, row in samples]).reshape(len(samples), len(layout.statistics), layout.heads)
        spread = np.full((CHUNK, *stacked.shape[1:]), np.nan, np.float32)
        spread[where] = stacked
        blocks = blocks_of(spread.reshape(-1, 1 << FIRST_LEVEL, *stacked.shape[1:]))
        for pair, (row, heads) in layout.pairs.items():
            values.setdefault(pair, []).append(stacked[:, row, heads])
            places.setdefault(pair, []).append(where)
            found.setdefault(pair, []).append(blocks[:, :, row, heads])
    for pair, parts in values.items():
        numbers = pack(in_order(parts, places[pair]))
        put(connection, "cold", [(*pair, first, numbers)])
    _extend(connection, FIRST_LEVEL, first, {pair: _join_layouts(parts) for pair, parts in found.items()})
    add_chunk(connection, first, CHUNK)
    connection.execute("DELETE FROM hot WHERE sample >= ? AND sample < ?", ends)


def in_order(parts: list[np.ndarray], places: list[np.ndarray]) -> np.ndarray:
    """[samples, heads] of several layouts' samples by their places."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts)[np.argsort(np.concatenate(places))]


def _join_layouts(parts: list[np.ndarray]) -> np.ndarray:
    """[blocks, 4, heads] of the same blocks, seen by the samples of several layouts."""
    if len(parts) == 1:
        return parts[0]
    return join_blocks(np.stack(parts, 1).reshape(-1, *parts[0].shape[1:]), len(parts))


_AT = "WHERE statistic = ? AND site = ? AND level = ? AND first = ?"
_REPLACED = "ON CONFLICT (statistic, site, level, first) DO UPDATE SET numbers = excluded.numbers, crc = excluded.crc"


def _extend(connection: sqlite3.Connection, level: int, first: int, added: Mapping[Pair, np.ndarray]) -> None:
    """Adds blocks that begin with sample ``first`` to rows of one level; a row that ends goes into the level above."""
    span = row_span(level)
    row, before = first - first % span, first % span >> level
    many = max((len(blocks) for blocks in added.values()), default=0)
    for (statistic, site), blocks in added.items():
        place = (statistic, site, level, row)
        old = get(connection.execute, "pyramid", _AT, place)
        joined = np.concatenate([_pad(old[0][-1] if old else None, before, blocks.shape[-1]), blocks])
        put(connection, "pyramid", [(*place, pack(round_bits(joined, PYRAMID_BITS)))], _REPLACED)
    if before + many == ROW_BLOCKS:
        ended = connection.execute(
            "SELECT heads, statistic.id, site.id, pyramid.* FROM statistic CROSS JOIN site CROSS JOIN pyramid "
            "ON statistic = statistic.id AND site = site.id AND level = ? AND first = ?",
            (level, row),
        )
        above = {}
        for heads, statistic, site, *one in ended.fetchall():
            *_, numbers = check("pyramid", tuple(one), (statistic, site, level, row))
            blocks = _pad(numbers, ROW_BLOCKS, heads)
            above[statistic, site] = join_blocks(blocks, 1 << LEVEL_STEP)
        _extend(connection, level + LEVEL_STEP, row, above)


def _pad(numbers: bytes | None, many: int, heads: int) -> np.ndarray:
    """[many, 4, heads]: the blocks of a row, and blocks without a sample for those where the site was not seen."""
    if numbers is None:
        return empty_blocks(many, heads)
    blocks = unpack(numbers)
    return np.concatenate([blocks.reshape(len(blocks), 4, -1), empty_blocks(many - len(blocks), heads)])


# --- old chunks ---

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
    ends = first, first + (MERGED - 1) * span
    known, where = layouts(connection.execute), "WHERE statistic = ? AND site = ? AND first >= ? AND first <= ?"
    for pair in sorted({pair for layout in set(samples.values()) for pair in known[layout].pairs}):
        stays = [sample in kept for sample, layout in samples.items() if pair in known[layout].pairs]
        parts = [unpack(row[-1]) for row in get(connection.execute, "cold", f"{where} ORDER BY first", (*pair, *ends))]
        if sum(map(len, parts)) != len(stays):
            raise damage("some of its samples have no number")
        connection.execute(f"DELETE FROM cold {where}", (*pair, *ends))
        put(connection, "cold", [(*pair, first, pack(np.concatenate(parts)[stays]))])
    connection.execute("DELETE FROM chunk WHERE first >= ? AND first <= ?", ends)


def _forget(connection: sqlite3.Connection, span: tuple[int, int], gone: list[tuple[int]]) -> None:
    connection.executemany("DELETE FROM sample WHERE id = ?", gone)
    connection.execute(
        "DELETE FROM summary WHERE sample >= ? AND sample < ? AND sample NOT IN (SELECT id FROM sample)", span
    )
