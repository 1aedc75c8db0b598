"""Minima of a loss over log temperatures within bounds: by its gradient, and by values alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_FIRST_STEP = 0.3
"""Of log T, about, that the gradient's search takes first."""
_NO_SLOPE = 1e-7
"""Of a loss per unit of log T: what rounding in float32 leaves."""
_COARSE = 9
"""Points over the bounds."""
_STEPS = (0.3, 0.05)
"""Of log T: the finer ones of the search by values."""
_STILL = 2e-3
"""Of log T: nothing that moved less is searched again."""


class Objective(Protocol):
    """A loss of log temperatures [n]."""

    evaluations: int

    def value(self, logs: Tensor) -> float:
        """The loss."""
        ...

    def slope(self, logs: Tensor) -> tuple[float, Tensor]:
        """The loss, and its derivatives [n]."""
        ...


@dataclass(frozen=True)
class Found:
    """Where a search ended."""

    logs: Tensor
    """[n] float64."""
    converged: bool
    """Whether it ended because nothing moved any more, not because its evaluations were spent."""


def by_gradient(objective: Objective, count: int, bounds: tuple[float, float], steps: int) -> Found:
    r"""L-BFGS from T = 1, in :math:`u` with :math:`\log T = c + w \tanh(u)`, so that every point is within the bounds.

    The loss is scaled so that the first step changes log T by about 0.3, whatever its unit.
    """
    low, high = math.log(bounds[0]), math.log(bounds[1])
    middle, width = (low + high) / 2, (high - low) / 2
    free = torch.full((count,), math.atanh(-middle / width), dtype=torch.float64).requires_grad_()
    value, slope = objective.slope(_bounded(free, middle, width))
    steepest = float(slope.abs().max()) * width
    if steepest < _NO_SLOPE:
        return Found(_bounded(free, middle, width), True)
    best, scale = (value, _bounded(free, middle, width)), _FIRST_STEP / (steepest * width)
    known: list[tuple[float, Tensor]] = [(value, slope)]

    def closure() -> Tensor:
        nonlocal best
        logs = _bounded(free, middle, width)
        value, slope = known.pop() if known else objective.slope(logs)
        best = min(best, (value, logs), key=lambda pair: pair[0])
        free.grad = slope * scale * (width - (logs - middle) ** 2 / width)
        return torch.tensor(value * scale, dtype=torch.float64)

    optimizer = torch.optim.LBFGS(
        [free], max_iter=steps, max_eval=steps, line_search_fn="strong_wolfe",
        tolerance_grad=max(1e-4, 3 * _NO_SLOPE * scale), tolerance_change=1e-7,
    )  # fmt: skip
    optimizer.step(closure)  # type: ignore[arg-type]
    return Found(best[1], objective.evaluations < steps)


def _bounded(free: Tensor, middle: float, width: float) -> Tensor:
    return middle + width * free.detach().tanh()


def by_grid(objective: Objective, count: int, bounds: tuple[float, float], steps: int) -> Found:
    """One temperature for all on a coarse grid over the bounds, then each by itself, in turns, in finer steps.

    The last step of each turn goes to the vertex of the parabola through three points, so that the grid's width is not
    the accuracy.
    """
    low, high = math.log(bounds[0]), math.log(bounds[1])
    together = [torch.ones(count, dtype=torch.float64)]
    alone = list(torch.eye(count, dtype=torch.float64)) if count > 1 else together
    points = [0.0, *torch.linspace(low, high, _COARSE, dtype=torch.float64).tolist()]
    value, first = min((objective.value(together[0] * point), point) for point in points[:steps])
    logs = together[0] * first
    for number, step in enumerate(_STEPS):
        directions = together if number == 0 else alone
        while True:
            moved = 0.0
            for direction in directions:
                if objective.evaluations >= steps:
                    return Found(logs, False)
                place = float(logs[direction.bool()][0])
                to, value = _along(_line(objective, logs, direction, place), place, value, step, low, high)
                logs = logs + direction * (to - place)
                moved = max(moved, abs(to - place))
            if moved < _STILL or number == 0:
                break
    return Found(logs, True)


def _line(objective: Objective, logs: Tensor, direction: Tensor, place: float) -> Callable[[float], float]:
    return lambda point: objective.value(logs + direction * (point - place))


def _along(
    line: Callable[[float], float], place: float, value: float, step: float, low: float, high: float
) -> tuple[float, float]:
    """A minimum along a line near ``place``, where it is ``value``: steps downhill, then the parabola's vertex."""
    left, right = max(low, place - step), min(high, place + step)
    below, above = (math.inf if point == place else line(point) for point in (left, right))
    while min(below, above) < value:
        if below < above:
            right, above, place, value = place, value, left, below
            left = max(low, place - step)
            below = math.inf if left == place else line(left)
        else:
            left, below, place, value = place, value, right, above
            right = min(high, place + step)
            above = math.inf if right == place else line(right)
    if math.isinf(below) or math.isinf(above):
        return place, value
    vertex = _vertex((left, place, right), (below, value, above))
    at_vertex = line(vertex)
    return (vertex, at_vertex) if at_vertex <= value else (place, value)


def _vertex(points: tuple[float, float, float], values: tuple[float, float, float]) -> float:
    """Of the parabola through three points of which the middle one is the lowest: between the outer ones."""
    (a, b, c), (at_a, at_b, at_c) = points, values
    over = (b - a) ** 2 * (at_b - at_c) - (b - c) ** 2 * (at_b - at_a)
    under = (b - a) * (at_b - at_c) - (b - c) * (at_b - at_a)
    return b if under == 0 else min(max(b - over / under / 2, a), c)
