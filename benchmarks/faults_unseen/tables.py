"""Tables of judged pairs, the listing of what is wrong, and JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from .specs import HELD_OUT


def table(title: str, rows: list[dict[str, Any]], key: str, columns: dict[str, Any]) -> str:
    groups = list(dict.fromkeys(row[key] for row in rows))
    lines = [f"| {title} | pairs | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for group in [*groups, None]:
        chosen = [row for row in rows if group is None or row[key] == group]
        counts = map(str, _counts(chosen, columns).values())
        lines.append(f"| {group or 'all'} | {len(chosen)} | {' | '.join(counts)} |")
    return "\n".join(lines)


FAULT_COLUMNS = {
    "right": lambda row: row["grade"] == "right",
    "fair": lambda row: row["grade"] == "fair",
    "wrong": lambda row: row["grade"] == "wrong",
    "false numbers": lambda row: row["false_numbers"],
    "asymmetric": lambda row: row["asymmetric"],
    "says too much": lambda row: row["overclaims"],
}
SAFE_COLUMNS = {
    "right": lambda row: row["grade"] == "right",
    "blamed": lambda row: row["grade"] == "blamed",
    "refused": lambda row: row["grade"] == "refused",
    "false numbers": lambda row: row["false_numbers"],
    "asymmetric": lambda row: row["asymmetric"],
}


def report(faults: list[dict[str, Any]], safe: list[dict[str, Any]], listing: bool) -> str:
    parts = []
    faults, safe = ([{**row, "part": part(row)} for row in rows] for rows in (faults, safe))
    if faults:
        for title, key in (("fault", "group"), ("architecture", "architecture"), ("type", "setting"), ("part", "part")):
            parts.append(table(title, faults, key, FAULT_COLUMNS))
    if safe:
        for title, key in (
            ("harmless", "group"),
            ("architecture", "architecture"),
            ("types", "setting"),
            ("part", "part"),
        ):
            parts.append(table(title, safe, key, SAFE_COLUMNS))
        parts.append("said of harmless pairs: " + str(dict(Counter(row["kind"] for row in safe).most_common())))
    if listing:
        parts += [
            f"{row['grade']} | {row['pair']} | wanted {row['best']}"
            f"{'' if row['value'] is None else ' ' + format(row['value'], '.4g')}"
            f" | said {row['there']}; back {row['back']}"
            f"{' | false number ' + ', '.join(row['false_numbers']) if row['false_numbers'] else ''}"
            f"{' | asymmetric' if row['asymmetric'] else ''}"
            f"{' | says ' + ', '.join(row['overclaims']) if row['overclaims'] else ''}"
            for row in faults
            if row["grade"] == "wrong" or row["asymmetric"] or row["overclaims"]
        ]
        parts += [
            f"{row['grade']} | {row['pair']} | said {row['there']}; back {row['back']}"
            for row in safe
            if row["grade"] == "blamed" or row["asymmetric"]
        ]
    tables = 4 * (bool(faults) + bool(safe))
    return "\n\n".join(parts[:tables]) + "\n\n" + "\n".join(parts[tables:])


def part(row: dict[str, Any]) -> str:
    return "held out" if row["architecture"] in HELD_OUT else "others"


def _counts(rows: list[dict[str, Any]], columns: dict[str, Any]) -> dict[str, int]:
    return {name: sum(bool(test(row)) for row in rows) for name, test in columns.items()}


def summary(faults: list[dict[str, Any]], safe: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of each case: what is asked for, what was said, and how it was judged."""
    found: dict[str, Any] = {}
    for side, rows, columns in (("faults", faults, FAULT_COLUMNS), ("harmless", safe, SAFE_COLUMNS)):
        found[side] = {"all": {"pairs": len(rows), **_counts(rows, columns)}}
        for name in ("held out", "others"):
            chosen = [row for row in rows if part(row) == name]
            found[side][name] = {"pairs": len(chosen), **_counts(chosen, columns)}
        for case in dict.fromkeys(row["pair"].split()[1] for row in rows):
            chosen = [row for row in rows if row["pair"].split()[1] == case]
            counted = {name: number for name, number in _counts(chosen, columns).items() if number}
            best = {"best": chosen[0]["best"]} if side == "faults" else {}
            said = dict(Counter(row["kind"] for row in chosen).most_common())
            found[side][case] = {"group": chosen[0]["group"], "pairs": len(chosen), **counted, **best, "said": said}
    return found


def lined(value: Any, depth: int) -> str:
    """JSON, one line for each entry down to ``depth``."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(lined(entry, depth - 1) for entry in value) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {lined(entry, depth - 1)}" for name, entry in value.items()) + "\n}"
