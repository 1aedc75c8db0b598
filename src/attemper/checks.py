"""Argument checks that several layers share. Numbers are checked; contents of tensors are not: that would
wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches

from attemper.errors import InputError


def positive_number(where: str, value: float, advice: str, *, infinite: bool = False) -> float:
    """``value`` as a float if it is above 0 (and finite, unless ``infinite``), else ``InputError``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where} must be a number, got {type(value).__name__}. {advice}")
    if not value > 0 or (value == math.inf and not infinite):
        raise InputError(f"{where} must be {'' if infinite else 'finite and '}above 0, got {value}. {advice}")
    return float(value)


def whole_number(where: str, value: int) -> int:
    """``value`` if it is an int of at least 1, else ``InputError``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{where} must be an int of at least 1, got {value!r}.")
    return value


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
