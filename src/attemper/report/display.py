"""Text and numbers as they are shown: nothing invisible, nothing that could be read as code."""

from __future__ import annotations

import json
from typing import Any


def rounded(value: float | None, digits: int = 5) -> float | int | None:
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


def count(many: int, one: str, several: str | None = None) -> str:
    """``1 head``, ``1,024 heads``."""
    return f"{many:,} {one if many == 1 else several or one + 's'}"


def script_json(data: Any) -> str:
    """``data`` as JSON that may stand inside a ``<script>`` element: ASCII, and no ``<``, ``>`` or ``&``.

    Raises:
        ValueError: there is a NaN or an infinity in it; JSON has no word for them and browsers refuse them.
    """
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
