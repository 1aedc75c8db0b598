"""What a model gives for the chosen rows, batch after batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from attemper.fingerprints.packing import round_rows
from attemper.fingerprints.record import ModelOutput, join_rows
from attemper.monitor.fingerprint_rows import sketch_of
from attemper.monitor.fingerprint_site import CallRows

_WIDEST = 2**18
"""Numbers of a sequence that are kept as one row."""


class OutputRows:
    """Rows of what the model gave."""

    def __init__(self) -> None:
        self._parts: list[ModelOutput | None] = []

    def add(self, given: Any, calls: Mapping[int, CallRows]) -> None:
        """Keeps the rows of a pass.

        Args:
            calls: number of tokens -> a call over so many, whose rows are those of states of as many tokens.
        """
        name, states = _first(given)
        if states is None or not calls:
            self._parts.append(None)
            return
        low = states.dtype.itemsize == 2
        call = calls.get(states.shape[1]) if states.dim() == 3 else None
        taken = None if call is None else call.chosen.take(states)
        if call is not None and taken is not None:
            rows = np.concatenate([part.rows for part in call.rows])
            states = taken[0]
        else:
            # One for each sequence, whole: classes, images, pooled states.
            call, whole = next(iter(calls.values())), states.flatten(1)
            places = [place for sequences, _ in call.chosen.groups for place in sequences]
            if whole.shape[1] > _WIDEST or max(places, default=len(whole)) >= len(whole):
                self._parts.append(None)
                return
            numbers = dict.fromkeys(number for part in call.rows for number in part.rows[:, 0].tolist())
            rows = np.array([[number, -1] for number in numbers], np.int32)
            states = whole[places].cpu().double()
        sketch = sketch_of(states)
        self._parts.append(ModelOutput(name, states.shape[1], rows, round_rows(sketch) if low else sketch))

    def joined(self) -> ModelOutput | None:
        """All rows as one; None where a batch had none, or they are of different kinds."""
        parts = [part for part in self._parts if part is not None]
        if len(parts) < len(self._parts) or len({(part.name, part.width) for part in parts}) != 1:
            return None
        arrays = (join_rows([getattr(part, name) for part in parts], 0) for name in ("rows", "sketch"))
        return ModelOutput(parts[0].name, parts[0].width, *arrays)


def _first(given: Any) -> tuple[str, Tensor | None]:
    """The first tensor of numbers, one or more for each sequence, and its name."""
    named = given.items() if isinstance(given, Mapping) else enumerate(given) if isinstance(given, tuple | list) else ()
    for name, part in (("", given), *named):
        if isinstance(part, Tensor) and part.dim() > 1 and part.is_floating_point() and not part.is_nested:
            return str(name), part.detach()
    return "", None
