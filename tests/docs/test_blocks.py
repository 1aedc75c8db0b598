"""Every block of Python in the documentation runs: where, and here those of pages without a test of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from attemper.lab.model import ByteConfig, ByteModel
from tests.docs.pages import ROOT, code, run_code
from tests.support import encoder
from tests.support.engine_models import tiny, tokens

RUN = {
    "README.md": "docs/test_blocks.py",
    "docs/alarms.md": "docs/test_alarms_page.py",
    "docs/articles/from-article-to-library.md": "articles/test_pages.py",
    "docs/derivations/entropy.md": "docs/test_blocks.py",
    "docs/fingerprints.md": "docs/test_blocks.py",
    "docs/guide.md": "docs/test_blocks.py",
    "docs/history.md": "docs/test_blocks.py",
    "docs/lab/README.md": "docs/test_blocks.py",
    "docs/linear-attention.md": "functional/test_linear.py",
    "docs/normalizers.md": "docs/test_normalizers_page.py",
    "docs/reading-file.md": "docs/test_blocks.py",
    "docs/scan-json.md": "docs/test_scan_json.py",
    "docs/training.md": "integrations/test_examples.py",
    "docs/tutorial.md": "docs/test_website.py",
}
"""Page -> the file of tests that runs its blocks; those of docs/tasks run in docs/test_tasks.py."""


def test_every_page_with_python_is_run_by_a_test() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {page.relative_to(ROOT).as_posix() for page in pages if ".zh-CN" not in page.name}
    with_python = {page for page in names if code(page) and not page.startswith("docs/tasks/")}
    assert with_python == set(RUN)
    for page, test in RUN.items():
        assert Path(page).stem in (ROOT / "tests" / test).read_text("utf-8") or "articles" in test


@pytest.mark.parametrize("page", ["docs/derivations/entropy.md", "docs/lab/README.md"])
def test_a_page_that_needs_nothing(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_code(page)
    said = capsys.readouterr().out
    if page.endswith("entropy.md"):
        assert all(float(line) < 1e-12 for line in said.split())
    else:
        assert "1.0986" in said, "log 3"


def test_the_file_of_a_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("parts")
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    batches = [(torch.randn(1, 40, 16),) * 3 for _ in range(4)]
    names: dict[str, Any] = {"attemper": attemper, "Path": Path, "model": model, "my_batches": batches}
    for part in range(1, 4):
        attemper.scan(model, batches[part::4], shard=(part, 4)).save(f"parts/{part}.safetensors")
    run_code("docs/reading-file.md", names)
    assert "2 heads" in capsys.readouterr().out


@pytest.mark.slow("takes many seconds")
def test_the_fingerprints_of_two_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, other = tiny("llama").model, tiny("llama").model
    other.get_submodule("layers.1.self_attn").scaling *= 1.25
    names: dict[str, Any] = {"attemper": attemper, "model": model, "my_other_engine": other, "batches": [tokens()]}
    run_code("docs/fingerprints.md", names)
    assert (names["found"].kind, names["found"].site) == ("scale", "layers.1.self_attn")
    assert names["found"].value == pytest.approx(1.25, rel=1e-6)
    assert "1.25 times those of run a" in capsys.readouterr().out


@pytest.mark.slow("takes many seconds")
def test_the_guide_in_python() -> None:
    names: dict[str, Any] = {
        "folder": encoder.folder(), "loader": [None], "loss": torch.zeros(()),
        **{name: torch.randn(1, 2, 6, 8) for name in ("query", "key", "value")},
    }  # fmt: skip
    names["train_step"] = lambda batch: names["model"](**names["tokenizer"]("Awake.", return_tensors="pt"))
    run_code("docs/guide.md", names, "In Python")
    assert len(names["scan"].sites) == 6
    assert names["watch"].table()


@pytest.fixture
def around_a_llama() -> dict[str, Any]:
    """What README and the section on acting take for granted."""
    tf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "intermediate_size": 64}
    model = tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=50, **sizes)).train()
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (13, 1, 12))]
    return {
        "attemper": attemper, "model": model, "batches": batches, "held_out": batches * 2, "loader": batches[:2],
        "loss_of": lambda model, batch: model(**batch).loss, "scan": attemper.scan(model, batches[:2]),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "x": torch.randn(2, 6, 512), "loss": torch.zeros(()),
        **{name: torch.randn(1, 2, 6, 8) for name in ("query", "key", "value")},
    }  # fmt: skip


@pytest.mark.slow("takes many seconds")
def test_acting_on_it(around_a_llama: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    names, blocks = around_a_llama, code("docs/guide.md", "Acting on it")
    assert len(blocks) == 6
    assert "integrations.keras" in blocks[-1], "it runs in tests/integrations/test_keras.py"
    for block in blocks[:-1]:
        if "normalizer=" in block:
            names["thermostat"].remove()  # it steers softmax alone, and says so
        exec(compile(block, "docs/guide.md", "exec"), names)
    assert names["penalty"].value > 0
    assert names["thermostat"].steps == names["clip"].steps == 2
    assert len(names["calibration"].temperatures) == 1
    assert (names["stats"].support_size <= names["stats"].visible_keys).all()
    assert names["sparse"].sites[0].heads[0].mass == pytest.approx(1)
    assert "entropy, % of log n" in capsys.readouterr().out
    names["clip"].remove()


def test_the_five_lines_of_the_readme(
    around_a_llama: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = code("README.md", "Five lines of Python")
    assert len([line for line in block.splitlines() if line]) == 5
    model = around_a_llama["model"]
    step = {"train_step": lambda batch: model(**batch).loss.backward()}
    run_code("README.md", around_a_llama | step, "Five lines of Python")
    with attemper.open(tmp_path / "runs" / "a") as run:
        assert len(run) > 0
    assert (ROOT / "docs" / "pictures" / "collapse.gif").stat().st_size < 1_000_000


@pytest.mark.slow("takes many seconds")
def test_the_page_on_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ByteModel(ByteConfig(layers=2, heads=4, width=32, context=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "batches": torch.randint(256, (151, 2, 48)), "train_step": train_step}
    run = run_code("docs/history.md", {"attemper": attemper, **given})["run"]
    assert run.steps.tolist() == [0, 50, 100, 150]
    assert run.history("loss").steps.tolist() == [*range(151)]
    assert run.history("max_logit", site="blocks.1.attention", head=2, start=100, stop=200).steps.tolist() == [100, 150]
    assert run.name == "warm-up 2,000"
