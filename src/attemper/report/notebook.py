"""Scans and comparisons as a notebook shows them: HTML that needs no script and is readable on light and dark ground.

Every text in it comes from somebody's model: it is escaped, and what cannot be seen is written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from attemper.readings.alarms import by_kind, with_course
from attemper.readings.labels import by_reason
from attemper.readings.reading import Alarm, HeadReading, Reading
from attemper.readings.stacks import Stack, heads_of_roles, over_heads, size_of, stacks
from attemper.statistics import SHOWN, SHOWN_BY_NAME, STATISTIC_OF
from attemper.text import clean, count, cut

if TYPE_CHECKING:
    import numpy as np

MOST_LINES = 48
"""Layers of a stack, or heads of a comparison, that are shown; the rest are counted."""
MOST_TOLD = 10
"""Heads of a role that are named."""
LONGEST_NAME = 80

VIRIDIS = (
    (68, 1, 84), (72, 26, 108), (71, 47, 125), (65, 68, 135), (57, 86, 140), (49, 104, 142), (42, 120, 142),
    (35, 136, 142), (31, 152, 139), (34, 168, 132), (53, 183, 121), (84, 197, 104), (122, 209, 81), (165, 219, 54),
    (210, 226, 27), (253, 231, 37),
)  # fmt: skip
"""Dark is little weight, light is much; readable without colour vision, since lightness rises throughout."""
MISSING = (160, 160, 160)
"""Of what has no number, or is not there."""

_PLAIN = "border:0;padding:1px 8px 1px 0;text-align:right;font-weight:400;background:transparent"
_LEFT = _PLAIN.replace("right", "left")
_MUTED = "color:inherit;opacity:0.75"
_TABLE = "border-collapse:collapse;font-size:12px;line-height:16px;color:inherit;margin:4px 0 10px"
_MISSING = "–"
_SUMMED = tuple(name for name, one in SHOWN.items() if one.column and name not in SHOWN_BY_NAME)
"""Numbers of a head of which a line of a scan shows the mean, or the largest."""


def scan_html(reading: Reading) -> str:
    """Layers x heads by normalised entropy, then alarms and what was skipped."""
    parts, roles = [_headline(reading.model, size_of(reading))], heads_of_roles(reading, MOST_TOLD)
    parts += map(_stack, stacks(reading.sites))
    parts += [_line(f"{role}, {count(many, 'head')} (layer.head score): {places}", 400) for role, many, places in roles]
    parts += [_line(note, 400) for note in reading.notes]
    if reading.alarms or not reading.notes:
        parts.append(_alarms(reading.alarms))
    skipped = by_reason((entry.name, entry.reason) for entry in reading.skipped)
    parts += [_line(f"skipped {name}: {reason}", 400) for name, reason in skipped]
    return _frame(parts)


def comparison_html(comparison: Any, statistics: Sequence[str]) -> str:
    """The heads that changed most, before and after, and the sites that only one of the two has."""
    heads = comparison.heads
    title = f"{cut(comparison.before, LONGEST_NAME)} → {cut(comparison.after, LONGEST_NAME)}"
    known = [name for name in statistics if any(head.pairs[name] != (None, None) for head in heads)]
    parts = [_headline(title, f"{count(len(heads), 'head')}"), _line(comparison.summary(), 600), _changes(heads, known)]
    if len(heads) > MOST_LINES:
        parts.append(_line(f"and {count(len(heads) - MOST_LINES, 'head')} that changed less"))
    for side, names in (("before", comparison.only_before), ("after", comparison.only_after)):
        parts += [_line(f"only {side}: {name}") for name in names]
    return _frame(parts)


def _frame(parts: Iterable[str]) -> str:
    return f'<div style="overflow-x:auto;color:inherit">{"".join(parts)}</div>'


def _headline(title: str, counts: str) -> str:
    name, told = _text(title, 2 * LONGEST_NAME + 3), _text(counts, 200)
    return f'<div><b>{name}</b> <span style="{_MUTED}">{told}</span></div>'


def _line(text: str, longest: int = 200) -> str:
    return f'<div style="font-size:12px;{_MUTED}">{_text(text, longest)}</div>'


def _text(text: object, longest: int = LONGEST_NAME) -> str:
    return escape(cut(clean(text), longest))


def _cell(text: object, style: str = _PLAIN) -> str:
    return f'<td style="{style}">{_text(text)}</td>'


def _row(cells: Iterable[str]) -> str:
    return f'<tr style="background:transparent">{"".join(cells)}</tr>'


def _heading(titles: Iterable[str], style: str = _PLAIN) -> str:
    """A line of titles; ``style`` is that of the first."""
    cells = (
        f'<th scope="col" style="{_PLAIN if place else style};{_MUTED}">{_text(title)}</th>'
        for place, title in enumerate(titles)
    )
    return f"<thead>{_row(cells)}</thead>"


def _stack(stack: Stack) -> str:
    """One table of like sites: a line for each, a coloured cell for each head."""
    size = f"up to {count(stack.queries, 'query')} x {count(stack.keys, 'key')}"
    what = f"{stack.pattern}: {stack.kind} attention, {stack.mode}, {size}"
    columns = [stack.column, *map(str, range(stack.heads)), *map(_title, _SUMMED)]
    lines = [
        _row(
            [
                _cell(label),
                *map(_entropy, site.heads),
                *(_cell("") for _ in range(stack.heads - len(site.heads))),
                *(_cell(_summary(site.heads, name)) for name in _SUMMED),
            ]
        )
        for site, label in zip(stack.sites[:MOST_LINES], stack.labels, strict=False)
    ]
    more = _line(f"and {count(len(stack.sites) - MOST_LINES, 'more layer')}") if len(stack.sites) > MOST_LINES else ""
    legend = "normalised entropy of each head, % of log n: dark is sharp, light is diffuse"
    return (
        f'<div style="font-size:12px;margin-top:6px">{_text(what, 240)}</div>{_line(legend)}'
        f'<table style="{_TABLE}">{_heading(columns)}<tbody>{"".join(lines)}</tbody></table>{more}'
    )


def _entropy(head: HeadReading) -> str:
    value = head.normalized_entropy
    if head.nonfinite_rows:
        return '<td style="border:0;padding:1px 4px;text-align:center;background:#b0201a;color:#fff">NaN</td>'
    if value is None:
        return _cell(_MISSING)
    colour = viridis(value)
    ground = ",".join(map(str, colour))
    style = f"border:0;padding:1px 4px;text-align:center;background:rgb({ground});color:{ink_on(colour)}"
    return f'<td style="{style}">{value * 100:.0f}</td>'


def _title(name: str) -> str:
    words = STATISTIC_OF[name].replace("_", " ")
    return words if name == STATISTIC_OF[name] else f"{words}, {SHOWN[name].unit}"


def _summary(heads: tuple[HeadReading, ...], name: str) -> str:
    value = over_heads(heads, name)
    return _MISSING if value is None else f"{value:.4g}"


def _alarms(alarms: tuple[Alarm, ...]) -> str:
    """Alarms by severity and kind: how many, and the first three."""
    if not alarms:
        return _line("no alarms")
    lines = [
        _row(
            [
                _cell(severity, f"{_LEFT};font-weight:600"),
                _cell(kind, _LEFT),
                _cell(len(found)),
                f'<td style="{_LEFT}">{"<br>".join(_text(with_course(alarm), 300) for alarm in found[:3])}'
                f"{'<br>…' if len(found) > 3 else ''}</td>",
            ]
        )
        for (severity, kind, _), found in by_kind(alarms).items()
    ]
    return f'<table style="{_TABLE}">{_heading(["alarms", "", "", ""], _LEFT)}<tbody>{"".join(lines)}</tbody></table>'


def _changes(heads: Sequence[Any], statistics: Sequence[str]) -> str:
    modes = {head.mode for head in heads}
    titles = ["site", "head", *map(_changed_title, statistics)]
    lines = [
        _row(
            [
                _cell(f"{head.site} ({head.mode})" if len(modes) > 1 else head.site, _LEFT),
                _cell(head.head),
                *(_change(head, name) for name in statistics),
            ]
        )
        for head in heads[:MOST_LINES]
    ]
    return f'<table style="{_TABLE}">{_heading(titles, _LEFT)}<tbody>{"".join(lines)}</tbody></table>'


def _changed_title(name: str) -> str:
    unit = f", % {SHOWN[name].unit}" if SHOWN[name].percent else ""
    return f"{name.replace('_', ' ').replace('normalized', 'normalised')}{unit}, change (floor)"


def _change(head: Any, name: str) -> str:
    """Before, after and change with its floor, as on the page; bold where the change is beyond it."""
    scale, change, floor = SHOWN[name].scale, head.change(name), head.floors.get(name)
    before, after = (_MISSING if value is None else f"{scale * value:.4g}" for value in head.pairs[name])
    told = "" if change is None else f", {scale * change:+.3g}"
    told += "" if floor is None else f" ({scale * floor:.2g})"
    weight = ";font-weight:700" if head.is_beyond(name) else ""
    return _cell(f"{before} → {after}{told}", f"{_PLAIN};white-space:nowrap{weight}")


def viridis(share: float) -> tuple[int, int, int]:
    """The colour of a value from 0 to 1; the nearest of ``VIRIDIS``."""
    return VIRIDIS[round(min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1))]


def colours(shares: np.ndarray) -> np.ndarray:
    """[..., 3] bytes: colours of values from 0 to 1, between those of ``VIRIDIS``; ``MISSING`` where there is none."""
    import numpy as np

    scale, place = np.array(VIRIDIS, dtype=float), np.nan_to_num(shares).clip(0.0, 1.0) * (len(VIRIDIS) - 1)
    low = np.minimum(place.astype(int), len(VIRIDIS) - 2)
    mixed = scale[low] + (scale[low + 1] - scale[low]) * (place - low)[..., None]
    return np.where(np.isfinite(shares)[..., None], mixed, MISSING).round().astype(np.uint8)


def ink_on(colour: tuple[int, int, int]) -> str:
    """Black or white, whichever has more contrast: never below 4.5 to 1, by the formula of WCAG."""
    shares = [channel / 255 for channel in colour]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return "#000" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else "#fff"
