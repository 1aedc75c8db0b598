"""What tests of the lab's pages share."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> ModuleType:
    """``scripts/lab_pages.py`` as a module."""
    spec = importlib.util.spec_from_file_location("lab_pages", ROOT / "scripts" / "lab_pages.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
