"""What a model gives for the chosen rows, batch after batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from attemper.fingerprints.encoding import round_rows
from attemper.fingerprints.site import ModelOutput, join_rows
from attemper.fingerprints.taking.rows import sketch_of
from attemper.fingerprints.taking.site import CallRows

_WIDEST = 2**18
"""Numbers of a sequence that are kept as one row."""


def output_of(given: Any, calls: Mapping[int, CallRows]) -> ModelOutput | None:
    """The rows of what the model gave, or one for each sequence, whole, where it gave classes, images, pooled states;
    None where it gave no numbers.

    Args:
        calls: number of tokens -> a call over so many, whose rows are those of states of as many tokens.
    """
    name, states = _first(given)
    if states is None:
        return None
    call = calls.get(states.shape[1], next(iter(calls.values())))
    taken, rows = call.chosen.take(states), np.concatenate([part.rows for part in call.rows])
    vectors = states.flatten(1) if taken is None else taken[0]
    if taken is None:
        places = [place for sequences, _ in call.chosen.groups for place in sequences]
        if vectors.shape[1] > _WIDEST or max(places) >= len(vectors):
            return None
        rows = np.array([[number, -1] for number in dict.fromkeys(rows[:, 0].tolist())], np.int32)
        vectors = vectors[places].cpu().double()
    sketch = sketch_of(vectors)
    return ModelOutput(name, vectors.shape[1], rows, round_rows(sketch) if states.dtype.itemsize == 2 else sketch)


def join_outputs(parts: Sequence[ModelOutput | None]) -> ModelOutput | None:
    """Those of all batches as one; None where a batch had none, or they are of different kinds."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({(part.name, part.width) for part in known}) != 1:
        return None
    arrays = (join_rows([getattr(part, name) for part in known], 0) for name in ("rows", "sketch"))
    return ModelOutput(known[0].name, known[0].width, *arrays)


def _first(given: Any) -> tuple[str, Tensor | None]:
    """The first tensor of numbers, one or more for each sequence, and its name."""
    named = given.items() if isinstance(given, Mapping) else enumerate(given) if isinstance(given, tuple | list) else ()
    for name, part in (("", given), *named):
        if isinstance(part, Tensor) and part.dim() > 1 and part.is_floating_point() and not part.is_nested:
            return str(name), part.detach()
    return "", None
