"""Argument checks that several layers share. Numbers are checked; tensor contents are not (that would sync the
device).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches

from attemper.errors import InputError


def positive_number(where: str, value: float, advice: str, *, infinite: bool = False) -> float:
    """``value`` as a float if it is above 0 (and finite, unless ``infinite``), else ``InputError``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where} must be a number, got {type(value).__name__}. {advice}")
    if not value > 0 or (value == math.inf and not infinite):
        raise InputError(f"{where} must be {'' if infinite else 'finite and '}above 0, got {value}. {advice}")
    return float(value)


def one_of(where: str, value: object, valid: Iterable[str]) -> str:
    """``value`` if it is one of ``valid``, else an ``InputError`` that lists them and names the nearest."""
    names = tuple(valid)
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(map(repr, names))
        raise InputError(f"{where} must be one of {listed}; got {value!r}.{did_you_mean(value, names)}")
    return value


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """The end of a message: the one or two of ``names`` that are spelled most like ``given``; empty if none is.

    Example:
        >>> did_you_mean("scna", ["scan", "lab"])
        " Did you mean 'scan'?"
    """
    if not isinstance(given, str):
        return ""
    by_spelling = {name.lower(): name for name in names}
    near = get_close_matches(given.lower(), by_spelling, n=2)
    return f" Did you mean {' or '.join(repr(by_spelling[name]) for name in near)}?" if near else ""
