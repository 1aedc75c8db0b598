"""What an experiment returns: tables and charts as plain records, for a terminal, a file or a picture alike.

No tensors. The same seed gives the same records bit for bit, except in tables and charts that say they are
``measured`` on this machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from attemper.checks import indentation
from attemper.errors import InputError

SCHEMA = 1

Cell = float | int | str | None
"""What stands in a table: a number, a word, or None where there is nothing."""


@dataclass(frozen=True)
class Column:
    """A column's name, and the unit of what stands in it ("nats", "keys", "s"; empty where there is none)."""

    name: str
    unit: str = ""

    @property
    def heading(self) -> str:
        return f"{self.name} [{self.unit}]" if self.unit else self.name


def headings(*texts: str) -> tuple[Column, ...]:
    """Columns from their headings: a name, and its unit in brackets where it has one ("entropy [nats]")."""
    parts = [text[:-1].rpartition(" [") if text.endswith("]") else (text, "", "") for text in texts]
    return tuple(Column(name, unit) for name, _, unit in parts)


@dataclass(frozen=True)
class Table:
    """Rows of plain values, and a sentence of what to see in them."""

    title: str
    see: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    measured: bool = False
    """Whether it holds times or bytes of this machine, which differ from run to run."""

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"{self.title}: {len(row)} cells under {len(self.columns)} columns"

    def column(self, name: str) -> tuple[Cell, ...]:
        """The values under a column's name.

        Raises:
            InputError: no column has this name.
        """
        names = [column.name for column in self.columns]
        if name not in names:
            raise InputError(f"table {self.title!r} has no column {name!r}. Columns: {', '.join(names)}.")
        return tuple(row[names.index(name)] for row in self.rows)


@dataclass(frozen=True)
class Axis:
    """A label with its unit in words, and the scale: "linear" or "log"."""

    label: str
    scale: str = "linear"
    bounds: tuple[float, float] | None = None
    """The ends of the axis; None: what is drawn fills it."""


@dataclass(frozen=True)
class Series:
    """One curve, or points without a line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    errors: tuple[float, ...] = ()
    """Standard errors of ``y``, drawn as bars; empty where there are none."""
    line: bool = True


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    measured: bool = False


@dataclass(frozen=True)
class Experiment:
    """The result of one experiment."""

    name: str
    question: str
    """What it answers, in a sentence."""
    seed: int
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]

    def table(self, title: str) -> Table:
        """The table of this title.

        Raises:
            InputError: there is none.
        """
        for table in self.tables:
            if table.title == title:
                return table
        titles = "; ".join(table.title for table in self.tables)
        raise InputError(f"experiment {self.name} has no table {title!r}. Tables: {titles}.")

    def to_dict(self) -> dict[str, Any]:
        """The document of ``attemper lab NAME --json``, schema 1: NaN and infinities are null."""
        found = json_value(asdict(self))
        return {"schema": SCHEMA, "experiment": found.pop("name"), **found}

    def to_json(self, indent: int | None = None) -> str:
        spaces = indentation(indent, "result")
        return json.dumps(self.to_dict(), indent=spaces, ensure_ascii=False, allow_nan=False)


def json_value(value: Any, digits: int | None = None) -> Any:
    """What JSON can hold: numbers that it cannot write as None, others with so many ``digits``; None for all."""
    if isinstance(value, dict):
        return {str(name): json_value(part, digits) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [json_value(part, digits) for part in value]
    if not isinstance(value, float):
        return value
    return None if not math.isfinite(value) else value if digits is None else float(f"{value:.{digits}g}")


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch, then as many as before: sums of the same order on every machine, hence the same bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
