"""Trackers of every kind as one: a function that takes a dict of numbers and a step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from attemper.errors import InputError

Values = Mapping[str, float | None]
Sink = Callable[[Values, int], None]
"""``sink(values, step)`` sends named numbers to a tracker."""

ACCEPTED = (
    "something with .log_metrics(dict, step=) (a Lightning logger, mlflow, a Comet experiment), .log(dict, step=) (a "
    "Weights & Biases run, trackio, an accelerate tracker), .add_scalar(name, value, step) (a SummaryWriter), "
    ".track(value, name=, step=) (an Aim run), or a function (dict, step)"
)


def sink(tracker: Any) -> Sink:
    """A function ``(values, step)`` that logs to ``tracker`` through the tracker's own method.

    Looked for in this order, and taken where the arguments fit: ``log_metrics(dict, step=)``, ``log(dict, step=)``,
    ``add_scalar(name, value, step)``, ``track(value, name=, step=)``, a call ``tracker(dict, step)``. Values that are
    None, NaN or infinite are left out; nothing is called for an empty dict.

    Raises:
        InputError: the tracker is a class, or has none of these.

    Example:
        >>> sink(print)({"attention/normalized_entropy/min": 0.25, "attention/normalized_entropy/max": None}, 50)
        {'attention/normalized_entropy/min': 0.25} 50
    """
    if isinstance(tracker, type):
        raise InputError(f"trackers: {tracker.__name__} is a class. Pass an instance of it.")
    send = _dict_method(tracker) or _scalar_method(tracker)
    if send is None:
        raise InputError(f"trackers: {type(tracker).__name__} is no tracker that is known here. Accepted: {ACCEPTED}.")
    write = send

    def clean(values: Values, step: int) -> None:
        kept = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        if kept:
            write(kept, step)

    return clean


def _dict_method(tracker: Any) -> Callable[[dict[str, float], int], Any] | None:
    for name in ("log_metrics", "log"):
        method = getattr(tracker, name, None)
        if callable(method) and takes(method, {}, step=0):
            return lambda values, step, method=method: method(values, step=step)
    return None


def _scalar_method(tracker: Any) -> Callable[[dict[str, float], int], Any] | None:
    add, track = getattr(tracker, "add_scalar", None), getattr(tracker, "track", None)
    if callable(add) and takes(add, "", 0.0, 0):
        return lambda values, step: [add(name, value, step) for name, value in values.items()]
    if callable(track) and takes(track, 0.0, name="", step=0):
        return lambda values, step: [track(value, name=name, step=step) for name, value in values.items()]
    if callable(tracker) and takes(tracker, {}, 0):
        return tracker
    return None


def takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called so, as far as its signature says."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
