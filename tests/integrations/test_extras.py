"""A package that is not installed is named, with the extra that brings it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

EXTRAS = ("transformers", "lightning", "keras")
"""The name of the package, of its extra and of the module that needs it."""
FRAMEWORKS = {"transformers", "lightning", "accelerate", "wandb"}
ASK = """
import importlib, json, sys

import attemper.integrations.trackers, attemper.integrations.metrics, attemper.integrations.training

found = {"loaded": sorted(sys.modules)}
for name in sys.argv[1:]:
    sys.modules[name] = None
    try:
        importlib.import_module(f"attemper.integrations.{name}")
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


@functools.cache
def found() -> dict[str, list[str]]:
    """What a fresh interpreter has loaded with the integrations, and the error without each package."""
    done = subprocess.run([sys.executable, "-c", ASK, *EXTRAS], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(extra: str) -> None:
    kind, message = found()[extra]
    assert kind == "MissingExtraError"
    assert f"needs the package {extra}, which is not installed: pip install 'attemper[{extra}]'" in message


def test_importing_the_integrations_loads_no_training_framework() -> None:
    assert not FRAMEWORKS & set(found()["loaded"])
