"""Normalizers of scores run by each of their kernels; temperatures of every shape that fits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attemper.call import row_operator
from tests.support.fixtures import NATIVE


@pytest.fixture(params=("pytorch", *NATIVE))
def row_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """float32 rows on a CPU go to PyTorch's kernels, or to the native ones."""
    if request.param == "pytorch":
        monkeypatch.setattr(row_operator, "why_unusable", lambda: "a test wants PyTorch's")
    return request.param


def temperatures(given: str, shape: tuple[int, ...], dim: int) -> tuple[float | Tensor, float | Tensor]:
    """A "number", or a "scalar", "full" or "broadcast" tensor for scores of this shape; and what it divides them by."""
    without = list(shape)
    del without[dim]
    if given == "number":
        return 0.7, 0.7
    sizes = {"scalar": [], "full": without, "broadcast": without[-1:]}[given]
    temperature = torch.rand(sizes, dtype=torch.float64) + 0.5
    return temperature, temperature.expand(without).unsqueeze(dim)
