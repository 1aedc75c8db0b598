"""A checkpoint in shards is read from its own folder only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from attemper import InputError
from attemper.integrations import pretrained
from tests.support import encoder

tf = pytest.importorskip("transformers")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A decoder in several files, with its tokenizer."""
    folder = tmp_path / "model"
    tokenizer = tf.AutoTokenizer.from_pretrained(str(encoder.folder()))
    config = tf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=32)
    tf.GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="1MB")
    tokenizer.save_pretrained(folder)
    return folder


def index_of(folder: Path) -> Path:
    return folder / "model.safetensors.index.json"


def test_a_checkpoint_in_shards_loads_also_by_a_linked_folder(sharded: Path, tmp_path: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert pretrained.load(str(sharded)).longest == 32
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in sharded.iterdir():
        (linked / file.name).symlink_to(file)
    assert pretrained.load(str(linked)).longest == 32


@pytest.mark.parametrize("name", ["../{}", "/{}", "sub/../../{}", "..\\{}", "C:\\{}", "\\\\server\\{}", "{}.bin"])
def test_a_shard_outside_the_folder_is_refused_before_it_is_opened(sharded: Path, tmp_path: Path, name: str) -> None:
    index = json.loads(index_of(sharded).read_text())
    parameter, shard = next(iter(index["weight_map"].items()))
    shutil.copy(sharded / shard, tmp_path / shard)
    index["weight_map"][parameter] = name.format(shard if name != "/{}" else str(tmp_path / shard)[1:])
    index_of(sharded).write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"names the shard .*not a safetensors file inside"):
        pretrained.load(str(sharded))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("garbage", "is not a checkpoint index.*it is not JSON"),
        ("[" * 100_000, "is not a checkpoint index.*it is not JSON"),
        ("[]", "must be an object, got list"),
        ("{}", "has no 'weight_map'"),
        ('{"weight_map": {"a": 1}}', r"weight_map\.a must be text, got 1"),
    ],
)
def test_an_index_that_is_none_is_told(sharded: Path, text: str, message: str) -> None:
    index_of(sharded).write_text(text)
    with pytest.raises(InputError, match=message):
        pretrained.load(str(sharded))
