"""Text and numbers as they are shown on a page or in a terminal: nothing invisible, nothing that moves what stands
around it, nothing that could be read as code.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

_HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, characters that change the order in which others are drawn, line and paragraph separators, and
lone surrogates, which no encoding can hold.
"""
_CALL = re.compile(r"(.+)#([1-9][0-9]{0,8})", re.DOTALL)


def clean(text: object) -> str:
    r"""``text`` with what cannot be seen, or would rearrange its neighbours, written out.

    Names of models, sites and files come from others: one with an escape sequence could clear a terminal, one with a
    bidirectional override could pass for another name. Right-to-left letters stay.

    Example:
        >>> clean("a\x00b")
        'a\\u0000b'
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def clean_json(document: str) -> str:
    """JSON whose letters all show: a hidden one as JSON's own escape, a lone surrogate as ``clean`` writes it."""
    lone = re.sub("[\ud800-\udfff]", lambda found: f"\\\\u{ord(found[0]):04x}", document)
    return "\n".join(map(clean, lone.split("\n")))


def cut(text: str, longest: int) -> str:
    """At most ``longest`` characters, with an ellipsis where something is missing."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def token_text(token: str) -> str:
    """A token as it is drawn: newline and tab as arrows, what else cannot be seen as ``clean`` has it.

    Example:
        >>> token_text("a\\n"), token_text("\\t")
        ('a↵', '⇥')
    """
    return clean(token.replace("\n", "\u21b5").replace("\t", "\u21e5"))


LONGEST_NAME = 200
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula."""


def call_of(name: str) -> tuple[str, int]:
    """The module, or tap, that the name of a site is of, and the number of its call in a pass.

    Example:
        >>> call_of("layers.0.attention"), call_of("layers.0.attention#12")
        (('layers.0.attention', 1), ('layers.0.attention', 12))
    """
    found = _CALL.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 1)


def clean_name(name: object) -> str:
    """A name that others chose as it stands in a message: ``clean``, and cut where it is too long to read."""
    return cut(clean(name), LONGEST_NAME)


def csv_cell(value: Any) -> Any:
    """Text for a cell of a CSV file: with a quote before what a spreadsheet would calculate. Numbers as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def columns_that_fit(columns: Mapping[str, Sequence[str]], room: int) -> list[str]:
    """Names of the first of ``columns`` (each its title and its cells) that stand side by side in ``room`` characters,
    with two between them; the first always: a digit that is cut off would be another number.
    """
    names = []
    for name, cells in columns.items():
        room -= max(map(len, cells), default=0) + 2
        if names and room < 0:
            break
        names.append(name)
    return names


def plain_table(texts: Iterable[str] = (), numbers: Iterable[str] = (), *, gap: int = 2, **options: Any) -> Table:
    """A table for rich without lines: titles of columns of texts, which go on below where they are too long, and of
    numbers, which never do. ``options``: of rich's table.
    """
    from rich.table import Table

    made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", **options)
    for title in texts:
        made.add_column(title, overflow="fold")
    for title in numbers:
        made.add_column(title, justify="right", no_wrap=True)
    return made


def plain_text(shown: Any) -> str:
    """What rich prints of it where there is neither a terminal nor a notebook: plain text, in 120 columns."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=120, color_system=None, force_jupyter=False).print(shown)
    return file.getvalue().rstrip()


def round_digits(value: float | None, digits: int = 5) -> float | int | None:
    """``value`` to ``digits`` significant digits, in the fewest characters; whole numbers lose their point."""
    if value is None:
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def number(value: float | None, digits: int = 4) -> str:
    """``digits`` significant digits for people; a dash where there is no number.

    Example:
        >>> number(0.92272), number(15.0), number(123456.0), number(None)
        ('0.9227', '15', '123,456', '–')
    """
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def decimals(value: float | None, places: int) -> str:
    """So many digits behind the point; a hyphen where there is no number."""
    return "-" if value is None else f"{value:.{places}f}"


BARS = "▁▂▃▄▅▆▇█"


def sparkline(
    values: Sequence[float | None], columns: int, *, low: float | None = None, high: float | None = None
) -> str:
    """``values`` in their order as bars, at most ``columns`` of them: where there are more values, a bar is a mean.

    Args:
        values: None or NaN where there is none, shown as a blank.
        low, high: what the lowest and the highest bar stand for; None for the least and the largest bar.

    Example:
        >>> sparkline([0.0, 1.0, None, 2.0, 3.0], 9)
        '▁▃ ▆█'
    """
    count = min(columns, len(values))
    shares = (values[place * len(values) // count : (place + 1) * len(values) // count] for place in range(count))
    finite = ([value for value in share if value is not None and math.isfinite(value)] for share in shares)
    bars = [sum(share) / len(share) if share else None for share in finite]
    known = [bar for bar in bars if bar is not None]
    first = min(known, default=0.0) if low is None else low
    span = (max(known, default=0.0) if high is None else high) - first
    return "".join(" " if bar is None else BARS[_level(bar - first, span)] for bar in bars)


def _level(above: float, span: float) -> int:
    """Which bar shows ``above``, a part of ``span``; the lowest where all are alike."""
    return 0 if span <= 0 else min(len(BARS) - 1, max(0, int(above / span * len(BARS))))


def count(many: int, one: str, several: str | None = None) -> str:
    """``1 head``, ``1,024 heads``, ``2 queries``, ``3 batches``."""
    return f"{many:,} {one if many == 1 else several or _ENDING.sub(_several, one, count=1)}"


_ENDING = re.compile("([^aeiou])y$|(s|x|ch)$|$")


def _several(ending: re.Match[str]) -> str:
    return f"{ending[1]}ies" if ending[1] else f"{ending[2]}es" if ending[2] else "s"


def first_of(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first ``most`` of ``names``, and how many more there are.

    Example:
        >>> first_of(["a", "b", "c"], 2)
        'a, b, and 1 more'
    """
    rest = len(names) - most
    return separator.join([*names[:most], *([f"and {rest:,} more"] if rest > 0 else [])])


def counts(**many: int) -> str:
    """``1 site, 16 heads``: of each name in the singular, so many."""
    return ", ".join(count(number, one) for one, number in many.items())


def date_of(seconds: float) -> str:
    """A moment (seconds since 1970, UTC) as readings tell it: ``2026-01-31T09:30:00Z``."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def script_json(data: Any) -> str:
    """``data`` as JSON that may stand inside a ``<script>`` element: ASCII, and no ``<``, ``>`` or ``&``.
    ``ValueError``: there is a NaN or an infinity in it; JSON has no word for them and browsers refuse them.
    """
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
