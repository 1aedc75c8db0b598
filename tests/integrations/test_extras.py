"""A package that is not installed is named, with the extra that brings it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("transformers", "transformers", "transformers"),
        ("lightning", "lightning", "lightning"),
        ("keras", "keras", "keras"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(module: str, package: str, extra: str) -> None:
    hidden = f"import sys; sys.modules[{package!r}] = None; import attemper.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "MissingExtraError" in done.stderr
    assert f"needs the package {package}, which is not installed: pip install 'attemper[{extra}]'" in done.stderr


def test_importing_the_integrations_loads_no_training_framework() -> None:
    code = "import sys, attemper.integrations.sinks, attemper.integrations.metrics, attemper.integrations.training; "
    code += "assert not {'transformers', 'lightning', 'accelerate', 'wandb'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
