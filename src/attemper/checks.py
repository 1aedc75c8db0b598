"""Argument checks that several layers share. Numbers are checked; contents of tensors are not: that would
wait for the device.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches

from attemper.errors import InputError

MOST = 2**63 - 2
"""The largest whole number that is taken: stores and kernels count on from it in 64 bits."""
FLOAT_MOST = int(sys.float_info.max)


def positive_number(where: str, value: float, advice: str, *, infinite: bool = False) -> float:
    """``value`` as a float if it is above 0 (and finite, unless ``infinite``), else ``InputError``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where} must be a number, got {type(value).__name__}. {advice}")
    if isinstance(value, int) and value > FLOAT_MOST:
        raise InputError(f"{where} must be a number that a float can hold, got {value!r:.30}... {advice}")
    if not value > 0 or (value == math.inf and not infinite):
        raise InputError(f"{where} must be {'' if infinite else 'finite and '}above 0, got {value}. {advice}")
    return float(value)


def whole_number(where: str, value: object, advice: str = "", *, least: int = 1, none: str = "") -> int:
    """``value`` as an int if it is a whole number of at least ``least`` in 64 bits, also of numpy or a tensor without
    dimensions, else ``InputError``. ``none``: what else it may be, for the message.
    """
    number = index_of(value)
    if number is None or number < least:
        raise InputError(f"{where} must be an int of at least {least}{none}, got {value!r:.60}.{advice}")
    if number > MOST:
        raise InputError(f"{where} must be at most {MOST}, got {value!r:.60}.")
    return number


def index_of(value: object) -> int | None:
    """A whole number as an int: Python's, numpy's or that of a tensor without dimensions; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")) or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def indentation(indent: object, name: str) -> int | None:
    """The spaces a level of ``name``'s JSON, for ``to_json``, else ``InputError``: text there is most likely a path."""
    spaces = index_of(indent)
    if indent is None or spaces is not None:
        return spaces
    path = f"{os.fspath(indent)!r:.60}" if isinstance(indent, str | os.PathLike) else "path"
    raise InputError(
        f"to_json(indent) returns a string: indent must be an int or None, got {indent!r:.60}. Write it with "
        f"Path({path}).write_text({name}.to_json(), encoding='utf-8')."
    )


def one_of(where: str, value: object, valid: Iterable[str]) -> str:
    """``value`` if it is one of ``valid``, else an ``InputError`` that lists them and names the nearest."""
    names = tuple(valid)
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(map(repr, names))
        raise InputError(f"{where} must be one of {listed}; got {value!r}.{did_you_mean(value, names)}")
    return value


def did_you_mean(given: object, names: Iterable[str]) -> str:
    """The end of a message: the one of ``names`` that is spelled most like ``given``, or two that are as near; empty
    if none is.

    Example:
        >>> did_you_mean("scna", ["scan", "lab"]) == " Did you mean 'scan'?"
        True
    """
    if not isinstance(given, str):
        return ""
    by_spelling = {name.lower(): name for name in names}
    near = get_close_matches(given.lower(), by_spelling, n=2)
    likeness = [SequenceMatcher(None, given.lower(), name).ratio() for name in near]
    near = [name for name, like in zip(near, likeness, strict=True) if like > likeness[0] - 0.05]
    return f" Did you mean {' or '.join(repr(by_spelling[name]) for name in near)}?" if near else ""


def refuse_nested(where: str, given: Mapping[str, object]) -> None:
    """``InputError`` if one of the arguments (name -> what came) is a nested tensor."""
    for name, tensor in given.items():
        # A number that a compiler traces as one of many has no attributes that may be asked for.
        if not isinstance(tensor, (int, float)) and getattr(tensor, "is_nested", False):
            raise InputError(
                f"{where}({name}=...) is a nested tensor, whose sequences differ in length. Pad it with "
                "torch.nested.to_padded_tensor and hide the padding (a mask; -inf among scores), or give the sequences "
                "one after another to attemper.varlen_attention."
            )
