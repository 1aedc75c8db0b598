"""The page "which models are seen, and how": each row is what a test of this suite ran, and nothing else.

A test records what it has checked through the fixture ``seen``; a whole run (``pytest --all``) holds the records
against docs/models.md and fails where they differ, and ``pytest --all --write-models`` writes the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PROPERTY = "model seen"
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"


@dataclass(frozen=True)
class Seen:
    """What one or several tests found out about a model and one way of seeing it."""

    library: str
    model: str
    way: str
    error_nats: float | None = None
    """Largest difference of an entropy from the model's own weights."""
    identical_steps: int | None = None
    """Training steps over which outputs, gradients and random numbers were bit-identical with and without a watch."""
    skipped: str | None = None
    """Why it is not seen; it is then skipped by name."""
    more: tuple[tuple[str, str], ...] = ()
    """Further columns of its library's table, by name."""

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.library, self.model, self.way)

    def joined(self, other: Seen) -> Seen:
        return Seen(
            *self.key,
            _largest(self.error_nats, other.error_nats),
            _largest(self.identical_steps, other.identical_steps),
            self.skipped or other.skipped,
            tuple((dict(self.more) | dict(other.more)).items()),
        )


def _largest(one: Any, two: Any) -> Any:
    given = [value for value in (one, two) if value is not None]
    return max(given) if given else None


def recorder(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """``seen(library, model, way, error_nats=, identical_steps=, skipped=, more=)``, called after a test's asserts."""

    def seen(library: str, model: str, way: str, *, more: Mapping[str, str] | None = None, **found: Any) -> None:
        row = Seen(library, model, way, **found, more=tuple((more or {}).items()))
        record_property(PROPERTY, (*row.key, row.error_nats, row.identical_steps, row.skipped, row.more))

    return seen


def joined(rows: Iterable[Seen]) -> list[Seen]:
    """One row for each model and way, in the order of the page."""
    found: dict[tuple[str, str, str], Seen] = {}
    for row in rows:
        found[row.key] = found[row.key].joined(row) if row.key in found else row
    return [found[key] for key in sorted(found, key=lambda key: tuple(part.lower() for part in key))]


def table(rows: list[Seen]) -> str:
    """The rows as Markdown, one table for each library."""
    parts = []
    for library in dict.fromkeys(row.library for row in rows):
        own = [row for row in rows if row.library == library]
        more = tuple(dict.fromkeys(name for row in own for name, _ in row.more))
        steps = () if more else ("identical training steps",)
        columns = ("model", "how it is seen", "largest error, nats", *steps, *more)
        parts.append(f"## {library}\n\n| {' | '.join(columns)} |")
        parts.append("|---" * len(columns) + "|")
        parts += [_line(row, more) for row in own]
        parts.append("")
    return "\n".join(parts).rstrip()


def _line(row: Seen, more: Sequence[str]) -> str:
    if row.skipped is not None:
        return f"| {row.model} | {row.way} | skipped: {row.skipped} | |"
    error = "" if row.error_nats is None else f"{_rounded_up(row.error_nats):.0e}"
    steps = "" if row.identical_steps is None else str(row.identical_steps)
    rest = [dict(row.more).get(name, "") for name in more] or [steps]
    return f"| {row.model} | {row.way} | {error} | {' | '.join(rest)} |"


def _rounded_up(error: float) -> float:
    """To one digit, never down: a bound that holds. Below 1e-9 the float64 yardstick itself rounds."""
    if error < 1e-9:
        return 1e-9
    scale = 10.0 ** math.floor(math.log10(error))
    return math.ceil(error / scale * (1 - 1e-12)) * scale


def differences(rows: list[Seen], page: str) -> list[str]:
    """Lines that stand on the page and were not run, or the other way round. Errors differ between machines."""
    here, there = (
        {_without_error(line) for line in text.splitlines() if _is_row(line)} for text in (table(rows), page)
    )
    missing = [f"not on the page: {line}" for line in sorted(here - there)]
    return missing + [f"on the page, but no test ran it: {line}" for line in sorted(there - here)]


def _is_row(line: str) -> bool:
    return line.startswith("| ") and not line.startswith("| model |")


def _without_error(line: str) -> str:
    cells = line.split("|")
    if len(cells) > 4 and not cells[3].strip().startswith("skipped"):
        cells[3] = " measured " if cells[3].strip() else " "
    return "|".join(cells)


def rows_of_page() -> str:
    """What stands between the marks of the page."""
    text = PAGE.read_text("utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def write(rows: list[Seen]) -> None:
    """Puts the rows between the marks of the page."""
    text = PAGE.read_text("utf-8")
    head, tail = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{head}\n\n{table(rows)}\n\n{tail}", "utf-8")
