"""What tests of commands share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import encoder
from tests.support.command import run as run


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small decoder with a real tokenizer, saved as people save them."""
    tf = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("saved") / "tiny-gpt2"
    tokenizer = tf.AutoTokenizer.from_pretrained(str(encoder.folder()))
    config = tf.GPT2Config(
        vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    tf.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / saved.name)
