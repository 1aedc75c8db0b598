"""The code of README.md, and what docs/guide.md says of acting on a model, runs as it stands, on a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper

ROOT = Path(__file__).parents[2]


def blocks(page: str, title: str) -> list[str]:
    section = (ROOT / page).read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def names() -> dict[str, Any]:
    """What the section takes for granted."""
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
def test_acting_on_it(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks("docs/guide.md", "Acting on it")
    assert len(code) == 6
    assert "integrations.keras" in code[-1], "it runs in tests/integrations/test_keras.py"
    for block in code[:-1]:
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


def test_the_five_lines_of_the_readme(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("README.md", "Five lines of Python")
    assert len([line for line in code.splitlines() if line]) == 5
    model = names["model"]
    exec(compile(code, "README.md", "exec"), names | {"train_step": lambda batch: model(**batch).loss.backward()})
    with attemper.open(tmp_path / "runs" / "a") as run:
        assert len(run) > 0
    assert (ROOT / "docs" / "pictures" / "collapse.gif").stat().st_size < 1_000_000
