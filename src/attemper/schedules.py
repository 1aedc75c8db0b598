"""Schedules of a temperature, or any positive target, over training and layers. Pure functions above 0.

A schedule is called with ``(step, total_steps)`` and gives a number above 0. It depends on nothing else, so a resumed
run goes on with the same bits. Steps before the first count as the first, steps from ``total_steps`` on as the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from attemper.checks import one_of, positive_number, whole_number
from attemper.errors import InputError

Schedule = Callable[[int, int], float]
"""``(step, total_steps) -> number above 0``."""

_ADVICE = "A temperature of 0 divides by zero; small ones sharpen."


def constant(value: float = 1.0) -> Schedule:
    """The same number at every step.

    Raises:
        InputError: ``value`` is not finite and above 0.
    """
    return _Constant(_positive("constant", "value", value))


def warmup_anneal(initial: float = 2.0, final: float = 0.1, *, start: float = 1.0, warmup: float = 0.1) -> Schedule:
    r"""From ``start`` to ``initial`` in a straight line, then to ``final`` along half a cosine.

    .. math::
        T = \begin{cases} start + (initial - start) \, r / w & r < w \\
        final + (initial - final) \, \tfrac12 (1 + \cos \pi \tfrac{r - w}{1 - w}) & r \ge w \end{cases},
        \quad r = step / total, \ w = warmup

    Args:
        initial: after the warm-up.
        final: at the end.
        start: at step 0; 1 is the model's own attention.
        warmup: share of the steps, from 0 up to, not including, 1.

    Raises:
        InputError: a number is not finite and above 0, or ``warmup`` is out of its range.

    Example:
        >>> [round(warmup_anneal()(step, 100), 3) for step in (0, 10, 55, 100)]
        [1.0, 2.0, 1.05, 0.1]
    """
    if isinstance(warmup, bool) or not isinstance(warmup, (int, float)) or not 0 <= warmup < 1:
        raise InputError(f"warmup_anneal(warmup=...) is the share of steps, from 0 to below 1; got {warmup!r}.")
    return _WarmupAnneal(
        _positive("warmup_anneal", "initial", initial),
        _positive("warmup_anneal", "final", final),
        _positive("warmup_anneal", "start", start),
        float(warmup),
    )


def curriculum(initial: float = 2.0, final: float = 0.1) -> Schedule:
    """From ``initial`` to ``final`` in a straight line: from many keys to few, if ``final`` is the smaller.

    Raises:
        InputError: a number is not finite and above 0.
    """
    return piecewise([(0.0, initial), (1.0, final)])


def piecewise(points: Sequence[tuple[float, float]], *, interpolation: str = "linear") -> Schedule:
    """Through ``points`` (share of the steps from 0 to 1, number), in straight lines or in stairs.

    Args:
        points: ascending by share. Before the first and after the last their numbers hold.
        interpolation: "linear", or "constant": each number holds until the next point.

    Raises:
        InputError: no points, shares that do not rise or are out of [0, 1], or a number that is not finite and above 0.

    Example:
        >>> piecewise([(0.0, 2.0), (0.5, 1.0)])(25, 100)
        1.5
    """
    one_of("piecewise(interpolation=...)", interpolation, ("linear", "constant"))
    pairs = [_pair(point) for point in points]
    shares = [share for share, _ in pairs]
    if not pairs or any(b <= a for a, b in pairwise(shares)) or not 0 <= shares[0] <= shares[-1] <= 1:
        raise InputError(f"piecewise(points) must rise by share of the steps within 0 to 1, got {list(points)!r}.")
    return _Piecewise(tuple(pairs), interpolation)


def layerwise(num_layers: int, low: float, high: float, shape: str = "linear") -> list[float]:
    r"""A temperature for each layer.

    With x = layer / (num_layers - 1):

    - "linear": low + (high - low) x;
    - "u": low + (high - low) (2x - 1)^2: the ends at ``high``, the middle at ``low``;
    - "exponential", or "exp": low (high / low)^x: equal ratios from layer to layer.

    Args:
        num_layers: at least 1; a single layer takes ``low``, in a "u" ``high``.
        low: of the first layer (of the middle, in a "u"). It may be above ``high``: then temperature falls.
        high: of the last layer (of both ends, in a "u").

    Raises:
        InputError: no layers, a number that is not finite and above 0, or a shape that does not exist.

    Example:
        >>> layerwise(5, 0.5, 1.5, "u")
        [1.5, 0.75, 0.5, 0.75, 1.5]
    """
    whole_number("layerwise(num_layers=...)", num_layers)
    low, high = (_positive("layerwise", name, value) for name, value in (("low", low), ("high", high)))
    shape = "exponential" if shape == "exp" else shape
    one_of("layerwise(shape=...)", shape, ("linear", "u", "exponential"))
    places = [layer / max(num_layers - 1, 1) for layer in range(num_layers)]
    if shape == "linear":
        return [low + (high - low) * x for x in places]
    if shape == "u":
        return [low + (high - low) * (2 * x - 1) ** 2 for x in places]
    return [low * (high / low) ** x for x in places]


def _positive(where: str, name: str, value: float) -> float:
    return positive_number(f"{where}({name}=...)", value, _ADVICE)


def _pair(point: object) -> tuple[float, float]:
    if not isinstance(point, Sequence) or len(point) != 2 or isinstance(point, str):
        raise InputError(f"piecewise(points) must hold pairs (share of the steps, number), got {point!r}.")
    share, value = point
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        raise InputError(f"piecewise(points) must hold pairs (share of the steps, number), got {point!r}.")
    return float(share), _positive("piecewise", "points", value)


def _share(step: int, total_steps: int) -> float:
    """How much of the training is over, from 0 to 1."""
    if total_steps <= 0:
        raise InputError(f"a schedule needs a total of at least 1 step, got {total_steps}.")
    return min(max(step / total_steps, 0.0), 1.0)


@dataclass(frozen=True)
class _Constant:
    value: float

    def __call__(self, step: int, total_steps: int) -> float:
        return self.value


@dataclass(frozen=True)
class _WarmupAnneal:
    initial: float
    final: float
    start: float
    warmup: float

    def __call__(self, step: int, total_steps: int) -> float:
        done = _share(step, total_steps)
        if done < self.warmup:
            return self.start + (self.initial - self.start) * done / self.warmup
        turn = math.pi * (done - self.warmup) / (1 - self.warmup)
        return self.final + (self.initial - self.final) * 0.5 * (1 + math.cos(turn))


@dataclass(frozen=True)
class _Piecewise:
    points: tuple[tuple[float, float], ...]
    interpolation: str

    def __call__(self, step: int, total_steps: int) -> float:
        done = _share(step, total_steps)
        before = [point for point in self.points if point[0] <= done]
        after = [point for point in self.points if point[0] > done]
        if not before:
            return after[0][1]
        if not after or self.interpolation == "constant":
            return before[-1][1]
        (start, value), (end, next_value) = before[-1], after[0]
        return value + (next_value - value) * (done - start) / (end - start)


_FORMS: dict[str, tuple[type, Callable[..., Schedule]]] = {
    "constant": (_Constant, constant),
    "warmup_anneal": (_WarmupAnneal, warmup_anneal),
    "piecewise": (_Piecewise, piecewise),
}
"""Name in a file -> the class whose fields are written, and the function that takes them back."""


def schedule_form(schedule: Schedule) -> dict[str, Any] | None:
    """A schedule of this module as JSON's types, for a file; None for a function of the user's own."""
    for name, (kind, _) in _FORMS.items():
        if isinstance(schedule, kind):
            fields = vars(schedule)
            points = {"points": [list(point) for point in fields["points"]]} if "points" in fields else {}
            return {"name": name, **fields, **points}
    return None


def schedule_of(form: object) -> Schedule:
    """The schedule of a form that ``schedule_form`` gave.

    Raises:
        InputError: the form is of no schedule.
    """
    given = dict(form) if isinstance(form, dict) else {}
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in _FORMS:
        raise InputError(f"{name!r:.80} is not a schedule of attemper.schedules. Known: {', '.join(_FORMS)}.")
    try:
        return _FORMS[name][1](**given)
    except TypeError as error:
        raise InputError(f"the schedule {name} cannot be made of {given!r:.200}: {error}.") from error
