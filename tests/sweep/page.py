"""Results of the sweep: one JSON line a model type, and the section of docs/models.md that is written from them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- sweep: begin -->", "<!-- sweep: end -->"
Row = Mapping[str, Any]
VERDICTS = ("exact", "skipped", "wrong", "not tried")
FLOAT32 = "does not run in float64"
"""Begins the note of a type that is held against float32."""
WHY = (
    (r"configuration cannot be made", "its configuration needs arguments"),
    (r"no class of transformers", "transformers has no class for this configuration"),
    (r"requires the (\w+) library|No module named '(\w+)'", "it needs {}, which the tests do not install"),
    (r"weights take", "its weights take more than 2 GiB"),
    (r"longer than (?:\d|1\d) s", "it took longer than the 6 to 12 s that it was given"),
    (r"took longer", "it took too long"),
    (r"process ended", "its process ended"),
    (r"run was ended", "the run was ended before it"),
    (r"missing the required .forward", "its class has no forward"),
    (r"no rule for its input|no inputs by rule fit", "the rules make no input that fits it"),
    (r"", "it cannot be built small by rule"),
)
"""A pattern of why a type was not tried -> the same in a table."""


def load(path: Path = RESULTS) -> list[dict[str, Any]]:
    """A dictionary for each type that has a result."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def save(path: Path, rows: Iterable[Row]) -> None:
    """Writes the results, one line a type, in the order of their names."""
    lines = [json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=lambda row: row["type"])]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def counts(rows: Iterable[Row]) -> str:
    """How many types there are of each verdict."""
    found = Counter(row["verdict"] for row in rows)
    parts = ", ".join(f"{found[name]} {name}" for name in VERDICTS)
    return f"{found.total()} model types: {parts}"


def why(row: Row) -> str:
    """Why a type was not tried, as a kind of reason."""
    for pattern, text in WHY:
        if found := re.search(pattern, "; ".join(row["reasons"])):
            return text.format(next(filter(None, found.groups()), "")) if found.groups() else text
    raise AssertionError


def section(rows: Iterable[Row]) -> str:
    """The results as Markdown."""
    rows = sorted(rows, key=lambda row: row["type"])
    by_verdict = {name: [row for row in rows if row["verdict"] == name] for name in VERDICTS}
    lines = [f"**{counts(rows)}.**", "", _float32(by_verdict["exact"]), ""]
    lines += ["| layers without weights | exact model types |", "|---|---|"]
    lines += _grouped((_layers(row), row["type"]) for row in by_verdict["exact"])
    lines += ["", "| skipped, with the reason | model types |", "|---|---|"]
    lines += _grouped((reason, row["type"]) for row in by_verdict["skipped"] for reason in row["reasons"])
    lines += ["", "| not tried, with the reason | model types |", "|---|---|"]
    lines += _grouped((why(row), row["type"]) for row in by_verdict["not tried"])
    return "\n".join(lines)


def _float32(rows: Iterable[Row]) -> str:
    """Which types are exact against weights in float32."""
    names = [row["type"] for row in rows if any(note.startswith(FLOAT32) for note in row["notes"])]
    return f"{len(names)} of the exact ones do not run in float64 and are compared in float32: {', '.join(names)}."


def _layers(row: Row) -> str:
    """Kinds of its layers without weights, which every reading names."""
    return ", ".join(sorted({_first(kind) for kind in row["layers"].values()})) or "none"


def _first(reason: str) -> str:
    return "router" if "router" in reason else reason.partition(";")[0].partition(" (")[0]


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for reason, name in pairs:
        found.setdefault(reason.partition(";")[0], []).append(name)
    ordered = sorted(found.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return [f"| {reason.replace('|', '/')} | {len(names)}: {', '.join(names)} |" for reason, names in ordered]


def written(rows: Iterable[Row], page: str) -> str:
    """The page with the results in their place."""
    head, tail = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
    return f"{head}\n\n{section(rows)}\n\n{tail}"


def write(rows: Iterable[Row]) -> None:
    """Puts the results into docs/models.md."""
    PAGE.write_text(written(rows, PAGE.read_text("utf-8")), "utf-8")
