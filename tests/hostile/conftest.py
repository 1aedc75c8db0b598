"""Hostile inputs go to the Triton kernels, too: interpreted, where Triton is installed."""

from __future__ import annotations

import pytest

from tests.conftest import BACKENDS
from tests.support.calls import PRESENT


@pytest.fixture(params=(*BACKENDS, *(("triton",) if "triton" in PRESENT else ())))
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return request.param
