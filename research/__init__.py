"""Experiments that judge attemper, beside the package and as its users: ``python -m research``.

Of the package they import public names, ``attemper.lab`` and the few modules listed in
``tests/support/import_table.py``. An experiment is a module with ``NAME``, ``plan``, ``results`` and ``experiment``,
which ``attemper.lab.train`` runs. ``results/NAME.zip`` has its finished runs, ``results/NAME.json`` what they came to.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

EXPERIMENTS: dict[str, str] = {
    "lr-sensitivity": "how much the loss depends on the learning rate, under each way to temper attention",
    "length": "a model read at eight times its length: temperatures by length, and calibrated ones",
    "early-warning": "which alarm to believe: detectors on runs with known faults, and on their healthy twins",
    "shipped-alarms": "what the alarms that ship find by their defaults, and how often they warn falsely",
}
"""Name -> what it shows."""

TAKES: dict[str, str] = {
    "lr-sensitivity": "an hour and a half on two cores",
    "length": "about half an hour on two cores",
    "early-warning": "some hours on two cores",
    "shipped-alarms": "an hour on two cores, and its judging some minutes",
}
"""Name -> how long all of its runs take on a machine of today."""

RESULTS = Path(__file__).parent / "results"


def module_of(name: str) -> ModuleType:
    """The module of an experiment of ``EXPERIMENTS``."""
    return import_module(f"research.{name.replace('-', '_')}")
