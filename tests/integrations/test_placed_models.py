"""Models whose layers are partly or all on disk, placed by accelerate: the numbers of the model in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from attemper import InputError
from attemper.integrations import pretrained
from attemper.integrations.device import to_device
from tests.support import encoder
from tests.support.command import Run, run
from tests.support.exact_entropies import exact_entropies

tf = pytest.importorskip("transformers")
__all__ = ["run"]
pytest.importorskip("accelerate")

LAYERS = {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(3)}
SOME_ON_DISK = {
    "model.embed_tokens": "cpu",
    **LAYERS,
    "model.norm": "disk",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    where = tmp_path_factory.mktemp("checkpoint") / "tiny-llama"
    tokenizer = tf.AutoTokenizer.from_pretrained(str(encoder.folder()))
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads)).save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


def ids() -> torch.Tensor:
    return torch.randint(3, 99, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.quick("sdpa")
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_layers_on_disk_are_scanned_watched_and_tempered_to_the_bit(
    folder: Path, implementation: str, seen: Any
) -> None:
    whole = tf.LlamaForCausalLM.from_pretrained(folder, attn_implementation=implementation).eval()
    placed = tf.LlamaForCausalLM.from_pretrained(
        folder, device_map=SOME_ON_DISK, attn_implementation=implementation
    ).eval()
    assert {parameter.device.type for parameter in placed.parameters()} == {"cpu", "meta"}
    expected = attemper.scan(whole, [ids()]).reading
    assert attemper.scan(placed, [ids()]).reading.sites == expected.sites
    assert [site.name for site in expected.sites] == [f"model.layers.{layer}.self_attn" for layer in range(3)]
    watched = []
    for one in (whole, placed):
        with attemper.watch(one) as watch, torch.no_grad():
            one(ids())
        watched.append(watch.table().sites)
    assert watched[0] == watched[1]
    exact = exact_entropies(folder, ids())
    errors = [
        abs((head.entropy_nats or 0.0) - exact[site.name, head.head]) for site in watched[1] for head in site.heads
    ]
    assert len(errors) == 12
    assert max(errors) < 1e-6
    seen("transformers", "Llama, device_map with layers on disk", f"registry, {implementation}", error_nats=max(errors))
    with attemper.temper(whole, temperature=2.0), attemper.temper(placed, temperature=2.0), torch.no_grad():
        assert torch.equal(whole(ids()).logits, placed(ids()).logits)
        assert attemper.scan(placed, [ids()]).reading.sites == attemper.scan(whole, [ids()]).reading.sites


@pytest.fixture(scope="module")
def runs_from_disk(folder: Path) -> None:
    """Skips where transformers itself cannot run a model of which no part is in memory, as 5.1 with torch 2.13."""
    model = tf.LlamaForCausalLM.from_pretrained(folder, device_map={"": "disk"})
    try:
        model(ids())
    except RuntimeError as error:
        pytest.skip(f"this transformers cannot run a model that is all on disk: {error}")


@pytest.mark.quick("disk")
@pytest.mark.parametrize("device", ["auto", "disk"])
def test_the_command_places_a_model_and_reads_the_same_numbers(
    folder: Path, tmp_path: Path, device: str, run: Run, request: pytest.FixtureRequest
) -> None:
    if device == "disk":
        request.getfixturevalue("runs_from_disk")
    text = tmp_path / "text.txt"
    text.write_text("Attention is a weighted mean. " * 40, encoding="utf-8")
    found, expected = (
        json.loads(run("scan", folder, "--text", text, "--json", *options).out)
        for options in (("--device", device), ())
    )
    assert found["sites"] == expected["sites"]
    assert found["tokens"] == expected["tokens"] > 200


@pytest.mark.slow("takes a second")
@pytest.mark.usefixtures("runs_from_disk")
def test_a_tempered_checkpoint_is_restored_with_its_layers_on_disk(folder: Path, tmp_path: Path) -> None:
    model = tf.LlamaForCausalLM.from_pretrained(folder)
    with attemper.temper(model, temperature=torch.tensor([0.5, 1.0, 2.0, 3.0])):
        model.save_pretrained(tmp_path / "tempered")
    tf.AutoTokenizer.from_pretrained(str(folder)).save_pretrained(tmp_path / "tempered")
    found, expected = (pretrained.load(str(tmp_path / "tempered"), device=device) for device in ("disk", "cpu"))
    assert len(found.tempered) == 1
    sites = [attemper.scan(one.model, [ids()]).reading.sites for one in (found, expected)]
    assert sites[0] == sites[1]


def test_what_needs_one_device_or_accelerate_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="device 'disk' is for pretrained models; this one takes cpu, cuda"):
        to_device(torch.nn.Linear(1, 1), "disk")
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="device 'auto' needs accelerate, which places the weights: pip install acc"):
        pretrained.load(str(folder), device="auto")


PEAK = """
import re, sys, torch, attemper
from attemper.integrations import pretrained
from attemper.integrations.device import to_device
from transformers import AutoModel
# Before the first look: pages of their libraries are no part of a model, and how many are there depends on the machine.
import accelerate, accelerate.big_modeling, transformers.models.llama.modeling_llama

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

before = peak()
options = {"device_map": {"": "disk"}} if sys.argv[2] == "disk" else {}
model = AutoModel.from_pretrained(sys.argv[1], **options).eval()
attemper.scan(model, [torch.randint(0, 99, (1, 64))])
print(peak() - before)
"""


def peak_megabytes(folder: Path, place: str) -> float:
    command = [sys.executable, "-c", PEAK, str(folder), place]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow("takes many seconds")
@pytest.mark.usefixtures("runs_from_disk")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much memory a process took")
def test_a_scan_with_all_layers_on_disk_holds_a_part_of_the_model_at_a_time(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    config = tf.LlamaConfig(vocab_size=99, num_attention_heads=8, num_key_value_heads=8, **sizes)
    tf.LlamaModel(config).save_pretrained(tmp_path)
    megabytes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) / 2**20
    assert megabytes > 700
    disk, memory = (peak_megabytes(tmp_path, place) for place in ("disk", "memory"))
    assert memory > 0.9 * megabytes
    assert disk < 0.35 * megabytes, (disk, memory, megabytes)
