"""Rows of scores for the laws: drawn by hypothesis, brought into attention as a bias or as products."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from attemper.types import AttentionStats
from tests.support import calls

BACKENDS = ("reference", "blocked")

numbers = st.one_of(
    st.floats(-30, 30, allow_nan=False, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 5.0]),  # ties
)


@st.composite
def rows(draw: st.DrawFn, least: int = 1, most: int = 9) -> Tensor:
    """[Q, n] float64 scores; sometimes sorted, sometimes with ties."""
    n = draw(st.integers(least, most))
    number = draw(st.integers(1, 3))
    drawn = [draw(st.lists(numbers, min_size=n, max_size=n)) for _ in range(number)]
    scores = torch.tensor(drawn, dtype=torch.float64)
    return scores.sort(-1).values if draw(st.booleans()) else scores


def attended(scores: Tensor, backend: str, value: Tensor | None = None, **options: Any) -> calls.Result:
    """Attention whose scores are these [Q, n]: query 1, key 0 and the scores as a bias."""
    query, key = (torch.zeros(1, 1, n, 1, dtype=scores.dtype) for n in scores.shape)
    return calls.attended(backend, query, key, key if value is None else value, scores, **options)


def measured(scores: Tensor, backend: str, **options: Any) -> AttentionStats:
    return attended(scores, backend, **options).stats


def of_products(scores: Tensor, backend: str, bias: Tensor | None = None, **options: Any) -> AttentionStats:
    """The same with the scores as products q.k (one-hot queries), so that temperature divides them."""
    query, key = torch.eye(scores.shape[0], dtype=scores.dtype)[None, None], scores.mT[None, None]
    return calls.attended(backend, query, key, key, bias, scale=1.0, **options).stats


def close(one: Tensor, two: Tensor, what: str = "", atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, two, rtol=1e-12, atol=atol, msg=lambda text: f"{what}: {text}")
