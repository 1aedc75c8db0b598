"""Numbers that a training loop gives with each step, its loss above all: checked, and taken without waiting."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attemper.errors import InputError
from attemper.monitor.snapshot import begin_copy
from attemper.readings.sample import QUANTITIES
from attemper.statistics import STATISTICS
from attemper.text import clean

MOST_NAMES = 32
"""Different names that a watch takes."""
MOST_LETTERS = 64
"""Of a name."""
MOST_UNDERWAY = 64
"""Steps whose numbers may be on their way from a device before the oldest is waited for."""
TAKEN = frozenset((*QUANTITIES, *STATISTICS, "step", "site", "layer", "kind", "mode", "head"))
"""Names that a history or a table has already."""

Scalars = Mapping[str, float | Tensor]
"""Name -> a number, or a tensor of one element."""


def _scalar(name: str, value: Any) -> float | Tensor:
    """One number as it is kept. Reads no tensor."""
    if type(value) is float:
        return value
    shape = list(getattr(value, "shape", ()))
    if any(size != 1 for size in shape):
        raise InputError(
            f"watch.step({clean(name)}=...) must be one number, got the shape {shape}. Pass its mean: "
            f"{clean(name)}={clean(name)}.mean()."
        )
    if isinstance(value, Tensor) and not value.is_complex():
        return value.detach()
    try:
        if isinstance(value, str | bytes | complex | Tensor):
            raise TypeError
        return float(value.reshape(()) if shape else value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # pyright: ignore[reportOperatorIssue]
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"watch.step({clean(name)}=...) must be a real number or a tensor of one, got {type(value).__name__}."
        ) from error


def _check_name(name: str) -> None:
    if name in TAKEN:
        raise InputError(f"watch.step({name}=...): {name!r} is the name of a statistic or a column. Choose another.")
    if not 0 < len(name) <= MOST_LETTERS or not name.isprintable():
        raise InputError(
            f"watch.step: {clean(name)!r:.80} cannot be the name of a number. A name has 1 to {MOST_LETTERS} printable "
            "characters."
        )


class _Underway(NamedTuple):
    """Numbers of a step on their way from a device."""

    step: int
    plain: dict[str, float]
    names: list[str]
    numbers: Tensor | None
    """[names] float32, of tensors of other devices than the CPU."""
    arrived: Any
    """An event of the device; None where ``numbers`` are still there, or nothing comes from one."""

    def is_here(self, *, newest: bool) -> bool:
        """Whether reading does not wait. A device without events is read one step later: it has gone on since then."""
        return self.numbers is None or (not newest if self.arrived is None else self.arrived.query())

    def read(self) -> tuple[int, dict[str, float]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        values = [] if self.numbers is None else self.numbers.cpu().tolist()
        return self.step, {**self.plain, **dict(zip(self.names, values, strict=True))}


class ScalarsUnderway:
    """Takes the numbers of steps from their devices, in their order."""

    def __init__(self) -> None:
        self._names = set[str]()
        self._underway: deque[_Underway] = deque()

    def check(self, given: Mapping[str, Any]) -> dict[str, float | Tensor]:
        """What ``watch.step`` was given, without what is None. Reads no tensor.

        Raises:
            InputError: a name cannot be kept, or is one too many; or a value is not one real number.
        """
        found = {name: _scalar(name, value) for name, value in given.items() if value is not None}
        for name in found.keys() - self._names:
            _check_name(name)
        if len(names := self._names | found.keys()) > MOST_NAMES:
            raise InputError(f"watch.step takes at most {MOST_NAMES} names of numbers over a run, got {len(names)}.")
        self._names = names
        return found

    def take(self, step: int, given: Scalars) -> None:
        """Takes a step's numbers: what is on a device begins to come, and nothing waits."""
        plain, away = dict[str, float](), dict[str, Tensor]()
        for name, value in given.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                away[name] = value
            else:
                plain[name] = float(value)
        numbers, arrived = _begin_copy([*away.values()]) if away else (None, None)
        self._underway.append(_Underway(step, plain, [*away], numbers, arrived))

    def ready(self, *, wait: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
        """The steps whose numbers have come, in their order; with ``wait`` all of them."""
        while self._underway:
            newest = len(self._underway) == 1
            if not (wait or self._underway[0].is_here(newest=newest) or len(self._underway) > MOST_UNDERWAY):
                return
            yield self._underway.popleft().read()


def _begin_copy(tensors: list[Tensor]) -> tuple[Tensor, Any]:
    """[tensors] float32, a copy: the loop may go on with them. On CUDA it comes to the host behind what is queued."""
    device = tensors[0].device
    here = (one if one.device == device else one.to(device, non_blocking=True) for one in tensors)
    numbers = torch.stack([one.reshape(()).to(torch.float32) for one in here])
    return begin_copy(numbers) if device.type == "cuda" else (numbers, None)
