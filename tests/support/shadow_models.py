"""What tests of shadow passes share."""

from __future__ import annotations

import pytest

torch_warns = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo asks inputs of a compiled block for their gradients."""
