"""Normalizers of scores run by each of their kernels."""

from __future__ import annotations

import pytest

from attemper.call import row_operator
from tests.support.fixtures import NATIVE


@pytest.fixture(params=("pytorch", *NATIVE))
def row_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """float32 rows on a CPU go to PyTorch's kernels, or to the native ones."""
    if request.param == "pytorch":
        monkeypatch.setattr(row_operator, "why_unusable", lambda: "a test wants PyTorch's")
    return request.param
