"""Every block of Python in the documentation runs: where, and here those of pages without a test of their own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from tests.docs.test_guide import blocks
from tests.support import encoder
from tests.support.engine_models import tiny, tokens

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = {
    "README.md": "docs/test_guide.py",
    "docs/alarms.md": "docs/test_alarms_page.py",
    "docs/articles/from-article-to-library.md": "articles/test_pages.py",
    "docs/derivations/entropy.md": "docs/test_blocks.py",
    "docs/fingerprints.md": "docs/test_blocks.py",
    "docs/guide.md": "docs/test_blocks.py",  # and the section on acting in docs/test_guide.py
    "docs/history.md": "docs/test_history_page.py",
    "docs/lab/README.md": "docs/test_blocks.py",
    "docs/linear-attention.md": "functional/test_linear_page.py",
    "docs/normalizers.md": "docs/test_normalizers_page.py",
    "docs/reading-file.md": "docs/test_blocks.py",
    "docs/scan-json.md": "docs/test_scan_json.py",
    "docs/training.md": "integrations/test_examples.py",
    "docs/tutorial.md": "docs/test_website.py",
}
"""Page -> the file of tests that runs its blocks; those of docs/tasks run in docs/test_tasks.py."""


def code(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text("utf-8"))


def test_every_page_with_python_is_run_by_a_test() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    names = {page.relative_to(ROOT).as_posix() for page in pages if ".zh-CN" not in page.name}
    with_python = {page for page in names if code(page) and not page.startswith("docs/tasks/")}
    assert with_python == set(RUN)
    for page, test in RUN.items():
        assert Path(page).stem in (ROOT / "tests" / test).read_text("utf-8") or "articles" in test


@pytest.mark.parametrize("page", ["docs/derivations/entropy.md", "docs/lab/README.md"])
def test_a_page_that_needs_nothing(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in code(page):
        exec(compile(block, page, "exec"), names)
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
    (block,) = code("docs/reading-file.md")
    exec(compile(block, "docs/reading-file.md", "exec"), names)
    assert "2 heads" in capsys.readouterr().out


@pytest.mark.slow("takes many seconds")
def test_the_fingerprints_of_two_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, other = tiny("llama").model, tiny("llama").model
    other.get_submodule("layers.1.self_attn").scaling *= 1.25
    (block,) = code("docs/fingerprints.md")
    names: dict[str, Any] = {"attemper": attemper, "model": model, "my_other_engine": other, "batches": [tokens()]}
    exec(compile(block, "docs/fingerprints.md", "exec"), names)
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
    for block in blocks("docs/guide.md", "In Python"):
        exec(compile(block, "docs/guide.md", "exec"), names)
    assert len(names["scan"].sites) == 6
    assert names["watch"].table()
