"""Triton kernels run in the interpreter here, on small shapes; where Triton is missing nothing is collected."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# A script of its own process: what it compiles must not be interpreted.
collect_ignore = ["cross_compile.py"]
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _interpreter(interpreted: None) -> None:
    """See ``tests/support/interpreter.py``."""
