"""Encoder and decoder of other lengths."""

from __future__ import annotations

from typing import Any

import torch
from transformers import T5Config, T5Model

import attemper


def test_keys_of_another_length_than_queries_are_compared():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 60}
    model = T5Model(T5Config(**sizes)).eval()
    batch = {"input_ids": torch.randint(60, (2, 70)), "decoder_input_ids": torch.randint(60, (2, 60))}
    a = attemper.fingerprint(model, [batch])
    with torch.no_grad():
        model.encoder.final_layer_norm.weight.fill_(2.0)
    b = attemper.fingerprint(model, [batch])
    for found in (attemper.explain(a, b), attemper.explain(b, a)):
        assert found.is_fault
        assert "EncDecAttention" in str(found.site), found.message
        assert "other weights" not in found.message
