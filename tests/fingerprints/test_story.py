"""A Llama with YaRN in an engine that forgot its magnitude: seen, named, mended."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attemper


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    }
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=200, max_position_embeddings=512, rope_parameters=yarn, initializer_range=0.1, **sizes)
    ).eval()


def test_a_llama_whose_yarn_lost_its_magnitude_is_named_and_mended():
    ids = torch.randint(3, 200, (2, 200), generator=torch.Generator().manual_seed(0))
    right, engine = llama(), llama()
    length = 1 + 0.1 * math.log(8)
    engine.model.rotary_emb.attention_scaling = 1.0
    a = attemper.fingerprint(right, [ids])
    found = attemper.explain(a, attemper.fingerprint(engine, [ids]))
    assert (found.kind, found.site) == ("scale", "model.layers.0.self_attn")
    assert found.value == pytest.approx(length**-2, rel=1e-5)
    assert "YaRN" in found.message
    for layer in engine.model.layers:
        layer.self_attn.scaling /= found.value
    mended = attemper.explain(a, attemper.fingerprint(engine, [ids]))
    assert mended.kind == "equivalent", mended.message
    assert not mended.is_fault
