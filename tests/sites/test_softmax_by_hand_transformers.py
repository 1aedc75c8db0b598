"""Models of transformers that compute attention with code of their own: each seen exactly, or skipped by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper

pytest.importorskip("transformers")

import transformers as tf

from tests.monitor.tiny_models import eager_entropies, from_config, head_entropies, inputs
from tests.support.identical_training import assert_identical_training


def _falcon(implementation: str, **options: Any) -> tf.PreTrainedModel:
    config = tf.FalconConfig(
        vocab_size=101, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, ffn_hidden_size=64,
        attention_dropout=0.1, hidden_dropout=0.1, **options,
    )  # fmt: skip
    return from_config(tf.FalconForCausalLM, config, attn_implementation=implementation)


def _gptj() -> tf.PreTrainedModel:
    config = tf.GPTJConfig(
        vocab_size=101, n_positions=128, n_embd=48, n_layer=2, n_head=4, rotary_dim=8, n_inner=64, attn_pdrop=0.1,
        resid_pdrop=0.1, embd_pdrop=0.1,
    )  # fmt: skip
    return from_config(tf.GPTJForCausalLM, config)


def _bloom() -> tf.PreTrainedModel:
    config = tf.BloomConfig(
        vocab_size=101, hidden_size=48, n_layer=2, n_head=4, attention_dropout=0.1, hidden_dropout=0.1
    )
    return from_config(tf.BloomForCausalLM, config)


def _deberta() -> tf.PreTrainedModel:
    options: dict[str, Any] = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
    config = tf.DebertaV2Config(
        vocab_size=101, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        relative_attention=True, max_relative_positions=32, pos_att_type=["p2c", "c2p"], max_position_embeddings=64,
        **options,
    )  # fmt: skip
    return from_config(tf.DebertaV2Model, config)


GROUPED: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2}
HAND, SDPA = "softmax by hand", "F.scaled_dot_product_attention"
MODELS: dict[str, tuple[Callable[[], tf.PreTrainedModel], str, str]] = {
    "GPT-J": (_gptj, "GPT-J", HAND),
    "Falcon": (lambda: _falcon("eager"), "Falcon", HAND),
    "Falcon sdpa": (lambda: _falcon("sdpa"), "Falcon", SDPA),
    "Falcon alibi": (lambda: _falcon("eager", alibi=True), "Falcon with ALiBi", HAND),
    "Falcon alibi sdpa": (lambda: _falcon("sdpa", alibi=True), "Falcon with ALiBi", SDPA),
    "Falcon multi-head": (lambda: _falcon("eager", multi_query=False), "Falcon, multi-head", HAND),
    "Falcon grouped": (lambda: _falcon("eager", **GROUPED), "Falcon, grouped queries", HAND),
    "Falcon grouped sdpa": (lambda: _falcon("sdpa", **GROUPED), "Falcon, grouped queries", SDPA),
    "Bloom": (_bloom, "Bloom", HAND),
    "DeBERTa-v2": (_deberta, "DeBERTa-v2", HAND),
}


def sharpened(model: tf.PreTrainedModel) -> tf.PreTrainedModel:
    """Every projection enlarged: rows of every sharpness."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj", "k_proj", "query", "key")):
            parameter.data.mul_(8)
    return model.eval()


def _expected(model: tf.PreTrainedModel, batch: dict[str, Tensor]) -> list[Tensor]:
    """Mean entropies per head of both layers, by the model's own weights or from its projections."""
    implementation = model.config._attn_implementation
    if implementation == "sdpa" and getattr(model.config, "alibi", False):
        return _falcon_with_alibi(model, batch)
    # Falcon's masks are made for SDPA where it is set to it: its weights are right only where it is not.
    model.config._attn_implementation = "eager"
    expected = eager_entropies(model, batch)["attentions"]
    model.config._attn_implementation = implementation
    return expected


def _falcon_with_alibi(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """From queries, keys and slopes in float64: transformers' eager Falcon adds its position bias twice."""
    fused: list[Tensor] = []
    hooks = [block.self_attention.query_key_value.register_forward_hook(lambda *call: fused.append(call[2]))
             for block in model.transformer.h]  # fmt: skip
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    mask = batch["attention_mask"]
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    places = (mask.cumsum(-1) - 1) * mask
    bias = slopes[:, None, None] * places[:, None, None, :].double()
    visible = mask[:, None, None, :].bool() & torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
    found = []
    for qkv in fused:
        heads = qkv.double().unflatten(-1, (-1, 12)).transpose(1, 2)
        scores = (heads[:, :4] @ heads[:, 4:5].transpose(-2, -1) + bias) / 12**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
        found.append(head_entropies(weights + (weights.sum(-1, keepdim=True) == 0), mask))
    return found


def measured(scan: attemper.Scan) -> list[Tensor]:
    return [torch.tensor([head.entropy_nats for head in site.heads], dtype=torch.float64) for site in scan.sites]


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick("left")
@pytest.mark.turns(2)
def test_entropies_are_those_of_the_weights_that_the_model_returns(
    name: str, padding: str | None, seen: Callable[..., None]
) -> None:
    build, title, way = MODELS[name]
    model, batch = sharpened(build()), inputs("decoder", padding)
    expected = _expected(model, batch)
    with torch.no_grad():
        before = model(**batch)[0]
        with attemper.watch(model) as watch:
            during = model(**batch)[0]
    assert torch.equal(before, during)
    table = watch.table()
    assert (watch.failures, table.skipped) == (0, ())
    found = measured(table)
    assert len(found) == len(expected) == 2
    error = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    assert max(float(part.max() - part.min()) for part in expected) > 0.01
    print(f"{name}, padding {padding}: {error:.1e} nats")
    assert error < 2e-5
    seen("transformers", title, way, error_nats=error)


@pytest.mark.parametrize("name", ["GPT-J", "GPT-J, half", "Falcon", "Falcon alibi", "Bloom", "DeBERTa-v2"])
def test_masked_keys_do_not_count_as_visible(name: str) -> None:
    """Nor where a mask of half precision is added to scores of float32."""
    model, batch = sharpened(MODELS[name.removesuffix(", half")][0]()), inputs("decoder", "right")
    model = model.half() if name.endswith("half") else model
    with attemper.watch(model) as watch, torch.no_grad():
        model(**batch)
    lengths = batch["attention_mask"].sum(-1)
    causal = name != "DeBERTa-v2"
    counts = [torch.arange(1, n + 1) if causal else torch.full((n,), n) for n in lengths.tolist()]
    expected = float(torch.cat(counts).double().mean())
    for site in watch.table().sites:
        visible = watch.table().row_statistics(site.name).per_head()["visible_keys"].mean
        assert visible.tolist() == pytest.approx([expected] * 4, abs=1e-9)
        assert all(head.rows == int(lengths.sum()) for head in site.heads)


@pytest.mark.parametrize("names", [(), (0,)])
def test_longformer_is_skipped_by_name_in_every_layer(names: tuple[int, ...], seen: Callable[..., None]) -> None:
    config = tf.LongformerConfig(
        vocab_size=101, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        attention_window=8, max_position_embeddings=64, pad_token_id=1,
    )  # fmt: skip
    model = from_config(tf.LongformerModel, config).eval()
    batch = inputs("encoder", "right")
    batch["global_attention_mask"] = torch.zeros_like(batch["input_ids"])
    batch["global_attention_mask"][:, list(names)] = 1
    with attemper.watch(model) as watch, torch.no_grad():
        model(**batch)
    assert watch.failures == 0
    how = "narrow" if names else "pad"
    reason = f"its weights are changed between the softmax and the values \\({how}\\)"
    lines = [f"encoder.layer.{layer}.attention.self: {reason}" for layer in (0, 1)]
    with pytest.raises(attemper.InputError, match="(?s)saw no attention.*" + ".*".join(lines)):
        watch.table()
    seen("transformers", "Longformer", HAND, skipped="its weights are cut into chunks before they meet the values")


@pytest.mark.parametrize("name", ["GPT-J", "Falcon", "Falcon sdpa", "Falcon alibi", "Bloom", "DeBERTa-v2"])
@pytest.mark.quick("GPT-J", "DeBERTa")
def test_training_with_dropout_is_bit_identical(name: str, steps: int, seen: Callable[..., None]) -> None:
    build, title, way = MODELS[name]

    def made() -> tuple[tf.PreTrainedModel, Callable[[Any], Tensor]]:
        model, batch = build(), inputs("decoder", "right", tokens=12, batch=2)
        return model, lambda root: root(**batch)[0].square().mean()

    assert_identical_training(made, steps)
    seen("transformers", title, way, identical_steps=steps)
