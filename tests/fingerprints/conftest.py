"""What tests of fingerprints share."""

from __future__ import annotations

import pytest
import torch

from attemper.fingerprints.taking import weights


@pytest.fixture(autouse=True, scope="package")
def read_once():
    """Bits of a matrix are read once, which is most of a fingerprint's time: most models here are the same again."""
    read, known = weights._grid, {}

    def found(matrix: torch.Tensor) -> tuple[int, float] | None:
        key = matrix.dtype, matrix.shape, matrix.contiguous().view(torch.uint8).numpy().tobytes()
        if key not in known:
            known[key] = read(matrix)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_grid", found)
        yield
