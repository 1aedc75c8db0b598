"""The demonstrations of a target entropy reach it: mean |H - alpha| at most 0.02 nats after 1,000 steps."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "keras"
ALL = ["0.05", "0.2", "1.0", f"{math.log(6) - 0.05:.6f}", "schedule"]
needs_keras = pytest.mark.skipif(
    not (PACKAGES / "keras").is_dir() and find_spec("keras") is None,
    reason="Keras is not in build/keras: `bash scripts/test.sh --long` installs it there",
)


def reached(name: str, alphas: list[str], backend: str = "torch") -> None:
    """Runs an example, whose lines must say so for every alpha."""
    paths = [str(ROOT / "src"), *([str(PACKAGES)] if name.endswith("keras") else [])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *alphas], capture_output=True, text=True, timeout=900,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    line = r"alpha (\S+): mean \|H - alpha\| (\S+), mean H (\S+), loss (\S+)"
    found = re.findall(line, done.stdout)
    assert [each[0] for each in found] == alphas, done.stdout
    for alpha, away, entropy, loss in found:
        target = 0.2 if alpha == "schedule" else float(alpha)
        assert float(away) <= 0.02, (alpha, away)
        assert abs(float(entropy) - target) <= 0.02
        assert float(loss) < 0.1


@pytest.mark.long("examples as a user runs them")
def test_in_torch_every_target_is_reached():
    reached("entropy_target", ALL)


@needs_keras
@pytest.mark.long("examples as a user runs them")
def test_in_keras_a_schedule_and_the_target_at_its_end_are_reached_on_torch():
    reached("entropy_target_keras", ["schedule"])


@needs_keras
@pytest.mark.long("examples as a user runs them")
def test_in_keras_every_target_is_reached_on_jax():
    reached("entropy_target_keras", ALL, "jax")
