"""Text as it is shown, on a page or in a terminal: nothing invisible, nothing that moves what stands around it."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

_REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the order in which others are drawn."""
_INVISIBLE = frozenset(("Cc", "Cs", "Zl", "Zp"))
"""Control characters, lone surrogates (which no encoding can hold), line and paragraph separators."""


def shown(text: object) -> str:
    r"""``text`` with what cannot be seen, or would rearrange its neighbours, written out.

    Names of models, sites and files come from others: one with an escape sequence could clear a terminal, one with a
    bidirectional override could pass for another name. Right-to-left letters stay.

    Example:
        >>> shown("a\x00b")
        'a\\u0000b'
    """
    return "".join(_visible(character) for character in str(text))


def _visible(character: str) -> str:
    hidden = character in _REORDERING or unicodedata.category(character) in _INVISIBLE
    return f"\\u{ord(character):04x}" if hidden else character


def cut(text: str, longest: int) -> str:
    """At most ``longest`` characters, with an ellipsis where something is missing."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


LONGEST_NAME = 200


def named(name: object) -> str:
    """A name that others chose as it stands in a message: ``shown``, and cut where it is too long to read."""
    return cut(shown(name), LONGEST_NAME)


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
