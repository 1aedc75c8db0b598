"""The tests of Parquet files where pyarrow is: in a process of its own, since pandas works otherwise beside pyarrow."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "build" / "trl" / "site-packages"
"""Where pyarrow is installed for datasets, which TRL needs."""
FILES = (
    *(f"store/test_{name}.py" for name in ("parts", "export", "place")),
    "integrations/test_texts.py",
)


@pytest.mark.slow("needs what scripts/test.sh installs with --all")
@pytest.mark.skipif(find_spec("pyarrow") is not None, reason="pyarrow is here: these tests run by themselves")
@pytest.mark.skipif(
    not (PACKAGES / "pyarrow").is_dir(),
    reason="pyarrow is not in build/trl: `bash scripts/test.sh --all` installs it there",
)
def test_parts_and_exports_beside_pyarrow() -> None:
    paths = os.pathsep.join((str(ROOT / "src"), str(PACKAGES)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--all", "-q", "-p", "no:cacheprovider"]
        + [str(ROOT / "tests" / name) for name in FILES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped (reasons above): 0" in done.stdout, done.stdout[-4000:]
