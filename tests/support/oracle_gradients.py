"""Gradients of the oracle: a row's dL/ds carried to query, key, value, mask, temperature and sink, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tests.support.oracle import FLOAT, Array, Inputs, Row, row_gradient

GRADIENTS = ("query", "key", "value", "attn_mask", "temperature", "sink_logits")


def gradients(
    call: Inputs, upstream: Mapping[str, Array], relative: Callable[[Row], Array] | None = None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """dL/d(tensor), and for each entry the sum of the absolute values of the terms that it adds up.

    ``upstream``: dL/d(result) for ``output`` and any statistics, in their shapes. ``attn_mask`` comes as [B, H, Q, K]
    and ``temperature`` as [B, H, Q]: a broadcast argument is the caller's to sum. Rows that see nothing give 0.
    ``relative``: a weight for the absolute terms of each key of a row, such as the relative error that each may have.
    """
    shapes = _shapes(call)
    grads = {name: np.zeros(shape, FLOAT) for name, shape in shapes.items()}
    sizes = {name: np.zeros(shape, FLOAT) for name, shape in shapes.items()}
    for b, h, i in np.ndindex(*call.query.shape[:3]):
        row = call.row(b, h, i)
        if row.n == 0:
            continue
        above = {name: g[b, h] if name == "key_mass" else g[b, h, i] for name, g in upstream.items()}
        values = None if call.value is None else call.values(b, h, row)
        both = row_gradient(row, above, values)
        weight = np.ones(row.n, FLOAT) if relative is None else relative(row)
        place = (b, h, i, row)
        _scatter(grads, call, place, both["scores"][0], both["sink"][0], row.p * row.share, above.get("output"), _same)
        size, sink = both["scores"][1] * weight, both["sink"][1] * weight.max()
        _scatter(sizes, call, place, size, sink, row.p * row.share * weight, above.get("output"), np.abs)
    return grads, sizes


def _shapes(call: Inputs) -> dict[str, tuple[int, ...]]:
    return {
        "query": call.query.shape,
        "key": call.key.shape,
        "value": (0,) if call.value is None else call.value.shape,
        "attn_mask": call.visible.shape,
        "temperature": call.query.shape[:3],
        "sink_logits": (call.query.shape[1],),
    }


def _scatter(
    target: dict[str, Array], call: Inputs, place: tuple[int, int, int, Row], ds: Array, sink: FLOAT, applied: Array,
    output: Array | None, size: Callable[[Array], Array],
) -> None:  # fmt: skip
    """Adds a row's dL/ds to what it comes from. ``size`` is np.abs where absolute terms are added up."""
    b, h, i, row = place
    group, places = h // (call.query.shape[1] // call.key.shape[1]), row.places
    query, key = size(call.query[b, h, i]), size(call.key[b, group, places])
    multiplier, temperature = size(call.scale / call.temperature[b, h, i]), call.temperature[b, h, i]
    dx = ds * row.derivative
    target["attn_mask"][b, h, i, places] = ds
    target["query"][b, h, i] = multiplier * (dx @ key)
    target["key"][b, group, places] += multiplier * np.outer(dx, query)
    target["temperature"][b, h, i] = size(-multiplier / temperature) * (dx * (key @ query)).sum()
    target["sink_logits"][h] += sink
    if call.value is not None and output is not None:
        target["value"][b, group, places] += np.outer(applied, size(output))


def _same(value: Array) -> Array:
    return value


def summed_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """``gradient`` summed over the dimensions that broadcasting to it had added or widened."""
    while gradient.ndim > len(shape):
        gradient = gradient.sum(0)
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum(axes, keepdims=True) if axes else gradient
