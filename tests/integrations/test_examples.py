"""The examples and notebooks run as their docstrings say, and the blocks of docs/training.md run as they stand."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attemper
from attemper.lab.model import ByteConfig, ByteModel

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRL, KERAS, JUPYTER = (ROOT / "build" / name for name in ("trl/site-packages", "keras", "notebooks"))
AS_A_USER = "examples as a user runs them"


def ran(folder: Path, *command: str, packages: Path | None = None, timeout: float = 300, **environment: str) -> str:
    """What a Python process prints in ``folder``; with ``packages`` of build/ beside those that are installed."""
    paths = os.pathsep.join(map(str, filter(None, (ROOT / "src", packages, os.environ.get("PYTHONPATH")))))
    own = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": paths, **environment}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow(AS_A_USER)
@pytest.mark.parametrize(
    ("name", "launcher", "needed"),
    [
        ("watch_loop", (), ()),
        ("accelerate_loop", (), ("accelerate",)),
        ("compiled_tap", (), ()),
        ("trainer", (), ("transformers", "accelerate")),
        ("lightning_loop", (), ("lightning",)),
        ("fsdp2", TORCHRUN, ()),
        ("tensor_parallel", TORCHRUN, ("transformers", "accelerate")),
    ],
)
def test_an_example_prints_the_table_of_what_it_watched(
    name: str, launcher: tuple[str, ...], needed: tuple[str, ...], tmp_path: Path
) -> None:
    for package in needed:
        pytest.importorskip(package)
    check_table(ran(tmp_path, *launcher, str(EXAMPLES / f"{name}.py")))


@pytest.mark.slow(AS_A_USER)
@pytest.mark.skipif(
    not (TRL / "trl").is_dir(), reason="TRL is not in build/trl: `bash scripts/test.sh --all` installs it there"
)
def test_trls_trainer_is_watched_and_stored(tmp_path: Path) -> None:
    check_table(ran(tmp_path, str(EXAMPLES / "trl_sft.py"), packages=TRL, HF_HUB_OFFLINE="1"))


def check_table(printed: str) -> None:
    """The table of a model in training."""
    assert re.search(r"^\w+  [12] sites?, \d+ heads, [\d,]+ tokens", printed, re.MULTILINE), printed
    assert "self attention, train" in printed


ALL = ["0.05", "0.2", "1.0", f"{math.log(6) - 0.05:.6f}", "schedule"]
needs_keras = pytest.mark.skipif(
    not (KERAS / "keras").is_dir() and find_spec("keras") is None,
    reason="Keras is not in build/keras: `bash scripts/test.sh --long` installs it there",
)


@pytest.mark.long(AS_A_USER)
@pytest.mark.parametrize(
    ("name", "alphas", "backend"),
    [
        ("entropy_target", ALL, "torch"),
        pytest.param("entropy_target_keras", ["schedule"], "torch", marks=needs_keras),
        pytest.param("entropy_target_keras", ALL, "jax", marks=needs_keras),
    ],
)
def test_every_target_entropy_is_reached(name: str, alphas: list[str], backend: str, tmp_path: Path) -> None:
    """Mean |H - alpha| at most 0.02 nats after 1,000 steps; of a schedule, the target at its end."""
    packages = KERAS if name.endswith("keras") else None
    printed = ran(
        tmp_path, str(EXAMPLES / f"{name}.py"), *alphas, packages=packages, timeout=900, KERAS_BACKEND=backend
    )
    found = re.findall(r"alpha (\S+): mean \|H - alpha\| (\S+), mean H (\S+), loss (\S+)", printed)
    assert [each[0] for each in found] == alphas, printed
    for alpha, away, entropy, loss in found:
        target = 0.2 if alpha == "schedule" else float(alpha)
        assert float(away) <= 0.02, (alpha, away)
        assert abs(float(entropy) - target) <= 0.02
        assert float(loss) < 0.1


RUN_NOTEBOOK = """
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
"""Notebook -> what its outputs hold, beside pictures and tables."""


def notebook(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))


def test_notebooks_lie_there_without_outputs_and_say_what_they_need() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SHOWN)
    for name in SHOWN:
        found = notebook(EXAMPLES / f"{name}.ipynb")
        code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
        assert code
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
        assert "pip install" in "".join(found["cells"][0]["source"])
        assert found["metadata"]["kernelspec"]["name"] == "python3"
        for cell in code:
            compile("".join(cell["source"]), name, "exec")


@pytest.mark.long(AS_A_USER)
@pytest.mark.skipif(
    not (JUPYTER / "nbclient").is_dir(),
    reason="Jupyter is not in build/notebooks: `bash scripts/test.sh --long` installs it there",
)
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_in_an_empty_folder(name: str, tmp_path: Path) -> None:
    folders = {"HOME": "", "IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime"}
    own = {variable: str(tmp_path / folder) for variable, folder in folders.items()}
    ran(tmp_path, "-c", RUN_NOTEBOOK, str(EXAMPLES / f"{name}.ipynb"), packages=JUPYTER, timeout=500, **own)
    outputs = [output for cell in notebook(tmp_path / "done.ipynb")["cells"] for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output["output_type"] == "error"]
    said = json.dumps(outputs)
    for words in SHOWN[name]:
        assert words in said, words


@pytest.mark.slow(AS_A_USER)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec")
@pytest.mark.filterwarnings("ignore:.*log_every_n_steps")
def test_every_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tf = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    lightning = pytest.importorskip("lightning.pytorch")
    model = ByteModel(ByteConfig(layers=2, context=32))
    ids = torch.randint(0, 255, (8, 33))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    names: dict[str, Any] = {
        "attemper": attemper, "torch": SimpleNamespace(compile=lambda m: torch.compile(m, backend="eager")),
        "model": model, "loader": ids.split(4), "train_step": lambda batch: model.loss(batch).backward(),
        "llama": tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=256, **sizes)), "Trainer": tf.Trainer,
        "accelerator": accelerate.Accelerator(cpu=True),
        "data": [{"input_ids": row, "labels": row} for row in ids], "lightning": lightning,
        "arguments": tf.TrainingArguments(
            str(tmp_path), max_steps=2, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        "module": Module(), "batches": torch.utils.data.DataLoader(ids, batch_size=4),  # type: ignore[arg-type]
        "quiet": {
            "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu",
            "default_root_dir": str(tmp_path / "lightning"),  # another run than the Trainer's
        },
    }  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "docs/training.md", "exec"), names)
    logits = names["compiled"](ids[:, :32]).logits
    assert logits.shape == F.one_hot(ids[:, :32], 256).shape
    assert "'attention/normalized_entropy/min': " in capsys.readouterr().out
