"""The type of a site's attention is known by its call, its module and its configuration."""

from __future__ import annotations

import pytest
import torch

import attemper
from tests.monitor.tiny_models import TEXT, TINY, inputs
from tests.sites.own_models import Own

tf = pytest.importorskip("transformers")
SMALL = TEXT | {"max_position_embeddings": 128, "pad_token_id": 0}


def types(model: torch.nn.Module, **batch: torch.Tensor) -> dict[str, list[str]]:
    """Type -> names of its sites."""
    found: dict[str, list[str]] = {}
    with torch.no_grad(), attemper.watch(model.eval()) as watch:
        model(**batch)
    for site in watch.run.sites:
        found.setdefault(site.attention, []).append(site.name)
    assert watch.failures == 0
    return found


EXPECTED = {
    "llama": {"full": 2}, "mistral": {"window": 2}, "gpt2": {"full": 2}, "gemma2": {"window": 1, "full": 1},
    "gpt-oss": {"window": 1, "sink": 1}, "bert": {"full": 2}, "t5": {"full": 4, "cross": 2},
}  # fmt: skip


@pytest.mark.quick("gemma2", "gpt-oss", "t5")
@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_types_of_transformers(name: str, expected: dict[str, int]) -> None:
    one = TINY[name]
    found = types(one.build(), **inputs(one.kind, "right"))
    assert {kind: len(sites) for kind, sites in found.items()} == expected


def test_multi_head_latent_attention() -> None:
    config = tf.DeepseekV3Config(
        **SMALL, num_key_value_heads=4, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
        first_k_dense_replace=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    found = types(tf.DeepseekV3ForCausalLM._from_config(config), input_ids=torch.randint(1, 100, (1, 20)))
    assert {kind: len(sites) for kind, sites in found.items()} == {"mla": 2}


def test_an_attention_of_ones_own_is_full() -> None:
    with torch.no_grad(), attemper.watch(model := Own().eval()) as watch:
        model(torch.randn(1, 8, 32))
    assert [site.attention for site in watch.run.sites] == ["full"]
