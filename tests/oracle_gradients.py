"""Gradients of the oracle: a row's dL/ds carried to query, key, value, mask, temperature and sink, by loops over rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.oracle import FLOAT, Array, Inputs, row_gradient

GRADIENTS = ("query", "key", "value", "attn_mask", "temperature", "sink_logits")


def gradients(call: Inputs, upstream: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """dL/d(tensor), and for each entry the sum of the absolute values of the terms that it adds up.

    ``upstream``: dL/d(result) for ``output`` and any statistics, in their shapes. ``attn_mask`` comes as [B, H, Q, K] and
    ``temperature`` as [B, H, Q]: a broadcast argument is the caller's to sum. Rows that see nothing give 0.
    """
    shape = {
        "query": call.query.shape,
        "key": call.key.shape,
        "value": (0,) if call.value is None else call.value.shape,
        "attn_mask": call.visible.shape,
        "temperature": call.query.shape[:3],
        "sink_logits": (call.query.shape[1],),
    }
    grads = {name: np.zeros(size, FLOAT) for name, size in shape.items()}
    sizes = {name: np.zeros(size, FLOAT) for name, size in shape.items()}
    repeats = call.query.shape[1] // call.key.shape[1]
    for b, h, i in np.ndindex(*call.query.shape[:3]):
        row = call.row(b, h, i)
        if row.n == 0:
            continue
        above = {name: g[b, h] if name == "key_mass" else g[b, h, i] for name, g in upstream.items()}
        values = None if call.value is None else call.values(b, h, row)
        both = row_gradient(row, above, values)
        group, places = h // repeats, row.places
        query, key = call.query[b, h, i], call.key[b, group, places]
        multiplier = call.scale / call.temperature[b, h, i]
        for target, side, absolute in ((grads, 0, _same), (sizes, 1, np.abs)):
            ds = both["scores"][side]
            dx = ds * row.slope
            target["attn_mask"][b, h, i, places] = ds
            target["query"][b, h, i] = absolute(multiplier) * (dx @ absolute(key))
            target["key"][b, group, places] += absolute(multiplier) * np.outer(dx, absolute(query))
            spread = absolute(row.x) if side == 0 else absolute(multiplier) * (absolute(key) @ absolute(query))
            target["temperature"][b, h, i] = (1 if side else -1) * (dx * spread).sum() / call.temperature[b, h, i]
            target["sink_logits"][h] += both["sink"][side]
            if values is not None and "output" in upstream:
                applied = row.p * row.share
                target["value"][b, group, places] += np.outer(applied, absolute(above["output"]))
    return grads, sizes


def _same(value: Array) -> Array:
    return value


def summed_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """``gradient`` summed over the dimensions that broadcasting to it had added or widened."""
    while gradient.ndim > len(shape):
        gradient = gradient.sum(0)
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and gradient.shape[axis] != 1)
    return gradient.sum(axes, keepdims=True) if axes else gradient
