"""Hostile inputs go to the Triton kernels, too: interpreted, where Triton is installed."""

from __future__ import annotations

import pytest

from tests.support.calls import PRESENT
from tests.support.fixtures import BACKENDS


@pytest.fixture(params=(*BACKENDS, *(("triton",) if "triton" in PRESENT else ())))
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return request.param
