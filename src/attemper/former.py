"""Modules that have moved, under their former names: where pickles of earlier versions look, until 0.4.

The packages that had them name them: ``functional``, ``readings``, ``sites``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType


class FormerModule(ModuleType):
    """Has what is in the module ``home`` now, which loads when it is asked for something."""

    def __init__(self, name: str, home: str) -> None:
        super().__init__(name, f"It is :mod:`{home}` now.")
        self.home = home
        sys.modules[name] = self
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, self)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module(self.home), name)
