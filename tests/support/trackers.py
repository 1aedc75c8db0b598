"""Trackers of experiments, made by hand."""

from __future__ import annotations

from typing import Any


class Kept:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []
