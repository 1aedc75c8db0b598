"""A drawing of ``a --> b`` lines: the diagrams of the repository, which GitHub draws by Mermaid, as SVG for the site.

Each name stands one row below the lowest that leads to it. Within a row, names stand in the order of those above them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from itertools import pairwise

EDGE = re.compile(r"\s*([\w.]+) --> ([\w.]+)\s*")
WIDE, HIGH = 130, 70
"""Between the middles of two names of a row, and between two rows, in pixels."""
BOX, LINE = 108, 28
Place = tuple[str, int]
"""A name and its row; of a line that passes a row, the name it comes from and the one it leads to."""


def svg(diagram: str) -> str:
    """The SVG of a diagram that begins with ``graph TD``, on one line.

    Raises:
        ValueError: a line is not ``a --> b``, or names lead round in a circle.
    """
    head, *lines = diagram.strip().splitlines()
    found = [EDGE.fullmatch(line) for line in lines]
    if head.strip() != "graph TD" or not all(found):
        raise ValueError("a diagram must be `graph TD` and lines such as `a --> b`; the site draws nothing else.")
    edges = [(one[1], one[2]) for one in found if one is not None]
    row = rows(edges)
    pieces = [piece for edge in edges for piece in passes(*edge, row)]
    at = places(row, pieces)
    width = WIDE * max(sum(1 for _, r in at if r == level) for level in row.values())
    height = HIGH * (max(row.values()) + 1)
    drawn = [curve(at[start], at[end], last=end[0] in row) for start, end in pieces]
    drawn += [box(name, at[name, level]) for name, level in row.items()]
    said = escape("; ".join(f"{start} to {end}" for start, end in edges), quote=True)
    return (
        f'<svg class="drawing" viewBox="{-width / 2:g} 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{said}">{"".join(drawn)}</svg>'
    )


def rows(edges: list[tuple[str, str]]) -> dict[str, int]:
    """Name -> its row: the length of the longest way to it."""
    row = {name: 0 for edge in edges for name in edge}
    for _ in row:
        for start, end in edges:
            row[end] = max(row[end], row[start] + 1)
    if any(row[end] <= row[start] for start, end in edges):
        raise ValueError("names of a diagram must not lead round in a circle.")
    return row


def passes(start: str, end: str, row: dict[str, int]) -> Iterator[tuple[Place, Place]]:
    """The pieces of a line, each from one row to the next."""
    between = [(f"{start} {end}", level) for level in range(row[start] + 1, row[end])]
    stops = [(start, row[start]), *between, (end, row[end])]
    yield from pairwise(stops)


def places(row: dict[str, int], pieces: list[tuple[Place, Place]]) -> dict[Place, tuple[float, float]]:
    """Where the middle of each place is."""
    above: dict[Place, list[Place]] = defaultdict(list)
    for start, end in pieces:
        above[end].append(start)
    every = {*row.items(), *above}
    at: dict[Place, tuple[float, float]] = {}
    for level in range(max(row.values()) + 1):
        here = sorted(place for place in every if place[1] == level)
        here.sort(key=lambda place: sum(at[one][0] for one in above[place]) / max(len(above[place]), 1))
        for i, place in enumerate(here):
            at[place] = (WIDE * (i - (len(here) - 1) / 2), HIGH * (level + 0.5))
    return at


def curve(start: tuple[float, float], end: tuple[float, float], *, last: bool) -> str:
    """A piece of a line; its last piece ends in an arrow."""
    (x, y), (to, down) = start, end
    y, down = y + LINE / 2, down - LINE / 2 - (4 if last else -LINE)
    middle = (y + down) / 2
    line = f'<path d="M{x:g} {y:g}C{x:g} {middle:g} {to:g} {middle:g} {to:g} {down:g}"/>'
    arrow = f'<path class="arrow" d="M{to - 4:g} {down - 3:g}L{to:g} {down + 4:g}L{to + 4:g} {down - 3:g}z"/>'
    return line + arrow if last else line


def box(name: str, middle: tuple[float, float]) -> str:
    x, y = middle
    return (
        f'<rect x="{x - BOX / 2:g}" y="{y - LINE / 2:g}" width="{BOX}" height="{LINE}" rx="5"/>'
        f'<text x="{x:g}" y="{y + 5:g}">{escape(name)}</text>'
    )
