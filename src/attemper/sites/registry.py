"""The look-up of transformers' attention registry, where functions are wrapped on their way to a model.

Two may stand there: ``telling`` (somebody looks) inside of ``acting`` (something is done to the call), so that who
looks sees what was done. The class gets its own method back when both are gone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

Wrap = Callable[[Callable[..., Any], str, Callable[..., Any]], Callable[..., Any]]
"""(function, name of the implementation, the model's eager function) -> what the model calls."""

NAME = "attemper"
"""Of our own implementation there."""

TELLING, ACTING = 0, 1
_wraps: list[Wrap | None] = [None, None]
_counts = [0, 0]
"""How often each was put."""
_lock = threading.RLock()  # a model may be collected, and let go, while its thread holds it
_original: list[Callable[..., Any]] = []


def put(place: int, wrap: Wrap) -> None:
    """Puts ``wrap`` in its place, once more; ``take`` it away as often. A place always holds the same one."""
    with _lock:
        if not _original:
            from transformers import AttentionInterface

            _original.append(AttentionInterface.get_interface)
            AttentionInterface.get_interface = _looking_up(_original[0])
        _wraps[place] = wrap
        _counts[place] += 1


def take(place: int) -> None:
    """Takes away what was put there, once."""
    with _lock:
        _counts[place] -= 1
        if not _counts[place]:
            _wraps[place] = None
        if _original and not any(_counts):
            interface: Any = sys.modules["transformers"].AttentionInterface
            interface.get_interface = _original.pop()


def _looking_up(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_interface(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = original(self, implementation, default)
        for wrap in _wraps:
            if wrap is not None:
                function = wrap(function, implementation, default)
        return function

    return get_interface
