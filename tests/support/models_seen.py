"""What tests found out about each model that attemper reads, and the tables of docs/models.md written from it.

A test records what it has checked through the fixture ``seen``; a whole run (``pytest --all``) compares the records
with models_seen.jsonl and fails where they differ. ``pytest --all --write-models`` writes that file and the page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

ROWS = Path(__file__).with_suffix(".jsonl")
"""A JSON line for each model and way."""
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
    """What else its test found, by name."""

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


def load() -> list[Seen]:
    """Every row, as it was written last."""
    found = map(json.loads, ROWS.read_text("utf-8").splitlines())
    return [Seen(**row | {"more": tuple(row.get("more", {}).items())}) for row in found]


def table(rows: list[Seen]) -> str:
    """The rows as Markdown: of each library the largest error, models that are read alike in a row, what is skipped."""
    parts = []
    for library, own in groupby(rows, lambda row: row.library):
        found = list(own)
        read = [row for row in found if row.skipped is None]
        errors = [row.error_nats for row in read if row.error_nats is not None]
        title = f"### {library}" + (f" (errors up to {_rounded_up(max(errors)):.0e} nats)" if errors else "")
        parts += [title, *(_architectures if any(row.more for row in found) else _read)(read)]
        parts += _columns(
            "skipped, with the reason", _grouped((_short(row.skipped), row.model) for row in found if row.skipped)
        )
    return "\n\n".join(parts)


def _short(reason: str) -> str:
    return re.sub(r"(?: \([^)]*\)|:.*)$", "", reason)


def _read(rows: list[Seen]) -> list[str]:
    ways: dict[str, list[Seen]] = {}
    for row in rows:
        ways.setdefault(row.model, []).append(row)
    return _columns("ways", _grouped((_ways(own), model) for model, own in ways.items()))


def _ways(rows: list[Seen]) -> str:
    """``registry: eager*, sdpa*``: the star says that training was identical."""
    named = [f"{row.way}{'*' * bool(row.identical_steps)}" for row in rows]
    registry = [way.removeprefix("registry, ") for way in named if way.startswith("registry, ")]
    rest = [way for way in named if not way.startswith("registry, ")]
    return "; ".join([*rest, *([f"registry: {', '.join(registry)}"] if registry else [])])


def _architectures(rows: list[Seen]) -> list[str]:
    return _columns("fold; other layers, named", _grouped((_layers(row), row.model) for row in rows))


def _layers(row: Seen) -> str:
    """``per head; state space``: how temperatures fold, and the kinds of layers without weights."""
    more = dict(row.more)
    fold = re.sub(r"`model\.layers\.(\d+)[^`]*`", r"layer \1", more.get("fold", ""))
    fold = re.sub(r"`model\.(\w+)[^`]*`", r"\1", fold).replace(": heads share the gain of their norm", "")
    kinds = re.sub(r"`[^`]*`: ", "", more.get("named, not read", ""))
    return "; ".join(filter(None, [fold, kinds]))


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names by what is said of them, the most first; each name once."""
    found: dict[str, list[str]] = {}
    for said, name in pairs:
        if name not in found.setdefault(said, []):
            found[said].append(name)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def _columns(title: str, found: Mapping[str, list[str]]) -> list[str]:
    """A table as one text; none where nothing was found."""
    rows = [f"| {said} | {'; '.join(names)} |" for said, names in found.items()]
    return ["\n".join([f"| {title} | models |", "|---|---|", *rows])] if rows else []


def _rounded_up(error: float) -> float:
    """To one digit, never down: a bound that holds. Below 1e-9 the float64 yardstick itself rounds."""
    if error < 1e-9:
        return 1e-9
    scale = 10.0 ** math.floor(math.log10(error))
    return math.ceil(error / scale * (1 - 1e-12)) * scale


def differences(rows: list[Seen], known: list[Seen]) -> list[str]:
    """Rows that were written and not found, or the other way round. Errors differ between machines."""
    here, there = (set(map(_without_error, part)) for part in (rows, known))
    missing = [f"not written: {' | '.join(row.key)}" for row in here - there]
    return sorted(missing + [f"written, but no test found it: {' | '.join(row.key)}" for row in there - here])


def _without_error(row: Seen) -> Seen:
    error = None if row.error_nats is None else 1.0
    return replace(row, error_nats=error, more=tuple(sorted(pair for pair in row.more if pair[1])))


def written(rows: list[Seen], page: str) -> str:
    """The page with the tables in their place."""
    head, tail = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    return f"{head}\n\n{table(rows)}\n\n{tail}"


def write(rows: list[Seen]) -> None:
    """Writes the rows, and the page from them."""
    found = [{key: value for key, value in asdict(row).items() if value not in (None, ())} for row in rows]
    for row in found:
        if "error_nats" in row:
            row["error_nats"] = _rounded_up(row["error_nats"])
        if "more" in row:
            row["more"] = {name: value for name, value in row["more"] if value}
    ROWS.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found), "utf-8")
    PAGE.write_text(written(load(), PAGE.read_text("utf-8")), "utf-8")
