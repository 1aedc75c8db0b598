"""``attemper.calibrate``: the temperatures of an existing model that minimise a loss on data it was not trained on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attemper.checks import one_of, positive_number, whole_number
from attemper.control.calibration import Calibration
from attemper.control.temper import temper
from attemper.errors import InputError
from attemper.nn.temperature import Temperature
from attemper.sites.find import chosen_sites
from attemper.sites.names import unwrap
from attemper.sites.sharded import is_dtensor

Loss = Callable[[nn.Module, Any], Tensor]
"""``loss(model, batch)``: a mean, as a scalar tensor."""
OnBatch = Callable[[int, int], None]
"""``on_batch(done, most)``: batches that were run, and how many will be at most."""

PER = ("model", "layer", "head")
LEAST = 8
"""Batches on each side of the split. The bootstrap's interval of fewer held-out losses is too narrow to be believed."""
RESAMPLES = 10_000

_GRADIENT_STEPS, _GRID_STEPS = 60, 60
_FIRST_STEP = 0.3
"""Change of log T, about, in the first step of the search by gradient."""
_NO_GRADIENT = 1e-7
"""Derivative of a loss by log T that rounding in float32 leaves."""
_COARSE = 9
"""Points of the first grid, from bound to bound."""
_STEPS = (0.3, 0.05)
"""Steps of log T in the search by values, after its first grid."""
_STILL = 2e-3
"""A temperature whose logarithm moved less than this is not searched again."""


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    per: str = "model",
    method: str = "gradient",
    sites: Iterable[str] | None = None,
    bounds: tuple[float, float] = (0.25, 4.0),
    steps: int | None = None,
    validation: float = 0.3,
    seed: int = 0,
    on_batch: OnBatch | None = None,
) -> Calibration:
    r"""Finds temperatures that minimise a loss, per model, layer or head.

    .. math:: \min_{\log T} \frac{1}{n} \sum_b loss(model_T, b)

    over a part of ``batches``, and judged on the others. Only temperatures move, no weight does; the model is not
    changed, and comes back in the mode it was in, with its gradients and the random state as they were. Losses are
    taken in evaluation mode, and what a loss draws at random it draws alike at every temperature.

    ::

        calibration = attemper.calibrate(model, batches, lambda model, batch: model(**batch).loss, per="layer")
        print(calibration)
        calibration.fold(model)     # or handle = calibration.apply(model); refused where calibration.doubt says why

    Args:
        model: as for :func:`attemper.temper`, and neither wrapped nor compiled yet.
        batches: whatever ``loss`` takes, on the model's device; all are kept in memory. Data that the model was not
            trained on; batches count alike, whatever their size, so make them of one size.
        loss: ``loss(model, batch)``, the mean loss as a scalar tensor.
        per: "model", "layer" or "head". The more temperatures, the more data they need: see ``Calibration.interval``.
        method: "gradient" (L-BFGS, a forward and a backward pass each step) or "grid" (forward passes only, where a
            model has no gradient: about 15 for one temperature, 10 to 25 for each of several).
        sites: names of modules whose attention to calibrate, with all below them; None for all.
        bounds: of every temperature; must hold 1.
        steps: passes over the fitting batches at most (by grid, a line that was begun is searched to its end). None: 60
            by gradient, 60 for each temperature by grid.
        validation: share of the batches that is held out, drawn by ``seed``.
        seed: of the split, of the bootstrap, and of what the loss draws.
        on_batch: called after every batch with how many were run and how many will be at most: the held-out ones, the
            fitting ones ``steps`` times, and the held-out ones again. A search that ends by itself runs fewer.

    Returns:
        ``Calibration``: temperatures, held-out loss before and after, and a 95% interval of their difference. Look at
        ``.doubt`` before using them: data that pass the least count may still be too few to tell.

    Raises:
        InputError: fewer than 8 batches on either side of the split (told before the model runs); the loss is no finite
            scalar, or does not depend on the temperatures (then the grid may do); or what ``temper`` raises.
    """
    one_of("calibrate(per=...)", per, PER)
    one_of("calibrate(method=...)", method, METHODS)
    limits = _check_bounds(bounds)
    _refuse_wrapped(model)
    named = [site.name for site in chosen_sites("calibrate", model, sites, calls=True)]  # in our own name, not temper's
    fitting, held_out = _split(batches, validation, seed)
    with _evaluation_mode(model), temper(model, temperature=_TrialTemperature(), sites=named) as handle:
        searched = {name: part for name, part in handle.temperatures.items() if isinstance(part, _TrialTemperature)}
        counted = _LossCounter(loss, on_batch, 2 * len(held_out) + _steps(steps, method, 1) * len(fitting))
        judged = Objective(model, counted, held_out, "held-out", seed)
        before = judged.losses()
        searched = {name: part for name, part in searched.items() if part.heads}
        if not searched:
            raise InputError("calibrate: loss(model, batch) runs none of the model's attention: nothing to temper.")
        objective = Objective(model, counted, fitting, "fitting", seed, list(searched.values()), per)
        most = _steps(steps, method, objective.count)
        counted.most = 2 * len(held_out) + most * len(fitting)
        logs, converged = METHODS[method](objective, objective.count, limits, most)
        objective.give(logs)
        after = judged.losses()
        temperatures = {name: tuple(part.value().double().tolist()) for name, part in searched.items()}
    return Calibration(
        temperatures=temperatures,
        before=_mean(before),
        after=_mean(after),
        interval=paired_interval(before, after, seed),
        per=per,
        method=method,
        fitting=len(fitting),
        held_out=len(held_out),
        evaluations=objective.evaluations,
        converged=converged,
        bounds=limits,
    )


def paired_interval(before: list[float], after: list[float], seed: int = 0) -> tuple[float, float]:
    """The 2.5th and 97.5th percentile of the mean of ``after - before`` over 10,000 bootstrap resamples."""
    change = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    # A hundred at a time: all of them at once would hold 10,000 numbers a sample.
    means = [
        change[torch.randint(len(change), (100, len(change)), generator=generator)].mean(1)
        for _ in range(RESAMPLES // 100)
    ]
    low, high = torch.cat(means).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


class _TrialTemperature(Temperature):
    """The temperature that a search is trying; ``heads`` is how many heads its site attends with."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 0
        self.now: Tensor | None = None

    def value(self) -> Tensor:
        return torch.ones(1) if self.now is None else self.now

    def forward(
        self, query: Tensor, *, hidden: Tensor | None = None, visible_keys: Tensor | int | None = None
    ) -> Tensor:
        self.heads = query.shape[1]
        return self.value().to(query.device, torch.promote_types(query.dtype, torch.float32))[None, :, None]


class _LossCounter:
    """A loss that reports to ``on_batch`` how many batches were run."""

    def __init__(self, loss: Loss, on_batch: OnBatch | None, most: int) -> None:
        self._loss, self._on_batch, self.most, self._done = loss, on_batch, most, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        value = self._loss(model, batch)
        self._done += 1
        if self._on_batch is not None:
            self._on_batch(self._done, max(self.most, self._done))
        return value


class Objective:
    """The mean loss over some batches, of log temperatures [count] that are given to sites in their order."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batches: list[Any],
        part: str,
        seed: int,
        sites: list[_TrialTemperature] | None = None,
        per: str = "model",
    ) -> None:
        self._model, self._loss, self._batches, self._part, self._seed = model, loss, batches, part, seed
        self._sites = sites or []
        widths = [site.heads if per == "head" else 1 for site in self._sites]
        ends = [sum(widths[: number + 1]) for number in range(len(widths))]
        self._places = [slice(0, 1) if per == "model" else slice(b - a, b) for a, b in zip(widths, ends, strict=True)]
        self.count = 1 if per == "model" else sum(widths)
        self.evaluations = 0

    def give(self, logs: Tensor) -> None:
        """Sets the temperatures of the sites."""
        each = logs.exp()
        for site, place in zip(self._sites, self._places, strict=True):
            site.now = each[place]

    def value(self, logs: Tensor) -> float:
        self.evaluations += 1
        self.give(logs)
        return _mean(self.losses())

    def gradient(self, logs: Tensor) -> tuple[float, Tensor]:
        self.evaluations += 1
        total, gradient = 0.0, torch.zeros_like(logs)
        torch.manual_seed(self._seed)
        for number in range(len(self._batches)):
            with torch.enable_grad():
                leaf = logs.detach().clone().requires_grad_()
                self.give(leaf)
                value = self._of(number)
                part = torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None
            if part is None:
                raise InputError(
                    "calibrate: the loss has no gradient in the temperatures: it was detached, or the model runs "
                    "without gradients. Let loss(model, batch) return what the model computes, or take method='grid'."
                )
            gradient += part
            total += float(value.detach())
        return total / len(self._batches), gradient / len(self._batches)

    @torch.no_grad()
    def losses(self) -> list[float]:
        """The loss of each batch at the temperatures that were given last."""
        torch.manual_seed(self._seed)
        return [float(self._of(number)) for number in range(len(self._batches))]

    def _of(self, number: int) -> Tensor:
        value = self._loss(self._model, self._batches[number])
        if not isinstance(value, Tensor) or value.numel() != 1 or not math.isfinite(float(value.detach())):
            came = f"{type(value).__name__} {value if not isinstance(value, Tensor) else list(value.shape)}"
            if isinstance(value, Tensor) and value.numel() == 1:
                came = f"{float(value.detach())}: narrower bounds= may help, if the model runs without temperatures"
            raise InputError(
                f"calibrate: loss(model, batch) must return a finite scalar tensor, got {came} ({self._part} batch "
                f"{number})."
            )
        return value.reshape(())


def _split(batches: Iterable[Any], validation: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Batches to fit on and batches to hold out, each in their order."""
    if isinstance(batches, (Tensor, Mapping, str)):
        raise InputError(
            f"calibrate(batches) must be an iterable of batches, got one {type(batches).__name__}: split it, so that "
            "some can be held out."
        )
    if isinstance(validation, bool) or not isinstance(validation, (int, float)) or not 0 < validation < 1:
        raise InputError(f"calibrate(validation=...) is a share between 0 and 1, got {validation!r}.")
    known = list(batches)
    held = round(validation * len(known))
    if held < LEAST or len(known) - held < LEAST:
        fewest = next(many for many in itertools.count() if LEAST <= round(validation * many) <= many - LEAST)
        raise InputError(
            f"calibrate: too few batches ({len(known)}) to tell whether a temperature helps: {LEAST} are needed to "
            f"fit and {LEAST} held out, {fewest} at validation={validation:g}. Make them smaller, or take more data."
        )
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed)).tolist()
    return [known[place] for place in sorted(order[held:])], [known[place] for place in sorted(order[:held])]


def _check_bounds(bounds: tuple[float, float]) -> tuple[float, float]:
    advice = "Give (low, high) with low < 1 < high."
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise InputError(f"calibrate(bounds=...) must be two numbers, got {bounds!r}. {advice}")
    low, high = (positive_number("calibrate(bounds=...)", bound, advice) for bound in bounds)
    if not low < 1 < high:
        raise InputError(f"calibrate(bounds=...) must have 1 between them, got {bounds!r}. {advice}")
    return low, high


def _steps(steps: int | None, method: str, count: int) -> int:
    if steps is None:
        return _GRADIENT_STEPS if method == "gradient" else _GRID_STEPS * count
    return whole_number("calibrate(steps=...)", steps)


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"calibrate(model) must be an nn.Module, got {type(model).__name__}.")
    if unwrap(model) is not model or any(is_dtensor(parameter) for parameter in model.parameters()):
        raise InputError(
            f"calibrate: {type(model).__name__} is wrapped or split over processes, and each process would find "
            "different temperatures: calibrate the model before you wrap it, in one process."
        )


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with frozen parameters inside the block; the modes and the random state are restored after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)), ExitStack() as stack:
        for part in model.modules():
            stack.callback(setattr, part, "training", part.training)
        model.eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.requires_grad_)
                parameter.requires_grad_(False)
        yield


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


Minimum = tuple[Tensor, bool]
"""Where a search ended, [n] float64; and whether nothing moved any more, or its evaluations were spent."""


def by_gradient(objective: Objective, count: int, bounds: tuple[float, float], steps: int) -> Minimum:
    r"""L-BFGS from T = 1, in :math:`u` with :math:`\log T = c + w \tanh(u)`, so that every point is within the bounds.

    The loss is scaled so that the first step changes log T by about 0.3, whatever its unit.
    """
    low, high = math.log(bounds[0]), math.log(bounds[1])
    middle, width = (low + high) / 2, (high - low) / 2
    free = torch.full((count,), math.atanh(-middle / width), dtype=torch.float64).requires_grad_()
    value, gradient = objective.gradient(_within(free, middle, width))
    steepest = float(gradient.abs().max()) * width
    if steepest < _NO_GRADIENT:
        return _within(free, middle, width), True
    best, scale = (value, _within(free, middle, width)), _FIRST_STEP / (steepest * width)
    known: list[tuple[float, Tensor]] = [(value, gradient)]

    def closure() -> Tensor:
        nonlocal best
        logs = _within(free, middle, width)
        value, gradient = known.pop() if known else objective.gradient(logs)
        best = min(best, (value, logs), key=lambda pair: pair[0])
        free.grad = gradient * scale * (width - (logs - middle) ** 2 / width)
        return torch.tensor(value * scale, dtype=torch.float64)

    optimizer = torch.optim.LBFGS(
        [free],
        max_iter=steps,
        max_eval=steps,
        line_search_fn="strong_wolfe",
        tolerance_grad=max(1e-4, 3 * _NO_GRADIENT * scale),
        tolerance_change=1e-7,
    )
    optimizer.step(closure)  # type: ignore[arg-type]
    return best[1], objective.evaluations < steps


def _within(free: Tensor, middle: float, width: float) -> Tensor:
    return middle + width * free.detach().tanh()


def by_grid(objective: Objective, count: int, bounds: tuple[float, float], steps: int) -> Minimum:
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
                    return logs, False
                place = float(logs[direction.bool()][0])
                to, value = _along(_line(objective, logs, direction, place), place, value, step, low, high)
                logs = logs + direction * (to - place)
                moved = max(moved, abs(to - place))
            if moved < _STILL or number == 0:
                break
    return logs, True


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
    # The vertex of the parabola through three points, the middle one lowest: it lies between the outer ones.
    (a, b, c), (at_a, at_b, at_c) = (left, place, right), (below, value, above)
    over = (b - a) ** 2 * (at_b - at_c) - (b - c) ** 2 * (at_b - at_a)
    under = (b - a) * (at_b - at_c) - (b - c) * (at_b - at_a)
    vertex = b if under == 0 else min(max(b - over / under / 2, a), c)
    at_vertex = line(vertex)
    return (vertex, at_vertex) if at_vertex <= value else (place, value)


METHODS = {"gradient": by_gradient, "grid": by_grid}
