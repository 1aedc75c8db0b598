"""Pairwise covers, and what a default run holds back for ``--all``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, product
from zlib import crc32

import pytest

Row = tuple[Hashable, ...]
FEW_CASES = 3
"""A table of no more is no table: all of it stays."""
GRID = "beyond the pairwise cover of its parameters"
EACH = "beyond each value of its parameters"
TURNS = "of a table that other tests have by default"
FEW = "more of what a few cases show by default"
HELD_BACK = pytest.StashKey[dict[tuple[str, str], int]]()
"""How many cases a run leaves to which lane, by reason."""


def cover(*axes: Iterable[Hashable]) -> list[Row]:
    """Some rows of the product, in its order: every pair of values from two axes stands in at least one of them."""
    rows = list(product(*axes))
    return [rows[place] for place in chosen(rows)]


def chosen(rows: Sequence[Row]) -> list[int]:
    """Places of the rows that cover every pair which the rows have: greedily, the first among equals."""
    left = {place: _pairs(row) for place, row in enumerate(rows)}
    missing = set().union(*left.values())
    picked = []
    gain = max(map(len, left.values()), default=0)
    while missing:
        for place in list(left):
            left[place] &= missing
            if len(left[place]) == gain:
                picked.append(place)
                missing -= left.pop(place)
            elif not left[place]:
                del left[place]
        gain = max(map(len, left.values()), default=0) if len(left) else 0
    return sorted(picked)


def each_value(rows: Sequence[Row]) -> list[int]:
    """Places of the rows in which every value of every axis stands once at least, and none much oftener than others."""
    values = [set(enumerate(row)) for row in rows]
    missing, met, picked = set().union(*values), Counter(), []
    while missing:
        place = max(
            range(len(rows)), key=lambda at: (len(values[at] & missing), -sum(met[value] for value in values[at]))
        )
        picked.append(place)
        missing -= values[place]
        met.update(values[place])
    return sorted(picked)


def in_turn(name: str, cases: int, one_in: int) -> range:
    """Places of one case in so many; the name says where they begin, so that tests of one table take others of it."""
    return range(crc32(name.encode()) % min(one_in, cases), cases, one_in)


def _pairs(row: Row) -> set[Row]:
    """Pairs of values with their axes; a row of one value is all that it has to show."""
    places = combinations(enumerate(row), 2) if len(row) > 1 else [((0, part),) for part in row]
    return set(places)


def held_back(items: Iterable[pytest.Item]) -> dict[pytest.Item, str]:
    """What only ``--all`` runs, and why: slow cases, and those beyond a grid, each value or a turn."""
    reasons: dict[pytest.Item, str] = {}
    grids: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        slow, quick, each, grid = map(item.get_closest_marker, ("slow", "quick", "each", "grid"))
        if slow:
            reasons[item] = slow.args[0] if slow.args else "for no reason given"
        elif quick and not _is_one_of(item, quick.args):
            reasons[item] = FEW
        elif (each or grid) and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            grids["each" if each else "grid", item.nodeid.partition("[")[0]].append(item)
    for (name, _), grid in grids.items():
        choose, why = (each_value, EACH) if name == "each" else (chosen, GRID)
        kept = {grid[place] for place in choose([_row(item) for item in grid])}
        reasons |= {item: why for item in grid if item not in kept}
    turns: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item not in reasons and item.get_closest_marker("turns"):
            turns[item.nodeid.partition("[")[0]].append(item)
    for name, table in turns.items():
        if len(table) <= FEW_CASES:
            continue
        (one_in,) = table[0].get_closest_marker("turns").args  # pyright: ignore[reportOptionalMemberAccess]
        kept = {table[place] for place in in_turn(name, len(table), one_in)}
        reasons |= {item: TURNS for item in table if item not in kept}
    return reasons


def left_to(lane: str, reasons: dict[pytest.Item, str]) -> dict[tuple[str, str], int]:
    return {(lane, why): number for why, number in Counter(reasons.values()).items()}


def _is_one_of(item: pytest.Item, words: Iterable[str]) -> bool:
    case = item.name.partition("[")[2]
    return any(word in case for word in words)


def _row(item: pytest.Function) -> Row:
    """Which value of every parameter: the same object for all cases that have it."""
    return tuple(map(id, item.callspec.params.values()))
