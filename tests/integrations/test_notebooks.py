"""The notebooks of examples/ run from top to bottom in a kernel of Jupyter, and lie there without outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KERNEL = ROOT / "build" / "notebooks"
NAMES = ("scan", "watch", "calibrate")
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3").execute()
nbformat.write(notebook, "done.ipynb")
"""
SHOWN = {
    "scan": ("16 heads", "no alarms", "of log n"),
    "watch": ("logit_growth", "as it went wrong", "held"),
    "calibrate": ("one temperature per layer", "95% interval", "heads"),
}
"""What their outputs hold, beside pictures and tables."""


def notebook(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def test_examples_has_these_notebooks() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_lies_there_without_outputs_and_says_what_it_needs(name: str) -> None:
    found = notebook(ROOT / "examples" / f"{name}.ipynb")
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert "pip install" in "".join(found["cells"][0]["source"])
    assert found["metadata"]["kernelspec"]["name"] == "python3"
    for cell in code:
        compile("".join(cell["source"]), name, "exec")


@pytest.mark.long("examples as a user runs them")
@pytest.mark.skipif(
    not (KERNEL / "nbclient").is_dir(),
    reason="Jupyter is not in build/notebooks: `bash scripts/test.sh --long` installs it there",
)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_in_an_empty_folder(name: str, tmp_path: Path) -> None:
    paths = (str(ROOT / "src"), str(KERNEL), os.environ.get("PYTHONPATH", ""))
    own = {"HOME": tmp_path, "IPYTHONDIR": tmp_path / "ipython", "JUPYTER_RUNTIME_DIR": tmp_path / "runtime"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT / "examples" / f"{name}.ipynb")],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        | {k: str(v) for k, v in own.items()},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = [output for cell in notebook(tmp_path / "done.ipynb")["cells"] for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output["output_type"] == "error"]
    said = json.dumps(outputs)
    for words in SHOWN[name]:
        assert words in said, words
