"""Pretrained models: shards are read from their own folder only; texts as batches, and what tells tokenizers apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from attemper import InputError
from attemper.integrations import pretrained
from tests.support import encoder

tf = pytest.importorskip("transformers")


def tokenizer() -> Any:
    return tf.AutoTokenizer.from_pretrained(str(encoder.folder()))


def test_short_texts_come_first_so_that_few_tokens_are_padding():
    known = pretrained.load(str(encoder.folder()))
    texts = ["entropy " * many for many in (40, 1, 30, 2, 9, 5)]
    batches = list(pretrained.text_batches(known, texts, longest=24, batch_size=2))
    lengths = [[int(row.sum()) for row in batch["attention_mask"]] for batch in batches]
    # Each window has two special tokens: 40 words are windows of 22 and of 18, 30 of 22 and of 8.
    assert lengths == [[3, 4], [7, 10], [11, 20], [24, 24]]
    assert batches[0]["input_ids"][0, :3].tolist() == known.tokenizer(texts[1])["input_ids"]


def lower_case(one: Any) -> None:
    one.backend_tokenizer.normalizer = None


def another_word(one: Any) -> None:
    one.add_tokens(["attemper"])


def other_side(one: Any) -> None:
    one.padding_side = "left"


def test_a_digest_tells_tokenizers_apart():
    one = tokenizer()
    expected = pretrained.digest_of(one)
    one(["a text"] * 3, truncation=True, max_length=8, padding=True)
    assert pretrained.digest_of(one) == expected
    for change in (lower_case, another_word, other_side):
        other = tokenizer()
        assert pretrained.digest_of(other) == expected
        change(other)
        assert pretrained.digest_of(other) != expected, change


# --- checkpoints in shards ---


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A decoder in several files, with its tokenizer."""
    folder = tmp_path / "model"
    config = tf.GPT2Config(vocab_size=len(tokenizer()), n_embd=16, n_layer=2, n_head=2, n_positions=32)
    tf.GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="1MB")
    tokenizer().save_pretrained(folder)
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
        ("[]", r"must be an object, got \[\]"),
        ("{}", "has no 'weight_map'"),
        ('{"weight_map": {"a": 1}}', r"weight_map\.a must be text, got 1"),
    ],
)
def test_an_index_that_is_none_is_told(sharded: Path, text: str, message: str) -> None:
    index_of(sharded).write_text(text)
    with pytest.raises(InputError, match=message):
        pretrained.load(str(sharded))
