"""A run as a long table, a row for each step and head: for pandas, Parquet and CSV; and as a copy of its files."""

from __future__ import annotations

import csv
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attemper.errors import InputError, needs
from attemper.files import check_target, replacement
from attemper.readings.sample import SiteLabel
from attemper.store.compaction import COUNTS
from attemper.store.parts import OURS
from attemper.store.ranks import Ranks
from attemper.text import clean_name, csv_cell

if TYPE_CHECKING:
    import pandas

Array = np.ndarray
PLACE = ("step", "site", "layer", "kind", "mode", "head")
"""Columns that say of which head at which step a row is. One for each statistic follows, and one for each number that
the loop gave with the step.
"""


def to_pandas(ranks: Ranks) -> pandas.DataFrame:
    """All rows, in the memory of this process."""
    with needs("Run.to_pandas", "pandas", "pandas"):
        import pandas
    with ranks.snapshot():
        frames = [pandas.DataFrame(_with_types(table, pandas)) for table in tables(ranks)]
    if not frames:
        return pandas.DataFrame(columns=pandas.Index([*PLACE, *_names(ranks)]))
    frame = pandas.concat(frames, ignore_index=True)
    return frame.astype(dict.fromkeys(("site", "kind", "mode"), "category"))


def to_parquet(ranks: Ranks, path: str | os.PathLike[str]) -> int:
    """The table as a Parquet file, a site at a time; how many rows it has."""
    with needs("Run.to_parquet", "pyarrow", "parquet"):
        import pyarrow
        import pyarrow.parquet
    rows = 0
    schema = _schema(ranks, pyarrow)
    with (
        ranks.snapshot(),
        _whole(path) as part,
        pyarrow.parquet.ParquetWriter(part, schema, compression="zstd") as file,
    ):
        for table in tables(ranks):
            columns = [pyarrow.array(table[one.name], one.type, from_pandas=True) for one in schema]
            file.write_table(pyarrow.table(columns, schema=schema))
            rows += len(table["step"])
    return rows


def to_csv(ranks: Ranks, path: str | os.PathLike[str]) -> int:
    """The table as CSV, a missing number as an empty cell; how many rows it has."""
    rows = 0
    with _whole(path) as part, part.open("w", encoding="utf-8", newline="") as file, ranks.snapshot():
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*PLACE, *_names(ranks)))
        for table in tables(ranks):
            writer.writerows(zip(*(_texts(name, column) for name, column in table.items()), strict=True))
            rows += len(table["step"])
    return rows


def to_sqlite(ranks: Ranks, path: str | os.PathLike[str]) -> int:
    """A copy of a run as files of SQLite, also while it is written: one file, or of several ranks a folder of them.

    Returns:
        How many files.
    """
    if len(ranks.readers) == 1:
        with _whole(path) as part:
            ranks.readers[0].tables.copy(part)
        return 1
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{clean_name(folder)} cannot be made: {error.strerror or error}.") from error
    for reader in ranks.readers:
        with _whole(folder / f"fragment-{reader.rank}.sqlite") as part:
            reader.tables.copy(part)
    return len(ranks.readers)


def tables(ranks: Ranks) -> Iterator[dict[str, Array]]:
    """Column -> values of the rows of one site after the other."""
    steps = ranks.steps()
    scalars = {name: series.at(steps) for name, series in ranks.scalars.items()}
    for label in ranks.sites.values():
        series = {name: next(ranks.values(name, [label.key], steps)) for name in ranks.statistics}
        seen = ~np.all([np.isnan(values).all(1) for values in series.values()], axis=0)
        heads = max(values.shape[1] for values in series.values())
        place = _place(label, steps[seen], heads)
        numbers = {name: np.repeat(values[seen], heads) for name, values in scalars.items()}
        yield place | {name: _wide(values[seen], heads).reshape(-1) for name, values in series.items()} | numbers


def _names(ranks: Ranks) -> tuple[str, ...]:
    return (*ranks.statistics, *ranks.scalars)


def _place(label: SiteLabel, steps: Array, heads: int) -> dict[str, Array]:
    many = len(steps) * heads
    names: dict[str, Any] = {"site": label.name, "layer": label.layer, "kind": label.kind, "mode": label.mode}
    return {
        "step": np.repeat(steps, heads),
        **{name: np.full(many, value, object) for name, value in names.items()},
        "head": np.tile(np.arange(label.first_head, label.first_head + heads), len(steps)),
    }


def _wide(values: Array, heads: int) -> Array:
    """[steps, heads], filled up with NaN: a statistic that no sample of this site has is [steps, 0]."""
    return np.pad(values, ((0, 0), (0, heads - values.shape[1])), constant_values=np.nan)


def _with_types(table: dict[str, Array], pandas: Any) -> dict[str, Any]:
    """With whole numbers where layers and counts are, also where some are missing."""
    whole = [name for name in table if name == "layer" or name in COUNTS]
    return table | {name: pandas.array(table[name], dtype="Int64") for name in whole}


def _schema(ranks: Ranks, pyarrow: Any) -> Any:
    words, numbers = pyarrow.dictionary(pyarrow.int32(), pyarrow.string()), pyarrow.int64()
    kinds = {name: numbers if name in ("step", "layer", "head") else words for name in PLACE}
    of = {name: numbers if name in COUNTS else pyarrow.float32() for name in _names(ranks)}
    return pyarrow.schema([*kinds.items(), *of.items()])


def _texts(name: str, column: Array) -> list[str]:
    if name in PLACE:
        return ["" if value is None else str(csv_cell(value)) for value in column.tolist()]
    return ["" if value != value else str(int(value)) if name in COUNTS else str(value) for value in column]


@contextmanager
def _whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to, whose file takes the place of ``path`` when it is whole."""
    target = check_target(path, "table")
    if target.exists() and OURS.fullmatch(target.name):
        raise InputError(f"{clean_name(path)} is a file of a run, and would be lost. Name another file or folder.")
    try:
        with replacement(target) as part:
            yield part
    except (OSError, sqlite3.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{clean_name(path)} cannot be written: {reason}.") from error
