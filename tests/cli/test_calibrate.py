"""``attemper calibrate`` as a person meets it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from attemper.types import Calibration
from tests.support import encoder
from tests.support.command import Run, one_line

tf = pytest.importorskip("transformers")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A text with something to attend to."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(5, (500,), generator=generator).tolist()
    path = tmp_path / "words.txt"
    path.write_text(" ".join(("heads", "attend", "to", "a", "key")[number] for number in drawn), encoding="utf-8")
    return path


@pytest.mark.slow("takes many seconds")
def test_without_a_model_the_one_that_ships_is_calibrated_on_the_text_that_ships(run: Run, tmp_path: Path) -> None:
    ended = run("calibrate", "--out", tmp_path / "found.safetensors")
    assert ended.code == 0, ended.err
    first, estimate, wrote = ended.err.splitlines()
    assert first == "32 batches of 1 window of 128 bytes"
    assert re.fullmatch(r"up to 1,340 batches in all, about \d+ (s|min) at most", estimate)
    assert wrote == f"wrote the temperatures to {tmp_path / 'found.safetensors'}"
    found = Calibration.load(tmp_path / "found.safetensors")
    assert len(found.temperatures) == 4
    assert f"{found.before:.4f} -> {found.after:.4f}" in ended.out
    assert f"in bits/byte: {found.before / math.log(2):.4f} -> {found.after / math.log(2):.4f}" in ended.out


@pytest.mark.slow("takes many seconds")
def test_json_has_nats_and_bits_and_the_folded_folder_is_a_model_of_plain_transformers(
    run: Run, checkpoint: Path, words: Path, tmp_path: Path
) -> None:
    given = ("--text", words, "--max-length", 16, "--method", "grid", "--per", "head", "--json")
    ended = run("calibrate", checkpoint, *given, "--fold", tmp_path / "folded", "--out", tmp_path, "--force")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["per"] == "head"
    assert [len(found) for found in document["temperatures"].values()] == [2, 2]
    assert document["bits"]["unit"] == "bits/token"
    assert document["bits"]["before"] == pytest.approx(document["before"] / math.log(2))
    assert document["held_out"] >= 8
    assert f"wrote the temperatures to {tmp_path / 'attemper.safetensors'}\n" in ended.err
    assert f"wrote {tmp_path / 'folded'}: the model with its temperatures folded in" in ended.err
    found = Calibration.load(tmp_path)
    assert found.method == "grid"
    folded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "folded").eval()
    plain = tf.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.arange(20)[None] + 100
    with torch.no_grad(), found.apply(plain):
        torch.testing.assert_close(folded(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-6)
    assert len(tf.AutoTokenizer.from_pretrained(str(tmp_path / "folded"))) > 1000


@pytest.mark.slow("takes many seconds")
def test_temperatures_in_doubt_are_not_folded_without_force(
    run: Run, checkpoint: Path, words: Path, tmp_path: Path
) -> None:
    """The tiny model is random: no text can tell."""
    given = ("calibrate", checkpoint, "--text", words, "--max-length", 16, "--method", "grid")
    ended = run(*given, "--fold", tmp_path / "folded", "--out", tmp_path / "found.safetensors")
    assert ended.code == 1
    doubt = Calibration.load(tmp_path / "found.safetensors").doubt
    assert doubt is not None
    assert ended.err.endswith(f"attemper: --fold wrote nothing to {tmp_path / 'folded'}: {doubt}, or pass --force.\n")
    assert not (tmp_path / "folded").exists()
    assert "held-out batches" in ended.out  # the table is there all the same
    forced = run(*given, "--fold", tmp_path / "folded", "--force", "--json")
    assert forced.code == 0
    assert json.loads(forced.out)["doubt"] == doubt
    assert f"by --force, although {doubt}\n" in forced.err


def test_a_model_that_reads_fewer_tokens_is_told_what_holds_it(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("key " * 900, encoding="utf-8")
    asked = ("--text", long, "--max-length", 64)
    one_line(run("calibrate", checkpoint, *asked), 1, "reads at most 32 tokens. Its positions are learned")
    config = tf.LlamaConfig(
        vocab_size=30600, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(checkpoint)
    message = "change max_position_embeddings in config.json (32), and with them rope_parameters"
    one_line(run("calibrate", checkpoint, *asked), 1, message)


def test_mistakes_are_one_line_or_bad_usage(run: Run, checkpoint: Path, words: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too few words", encoding="utf-8")
    failed = run("calibrate", "--text", short, "--max-length", 4)
    assert failed.code == 1
    assert "too few batches (3) to tell whether a temperature helps" in failed.err
    one_line(run("calibrate", "--out", tmp_path / "no" / "found.safetensors"), 1, "is not a folder: create it first")
    one_line(run("calibrate", checkpoint, "--fold", tmp_path), 1, "is not empty")
    one_line(run("calibrate", encoder.folder(), "--text", words), 1, "is not a causal language model: its config names")
    for wrong in (("--per", "token"), ("--method", "anneal"), ("--fold", tmp_path / "new"), ("--validation", 1.5)):
        assert run("calibrate", *wrong).code == 2
