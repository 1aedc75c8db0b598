"""Texts as batches of a pretrained model's tokens, and what tells its tokenizer from others."""

from __future__ import annotations

from typing import Any

import pytest

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
