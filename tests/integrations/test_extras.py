"""A package that is not installed is named, with the extra that brings it."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys

import pytest

from attemper.errors import MissingExtraError

FRAMEWORKS = {"transformers", "lightning", "accelerate", "wandb"}
ASK = """
import json, sys
import attemper.integrations.trackers, attemper.integrations.metrics, attemper.integrations.training
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("extra", ["transformers", "lightning", "keras"])
def test_a_missing_package_is_named_with_its_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith((f"{extra}.", f"attemper.integrations.{extra}"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, extra, None)
    message = f"needs the package {extra}, which is not installed: pip install 'attemper[{extra}]'"
    with pytest.raises(MissingExtraError, match=re.escape(message)):
        importlib.import_module(f"attemper.integrations.{extra}")


@pytest.mark.slow("starts torch in a process")
def test_importing_the_integrations_loads_no_training_framework() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=120)
    assert not FRAMEWORKS & set(json.loads(done.stdout))
