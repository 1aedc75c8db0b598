"""The adapter itself: what it accepts from transformers' models, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

tf = pytest.importorskip("transformers")

from transformers.integrations import sdpa_attention  # noqa: E402

import attemper.integrations.transformers as integration  # noqa: E402
from attemper.sites.observation import UnsupportedCallError  # noqa: E402
from attemper.sites.transformers import attention_forward, register  # noqa: E402
from tests.monitor.tiny_models import TINY, inputs, sharpened  # noqa: E402


class Module(nn.Module):
    is_causal = False
    num_key_value_groups = 2


def tensors(keys: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 5, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)


def test_both_the_attention_and_its_mask_are_registered() -> None:
    register()
    assert integration.NAME == "attemper"
    assert tf.AttentionInterface()["attemper"] is attention_forward
    assert "attemper" in tf.AttentionMaskInterface()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.turns(3)
def test_a_model_set_to_attemper_gives_the_outputs_of_the_attention_it_stands_for(name: str, padding: str) -> None:
    tiny = TINY[name]
    model = sharpened(tiny.build())
    batch = inputs(tiny.kind, padding)
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    with torch.no_grad():
        model.set_attn_implementation("eager" if name in ("gemma2", "gpt-oss") else "sdpa")
        expected = model(**batch)[0]
        model.set_attn_implementation("attemper")
        found = model(**batch)[0]
    real = torch.ones(expected.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
    assert torch.equal(found[real], expected[real])


def test_gradients_through_attemper_are_those_of_eager() -> None:
    model = sharpened(TINY["gpt-oss"].build(), factor=2.0)
    batch = inputs("decoder", "right")

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(**batch).logits
        logits[batch["attention_mask"].bool()].float().pow(2).mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    model.set_attn_implementation("attemper")
    for ours, theirs in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_an_unknown_keyword_is_refused_and_never_ignored_unless_it_is_none() -> None:
    with pytest.raises(UnsupportedCallError, match="called with cu_seq_lens_q, indices="):
        attention_forward(Module(), *tensors(), None, indices=torch.zeros(1), cu_seq_lens_q=torch.zeros(2))
    output, weights = attention_forward(Module(), *tensors(), None, indices=None)
    assert (output.shape, weights) == ((2, 5, 4, 8), None)


@pytest.mark.parametrize("mask", [torch.ones(2, 5), torch.ones(2, 5, 5), SimpleNamespace()])
def test_a_mask_that_is_not_four_dimensional_is_refused(mask: Any) -> None:
    with pytest.raises(UnsupportedCallError, match=r"its attention_mask is .* where"):
        attention_forward(Module(), *tensors(), mask)


def test_a_mask_longer_than_the_keys_is_cut_to_them() -> None:
    query, key, value = tensors()
    mask = torch.rand(2, 1, 5, 9) > 0.3
    mask[..., 0] = True
    cut = attention_forward(Module(), query, key, value, mask[..., :5])[0]
    assert torch.equal(attention_forward(Module(), query, key, value, mask)[0], cut)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_position_bias_and_mask_both_count(kind: str) -> None:
    if not hasattr(sdpa_attention, "create_position_bias_mask"):
        pytest.skip("no model of this transformers gives a position bias to the registry, whose SDPA takes none")
    query, key, value = tensors()
    visible = torch.rand(2, 1, 5, 5) > 0.3
    visible[..., 0] = True
    bias = torch.randn(1, 4, 5, 5)
    mask = visible if kind == "bool" else torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    found = attention_forward(Module(), query, key, value, mask, position_bias=bias)[0]
    scores = query @ key.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5 + bias
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    torch.testing.assert_close(found, (weights @ value.repeat_interleave(2, 1)).transpose(1, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("causal", "queries", "keys", "hidden"),
    [(True, 1, 7, False), (None, 5, 5, True)],
    ids=["one query sees every key, as in decoding", "a module that says nothing is causal, like sdpa"],
)
def test_without_a_mask_causality_is_that_of_sdpa(causal: bool | None, queries: int, keys: int, hidden: bool) -> None:
    query, key, value = tensors(keys)
    module: Any = nn.Module()
    module.num_key_value_groups = 2
    if causal is not None:
        module.is_causal = causal
    found = attention_forward(module, query[:, :, :queries], key, value, None)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, :queries], key, value, is_causal=hidden, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-6)


def test_dropout_outside_a_scan_is_applied() -> None:
    query, key, value = tensors()
    torch.manual_seed(0)
    dropped = attention_forward(Module(), query, key, value, None, dropout=0.5)[0]
    assert not torch.equal(dropped, attention_forward(Module(), query, key, value, None)[0])
