"""The exact weights of heads equal the specification's, in float64, for all that a softmax call may have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attemper.backends import reference
from attemper.backends.contract import Problem
from attemper.monitor.exact_weights import weights

BATCH, HEADS, GROUPS, ROWS, KEYS, SIZE = 2, 4, 2, 9, 12, 8
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.rand(BATCH, HEADS, ROWS, KEYS, generator=GENERATOR) > 0.4
BLIND = HIDDEN & (torch.arange(ROWS) != 3)[:, None]
BIAS = torch.randn(1, HEADS, ROWS, KEYS, generator=GENERATOR)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"right": 0},
    "causal, bottom right": {"right": 0, "bottom_right": True, "positions": torch.arange(ROWS) + KEYS - ROWS},
    "window": {"left": 3, "right": 1},
    "mask of every head": {"mask": HIDDEN},
    "rows that see nothing": {"mask": BLIND},
    "a mask of keys": {"mask": HIDDEN[:, :1, :1]},
    "bias": {"mask": BIAS},
    "bias that hides": {"mask": BIAS.masked_fill(~BLIND[:1], -math.inf)},
    "softcap": {"softcap": 2.0, "right": 0},
    "sink": {"sink": torch.tensor([0.0, 1.0, -1.0, 5.0])},
    "documents": {"cu_seqlens_q": torch.tensor([0, 4, 9]), "cu_seqlens_k": torch.tensor([0, 7, 12]), "right": 0},
    "entmax": {"normalizer": "entmax", "per_head": torch.full((HEADS,), 1.5)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("heads", [slice(0, 2), slice(3, 4), slice(None)], ids=["a group", "one", "all"])
@pytest.mark.turns(3)
def test_weights_are_those_of_the_specification(name: str, heads: slice) -> None:
    torch.manual_seed(1)
    query, key = 3 * torch.randn(BATCH, HEADS, ROWS, SIZE), torch.randn(BATCH, GROUPS, KEYS, SIZE)
    if name == "causal":
        key[:, :, -1], query[0, 0, 2] = math.nan, math.nan  # a key that no row sees, and a row of NaN
    multiplier = torch.rand(1, HEADS, ROWS) + 0.2
    options: dict[str, Any] = {"mask": None} | OPTIONS[name]
    problem = Problem(query, key, None, multiplier=multiplier, **options)
    for sequence in range(BATCH):
        found, seen = weights(problem, sequence, heads)
        assert found.dtype == torch.float64
        torch.testing.assert_close(
            found, reference.weights(problem)[sequence, heads], rtol=1e-13, atol=1e-15, equal_nan=True
        )
        assert torch.equal(seen, reference.scores(problem)[1][sequence, heads])
