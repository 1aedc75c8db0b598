"""What one rounding of each type may change, and how many of them count as a difference. Loads nothing."""

from __future__ import annotations

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23, "float64": 2.0**-23}
"""Largest relative error of rounding once. What is kept of float64 is float32."""
MARGIN = 2.0
"""A stage is beyond rounding if its level is so many times the expected one."""
