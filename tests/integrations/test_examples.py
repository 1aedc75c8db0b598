"""The examples run as their docstrings say, and the blocks of docs/training.md run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import attemper
from attemper.lab.model import ByteConfig, ByteModel

pytestmark = pytest.mark.slow("examples as a user runs them")

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


TRL = ROOT / "build" / "trl" / "site-packages"


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
    check_example(name, tmp_path, launcher)


@pytest.mark.skipif(
    not (TRL / "trl").is_dir(), reason="TRL is not in build/trl: `bash scripts/test.sh --all` installs it there"
)
def test_trls_trainer_is_watched_and_stored(tmp_path: Path) -> None:
    check_example("trl_sft", tmp_path, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(TRL)]), HF_HUB_OFFLINE="1")


def check_example(name: str, folder: Path, launcher: tuple[str, ...] = (), **environment: str) -> None:
    """Runs an example in ``folder``; it has to print the table of a model in training."""
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / f"{name}.py")],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^\w+  [12] sites, \d+ heads, \d+ tokens", done.stdout, re.MULTILINE), done.stdout
    assert "self attention, train" in done.stdout


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
