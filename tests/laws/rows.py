"""Rows of scores for the laws: drawn by hypothesis, brought into attention as a bias or as products."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

import attemper
from attemper import AttentionOutput, AttentionStats

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


def attended(scores: Tensor, backend: str, value: Tensor | None = None, **options) -> AttentionOutput:
    """Attention whose scores are these [Q, n]: query 1, key 0 and the scores as a bias."""
    query = torch.zeros(1, 1, scores.shape[0], 1, dtype=scores.dtype)
    key = torch.zeros(1, 1, scores.shape[1], 1, dtype=scores.dtype)
    return attemper.attention(
        query, key, key if value is None else value, scores, backend=backend, **{"stats": "all", **options}
    )


def measured(scores: Tensor, backend: str, **options) -> AttentionStats:
    stats = attended(scores, backend, **options).stats
    assert stats is not None
    return stats


def of_products(scores: Tensor, backend: str, bias: Tensor | None = None, **options) -> AttentionStats:
    """The same with the scores as products q.k (one-hot queries), so that temperature divides them."""
    query = torch.eye(scores.shape[0], dtype=scores.dtype)[None, None]
    stats = attemper.attention(
        query,
        scores.mT[None, None],
        scores.mT[None, None],
        bias,
        scale=1.0,
        backend=backend,
        **{"stats": "all", **options},
    ).stats
    assert stats is not None
    return stats


def close(one: Tensor, two: Tensor, what: str = "", atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, two, rtol=1e-12, atol=atol, msg=lambda text: f"{what}: {text}")
