"""The code of docs/history.md runs as it stands, on a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from attemper.lab.model import ByteConfig, ByteModel

PAGE = (Path(__file__).parents[2] / "docs" / "history.md").read_text("utf-8")


@pytest.fixture
def names() -> dict[str, Any]:
    """What the page takes for granted."""
    model = ByteModel(ByteConfig(layers=2, heads=4, width=32, context=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        return loss

    batches = torch.randint(256, (151, 2, 48))
    return {"attemper": attemper, "model": model, "batches": batches, "train_step": train_step}


@pytest.mark.slow("takes many seconds")
def test_the_page_runs(names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(code, "docs/history.md", "exec"), names)
    run = names["run"]
    assert run.steps.tolist() == [0, 50, 100, 150]
    assert run.history("loss").steps.tolist() == [*range(151)]
    assert run.history("max_logit", site="blocks.1.attention", head=2, start=100, stop=200).steps.tolist() == [100, 150]
    assert run.name == "warm-up 2,000"
