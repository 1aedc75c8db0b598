"""``temper(normalizer=...)`` on models of transformers: sinks, softcaps, biases, caches, checkpointing, autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper import nn
from attemper.errors import InputError
from tests.control.models import checkpointed
from tests.monitor.tiny_models import TINY, inputs, require_registry

RTOL = 1e-5


def ready(name: str) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    tiny = TINY[name]
    model = tiny.build().eval()
    return model, inputs(tiny.kind, None if tiny.kind in ("vision", "speech") else "right")


def real_outputs(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The first output, at real tokens."""
    output = model(**batch)[0]
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    return output if mask is None or mask.shape != output.shape[:2] else output[mask.bool()]


@pytest.mark.parametrize("name", [name for name in TINY if name != "gpt-oss"])
@torch.no_grad()
@pytest.mark.turns(2)
def test_softmax_changes_nothing_and_another_map_is_measured_and_taken_off(name: str) -> None:
    require_registry(TINY[name].model)
    model, batch = ready(name)
    before = real_outputs(model, batch)
    with attemper.temper(model, normalizer="softmax"):
        assert (real_outputs(model, batch) - before).abs().max() < RTOL
    with attemper.temper(model, normalizer="entmax15") as handle:
        assert (real_outputs(model, batch) - before).abs().max() > 10 * RTOL
        scan = attemper.scan(model, [batch])
        assert handle.sites
    assert {site.normalizer for site in scan.sites} == {"entmax15"}
    assert not scan.skipped
    assert torch.equal(real_outputs(model, batch), before)


@torch.no_grad()
def test_generation_with_a_cache_is_generation_without_one() -> None:
    model, _ = ready("llama")
    prompt = {key: value[:, :12] for key, value in inputs("text", None).items()}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with attemper.temper(model, normalizer="sparsemax"):
        cached = model.generate(**prompt, use_cache=True, **options)
        assert torch.equal(cached, model.generate(**prompt, use_cache=False, **options))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_gradients_are_the_same(reentrant: bool) -> None:
    model, batch = ready("llama")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    found = []
    for kind in (None, reentrant):
        again = copy.deepcopy(model).train()
        attemper.temper(again, normalizer=nn.Entmax(1.5, learned=True, num_heads=4))
        checkpointed(again, kind)
        again(**batch, labels=labels, use_cache=False).loss.backward()
        found.append({name: part.grad for name, part in again.named_parameters() if part.grad is not None})
    plain, repeated = found
    assert plain.keys() == repeated.keys()
    assert sum("attemper_normalizer" in name for name in plain) == 2  # alpha of each layer
    for name, gradient in plain.items():
        assert torch.equal(gradient, repeated[name]), name


@torch.no_grad()
def test_under_autocast_outputs_are_those_of_float32_up_to_its_rounding() -> None:
    model, batch = ready("llama")
    with attemper.temper(model, normalizer="entmax15"):
        exact = real_outputs(model, batch)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = real_outputs(model, batch)
    # What bfloat16 does to the same model under its own softmax.
    own = real_outputs(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        own_error = (real_outputs(model, batch) - own).abs().max()
    assert (rounded - exact).abs().max() < 3 * own_error


@torch.no_grad()
def test_sinks_of_a_model_take_the_maps_of_softmax_only() -> None:
    """gpt-oss hands learned sinks to its attention; sparse normalizers have no place for them."""
    model, batch = ready("gpt-oss")
    before = real_outputs(model, batch)
    for normalizer in ("softmax", "softmax_plus_one"):
        with attemper.temper(model, normalizer=normalizer):
            moved = (real_outputs(model, batch) - before).abs().max()
            mass = [head.mass for site in attemper.scan(model, [batch]).sites for head in site.heads]
        assert (moved < RTOL) == (normalizer == "softmax")
        assert all(m is not None and 0 < m < 1 for m in mass)
    with (
        attemper.temper(model, normalizer="sparsemax"),
        pytest.raises(
            InputError, match=r"has no sink.*a model that brings one \(gpt-oss\) takes forms of softmax only"
        ),
    ):
        model(**batch)
    assert torch.equal(real_outputs(model, batch), before)
