"""A run as Parquet files that are never changed: for file systems that take no live file, and for object stores.

Every 128 samples or 60 seconds the samples that are new go into a file of their own. It has a row per sample, site and
head, a column per statistic, and what it needs to be understood alone: units, segment, and what is known of the run.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from attemper.errors import InputError, needs
from attemper.file_schema import COUNT, Row, check_document, parse_json
from attemper.files import replacement
from attemper.readings.sample import Sample, SiteLabel
from attemper.store.compaction import CHUNK
from attemper.store.fragment import Fragment
from attemper.store.scalars import Steps
from attemper.store.schema import Tables
from attemper.store.series import FragmentReader
from attemper.text import clean_name

if TYPE_CHECKING:
    import pyarrow

PART_SECONDS = 60.0
"""What is written is published after at most so long."""
MOST_SECONDS = 3600.0
"""Between two samples of a run that is to count as live from one to the next."""
PART_VERSION = 2
KEY = b"attemper"
"""Of the metadata of a file: JSON with ``version``, ``segment``, ``about``, ``units``, ``coverage``, ``lost``."""
OURS = re.compile(r"fragment-\d{1,9}(\.(sqlite(-wal|-shm|-journal)?|lock|token|lost-\d+)|-\d+-\d+\.(parquet|scalars))")
"""Files of a run's folder that attemper wrote."""
NAME = re.compile(r"fragment-(?P<rank>\d+)-(?P<began>\d{16,})-(?P<first>\d{9,})\.parquet")
"""Of a part: rank, when its segment began (microseconds since 1970), its first sample there."""
SCALARS = re.compile(r"fragment-(?P<rank>\d+)-(?P<published>\d{16,})-(?P<first>\d{9,})\.scalars")
"""Of a Parquet file with numbers of steps, whose columns are others: rank, when it was published (microseconds since
1970), and how many steps were published before.
"""
CHECKED = b"attemper checksum"
CHECKSUM = b"attemper: CRC-32 of this file with zeros here: "
"""Key beside ``KEY``, and how its value begins; eight hexadecimal digits follow."""
_ZEROS = b"0" * 8
_SEGMENT = ("first_sample", "first_step", "began", "rank", "process", "versions")
_FACTS = {
    "segment": {
        **dict.fromkeys(("first_sample", "rank", "process"), COUNT),
        "first_step": (int, None),
        "began": float,
        "versions": str,
    },
    "about": {str: object},
    "coverage": [Row(str, str, str, (str, None))],
    "lost": [Row((int, None), float, COUNT, (str, None))],
}
"""Of the metadata of a file, of any version."""
_LABEL = tuple(part.name for part in fields(SiteLabel) if part.name not in ("heads", "first_head"))
_MOMENT = ("sample", "step", "time", "tokens")


class Parts:
    """Publishes a fragment."""

    def __init__(self, fragment: Fragment, target: Target, rank: int) -> None:
        """A run that went on elsewhere meanwhile goes on after the last step there."""
        self._fragment, self._target, self._rank = fragment, target, rank
        fragment.unpublished, self._scalars = [], 0
        self._due = time.monotonic() + PART_SECONDS
        with fragment.lock:
            newest = fragment.connection.execute("SELECT time, step FROM sample ORDER BY id DESC LIMIT 1").fetchone()
        with suppress(OSError, ImportError):
            _, fragment.last_step = max(filter(None, (newest, last_moment(target, rank))), default=(0.0, None))

    @property
    def seconds_left(self) -> float:
        """Until what is written should be published."""
        return max(0.0, self._due - time.monotonic())

    def publish(self) -> None:
        """Publishes what is new, in files of at most 128 samples of one segment. ``OSError``: the target cannot be
        written to; what is new waits for the next time.
        """
        self._due = time.monotonic() + PART_SECONDS
        tables = self._fragment.tables()
        try:
            new = tables.rows(
                "SELECT segment, min(id), max(id) FROM sample WHERE id > (SELECT coalesce(max(last), -1) FROM part) "
                f"GROUP BY segment, id / {CHUNK} ORDER BY min(id)"
            )
            since = tables.rows(
                "SELECT coalesce(max(first), 0) FROM chunk WHERE first <= ?", (new[0][1] if new else 0,)
            )
            reader = FragmentReader(tables, since=since[0][0])
            for segment, first, last in new:
                ((began, rank),) = tables.rows("SELECT began, rank FROM segment WHERE id = ?", (segment,))
                name = f"fragment-{rank}-{round(began * 1e6):016d}-{first:09d}.parquet"
                self._target.write(name, part(reader, segment, first, last))
                self._fragment.note_part(name, first, last)
        finally:
            tables.close()
        self._publish_scalars()

    def _publish_scalars(self) -> None:
        """Numbers of steps that are new, in a file of their own."""
        new = [*(self._fragment.unpublished or ())]
        if any(numbers for _, numbers in new):
            name = f"fragment-{self._rank}-{round(time.time() * 1e6):016d}-{self._scalars:09d}.scalars"
            self._target.write(name, scalars_part(new))
            self._scalars += len(new)
            self._fragment.unpublished = (self._fragment.unpublished or [])[len(new) :]


def scalars_part(steps: Steps) -> bytes:
    """Numbers of steps in the order in which they came, a row a number; a step without any has the name ""."""
    import pyarrow

    rows = [(step, name, value) for step, numbers in steps for name, value in (numbers or {"": None}).items()]
    step, name, value = zip(*rows, strict=True)
    columns = {
        "step": pyarrow.array(step, pyarrow.int64()),
        "name": pyarrow.array(name).dictionary_encode(),
        "value": pyarrow.array(value, pyarrow.float32()),
    }
    return _file_of(pyarrow.table(columns), {})


def part(reader: FragmentReader, segment: int, first: int, last: int) -> bytes:
    """The samples from ``first`` to ``last``, all of one segment, as a Parquet file."""
    samples = reader.replay(first, last)
    table = _table(samples)
    texts = [name for name in table.column_names if name in _LABEL]
    metadata = {KEY: json.dumps(_facts(reader.tables, segment))}
    return _file_of(table, metadata, use_dictionary=texts, use_byte_stream_split=_statistics(samples.values()))


def _file_of(table: pyarrow.Table, metadata: dict[bytes, Any], **how: Any) -> bytes:
    """A table as a Parquet file with a checksum."""
    import pyarrow.parquet

    file = io.BytesIO()
    checked = table.replace_schema_metadata({**metadata, CHECKED: CHECKSUM + _ZEROS})
    pyarrow.parquet.write_table(checked, file, compression="zstd", **how)
    return with_checksum(file.getvalue())


def with_checksum(data: bytes) -> bytes:
    """A file with the checksum of all of its bytes, its own taken as zeros; as it is where it has no place for one."""
    head, mark, rest = data.rpartition(CHECKSUM)
    if not mark:
        return data
    return head + mark + b"%08x" % zlib.crc32(head + mark + _ZEROS + rest[8:]) + rest[8:]


def check_bytes(data: bytes) -> None:
    """Raises InputError if a file does not fit its checksum. Files of earlier versions have none."""
    if with_checksum(data) != data:
        raise InputError("its bytes do not fit their checksum")


def _facts(tables: Tables, segment: int) -> dict[str, Any]:
    (row,) = tables.rows(f"SELECT {', '.join(_SEGMENT)} FROM segment WHERE id = ?", (segment,))
    return {
        "version": PART_VERSION,
        "segment": dict(zip(_SEGMENT, row, strict=True)),
        "about": {name: json.loads(value) for name, value in tables.rows("SELECT name, value FROM about")},
        "units": dict(tables.rows("SELECT name, unit FROM statistic")),
        "coverage": tables.rows("SELECT name, kind, mode, reason FROM coverage"),
        "lost": tables.rows("SELECT step, time, samples, reason FROM lost"),
    }


def _statistics(samples: Iterable[Sample]) -> list[str]:
    return list(dict.fromkeys(name for sample in samples for name in sample.quantities))


def _table(samples: Mapping[int, Sample]) -> pyarrow.Table:
    """A row per sample (its number is its key), site and head."""
    import pyarrow

    all_labels = list(dict.fromkeys(label for sample in samples.values() for label in sample.sites))
    places = {label: place for place, label in enumerate(all_labels)}
    sizes = [sample.values.shape[1] for sample in samples.values()]
    moments = [(number, one.step, one.time, one.tokens) for number, one in samples.items()]
    columns = {
        name: pyarrow.array(np.repeat(np.array(column), sizes))
        for name, column in zip(_MOMENT, zip(*moments, strict=True), strict=True)
    }
    sites = np.concatenate([_per_head(one.sites, [places[label] for label in one.sites]) for one in samples.values()])
    for name in _LABEL:
        known = pyarrow.array([getattr(label, name) for label in all_labels])
        columns[name] = known.take(pyarrow.array(sites)) if name == "layer" else _dictionary(sites, known)
    heads = [label.head_numbers for one in samples.values() for label in one.sites]
    columns["head"] = pyarrow.array(np.concatenate(heads).astype(np.int32))
    columns["first_head"] = pyarrow.array(np.repeat([one.start for one in heads], [*map(len, heads)]).astype(np.int32))
    for name in _statistics(samples.values()):
        found = [one.of(name) for one in samples.values()]
        columns[name] = pyarrow.array(np.concatenate(found), from_pandas=True)
    return pyarrow.table(columns)


def _dictionary(places: np.ndarray, known: pyarrow.Array) -> pyarrow.Array:
    import pyarrow

    encoded = known.dictionary_encode()
    return pyarrow.DictionaryArray.from_arrays(encoded.indices.take(pyarrow.array(places)), encoded.dictionary)


def _per_head(sites: Sequence[SiteLabel], numbers: Sequence[int]) -> np.ndarray:
    return np.repeat(np.array(numbers, np.int32), [site.heads for site in sites])


# --- reading ---


def restore(target: Target, rank: int) -> Fragment:
    """A fragment in memory with all that the parts of one rank hold."""
    fragment, facts = Fragment(None, rank=rank, bits=None), None
    for name in _names(target, NAME, rank):
        table = _read(target, name)
        facts = _check(table, name)
        fragment.unchecked |= CHECKED not in table.schema.metadata
        fragment.enter_segment(facts["segment"])
        for sample in _samples(table):
            fragment.append(sample)
            fragment.fold()
    for name in _names(target, SCALARS, rank):
        fragment.keep_scalars(_steps_of(_read(target, name), name))
    if facts is not None:
        fragment.describe(facts["about"])
        fragment.cover({(name, kind, mode): reason for name, kind, mode, reason in facts["coverage"]})
        for step, _, samples, reason in facts["lost"]:
            fragment.lose(samples, step, reason)
    return fragment


def _steps_of(table: pyarrow.Table, name: str) -> Steps:
    """What ``scalars_part`` was given."""
    if table.column_names != ["step", "name", "value"]:
        raise InputError(f"{clean_name(name)} is not part of an attemper run.")
    found: list[tuple[int, dict[str, float]]] = []
    for row in table.to_pylist():
        if not isinstance(row["step"], int) or not isinstance(row["name"], str):
            raise InputError(f"{clean_name(name)} is damaged: a number has no step, or no name.")
        if not found or found[-1][0] != row["step"] or row["name"] in ("", *found[-1][1]) or not found[-1][1]:
            found.append((row["step"], {}))
        if row["name"]:
            found[-1][1][row["name"]] = math.nan if row["value"] is None else float(row["value"])
    return found


def parts(target: Target) -> dict[str, int]:
    """Name of each part -> its rank."""
    found = {name: NAME.fullmatch(name) for name in target.names()}
    return {name: int(match["rank"]) for name, match in found.items() if match}


def _names(target: Target, pattern: re.Pattern[str], rank: int) -> list[str]:
    """Files of a rank, sorted."""
    return sorted(name for name in target.names() if (found := pattern.fullmatch(name)) and int(found["rank"]) == rank)


def last_moment(target: Target, rank: int) -> tuple[float, int] | None:
    """When the newest part of a rank was sampled last, and at which step; None where there is none."""
    names = _names(target, NAME, rank)
    if not names:
        return None
    table = _read(target, names[-1])
    _check(table, names[-1])
    return table["time"][-1].as_py(), table["step"][-1].as_py()


def live_until(target: Target, rank: int) -> float:
    """When a rank no longer counts as live if nothing more comes of it: seconds since 1970, UTC.

    A sample that follows as the last ones did is published within twice ``PART_SECONDS`` and the largest time between
    two of them, at most ``MOST_SECONDS``. The two newest parts of its segment tell that time: one may hold one sample.
    """
    names = _names(target, NAME, rank)
    segment = [name for name in names if name.rpartition("-")[0] == names[-1].rpartition("-")[0]]
    times = np.concatenate([_read(target, name)["time"].to_numpy() for name in segment[-2:]])
    return float(times[-1] + 2 * (PART_SECONDS + min(MOST_SECONDS, np.diff(times).max(initial=0.0))))


def _read(target: Target, name: str) -> pyarrow.Table:
    with needs("a run of Parquet parts", "pyarrow", "parquet"):
        import pyarrow.parquet
    try:
        data = target.read(name)
        check_bytes(data)
        return pyarrow.parquet.read_table(io.BytesIO(data))
    except (OSError, InputError, pyarrow.ArrowException) as error:
        raise InputError(f"{clean_name(name)} is not part of a run, or is damaged: {error}.") from error


def _check(table: pyarrow.Table, name: str) -> dict[str, Any]:
    """What a part tells of itself."""
    facts = parse_json((table.schema.metadata or {}).get(KEY, b"null"), f"{clean_name(name)} is damaged: its metadata")
    if facts is None or not {*_MOMENT, *_LABEL, "head"} <= set(table.column_names) or not len(table):
        raise InputError(f"{clean_name(name)} is not part of an attemper run.")
    check_document(facts, {"version": COUNT}, f"{clean_name(name)} is damaged: its metadata")
    if facts["version"] > PART_VERSION:
        raise InputError(
            f"{clean_name(name)} was written by a newer attemper: its version is {facts['version']}, and this one "
            f"reads up to {PART_VERSION}. Upgrade attemper: pip install --upgrade attemper."
        )
    return check_document(facts, _FACTS, f"{clean_name(name)} is damaged: its metadata")


def _samples(table: pyarrow.Table) -> Iterator[Sample]:
    statistics = [name for name in table.column_names if name not in (*_MOMENT, *_LABEL, "head", "first_head")]
    numbers = np.stack([table[name].to_numpy().astype(np.float32) for name in statistics])
    taken = table["sample"].to_numpy()
    starts = [*np.flatnonzero(np.diff(taken, prepend=-1)), len(taken)]
    heads = table["head"].to_numpy()
    first_heads = table["first_head"].to_numpy() if "first_head" in table.column_names else np.zeros_like(heads)
    for start, end in pairwise(starts):
        of_sites = [*np.flatnonzero(heads[start:end] == first_heads[start:end]), end - start]
        firsts = table.select([*_MOMENT, *_LABEL]).take([start + place for place in of_sites[:-1]]).to_pylist()
        labels = tuple(
            SiteLabel(**{name: row[name] for name in _LABEL}, heads=int(following - place), first_head=int(first))
            for row, (place, following), first in zip(
                firsts, pairwise(of_sites), first_heads[start:end][of_sites[:-1]], strict=True
            )
        )
        values = numbers[:, start:end]
        held = np.flatnonzero(~np.isnan(values).all(1))
        names = tuple(statistics[row] for row in held)
        step, moment, tokens = (firsts[0][name] for name in _MOMENT[1:])
        yield Sample(step, moment, labels, names, values[held], tokens)


# --- where parts are ---

OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"))
"""An object appears whole or not at all; to rename it is to copy it."""


class Target(Protocol):
    """Where files of a run are published."""

    def names(self) -> list[str]:
        """Of all files, sorted."""
        ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all."""


def open_target(path: str | os.PathLike[str]) -> Target:
    """The target that a path or a URL names; a relative path is of the folder in which the process stands now.

    Raises:
        MissingExtraError: a URL needs fsspec.
        OSError: the folder cannot be made.
    """
    return UrlTarget(str(path)) if "://" in os.fspath(path) else FolderTarget(Path(path).absolute())


class FolderTarget:
    """A folder on any file system: files come by a temporary name and a rename."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir())

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        with replacement(self._folder / name) as part:
            part.write_bytes(data)


class UrlTarget:
    """What fsspec reaches by a URL."""

    def __init__(self, url: str) -> None:
        with needs(f"a run at {url.split('://')[0]}://", "fsspec", "parquet"):
            from fsspec.core import url_to_fs
        self._system, self._root = _open(url_to_fs, url)
        self._whole = url.split("://")[0] in OBJECT_STORES

    def names(self) -> list[str]:
        try:
            listed = self._system.ls(self._root, detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in listed)

    def read(self, name: str) -> bytes:
        return self._system.cat_file(f"{self._root}/{name}")

    def write(self, name: str, data: bytes) -> None:
        final = f"{self._root}/{name}"
        if self._whole:
            self._system.pipe_file(final, data)
            return
        self._system.makedirs(self._root, exist_ok=True)
        self._system.pipe_file(f"{final}.tmp", data)
        self._system.mv(f"{final}.tmp", final)


def _open(url_to_fs: Any, url: str) -> tuple[Any, str]:
    try:
        system, root = url_to_fs(url)
    except (ImportError, ValueError) as error:  # the package of this protocol is missing, or there is no such protocol
        raise OSError(f"{url.split('://')[0]}:// cannot be reached: {error}") from error
    return system, root.rstrip("/")
