"""Faults of patched models are named, harmless pairs are not blamed, and what does not belong together is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from transformers import T5Config, T5Model

import attemper
from attemper.errors import InputError
from tests.support.engine_faults import FAULTS, Fault
from tests.support.engine_models import tiny, tokens
from tests.support.engine_pairs import HARMLESS, clean, double_faults, harmless, is_same, outcome, places

SHORT = {
    "scale": "llama",
    "softcap": "gemma2",
    "logn": "gpt2",
    "key_shift": "llama",
    "distance_bias": "bert",
    "window": "mistral",
    "causality": "gpt2",
    "padding": "bert",
    "sink": "gpt_oss",
    "rotary": "llama",
    "head_order": "qwen3",
    "grouping": "llama",
    "key_rounding": "llama",
    "bias": "gpt2",
    "weights": "bert",
    "values": "llama",
    "input": "llama",
    "swapped": "gpt2",
    "not_loaded": "gpt2",
    "transposed": "gpt2",
    "order_of_layers": "llama",
    "documents": "bert",
}
"""Kind -> the architecture on which it is tried by default; benchmarks/faults_named.py tries them all."""


@pytest.mark.quick(
    *("bfloat16-scale-of_the_call", "bfloat16-window-off", "bfloat16-rotary-base"),
    *("bfloat16-key_rounding", "float32-grouping", "bfloat16-values-one"),
)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.variant}".replace(" ", "_"))
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.turns(2)
def test_a_fault_is_named_at_its_site(fault: Fault, precision: str):
    names = [SHORT[fault.kind], "bert", "mistral", "gpt_oss"]
    own = "eager" if fault.kind == "grouping" else "sdpa"
    models = (tiny(name, dtype=getattr(torch, precision), kernel=own) for name in names)
    model = next(model for model in models if fault.fits(model) and next(places(fault, model), None))
    possible = list(places(fault, model))
    # The second where there is one: causes must be told from what follows downstream.
    sites = possible[:2][-1] if fault.shift == 0 and not fault.everywhere else possible[0]
    found = outcome(fault, model, fault.sizes[-1], sites, precision, own)
    assert found.named, str(found)
    assert found.valued is not False, str(found)
    assert found.extended is not False, str(found)
    assert found.headed is not False, found.found.extent
    assert found.found.is_fault


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize(
    ("architecture", "kind", "size", "heads"), [("gpt_oss", "scale", 1.05, "1"), ("bert", "values", 0.1, "3")]
)
def test_one_head_stands_out_where_rounding_of_its_site_is_as_large(architecture, kind, size, heads):
    fault = next(one for one in FAULTS if (one.kind, one.variant) == (kind, "one head"))
    found = outcome(fault, tiny(architecture, dtype=torch.bfloat16), size, [2], "bfloat16", "sdpa")
    assert found.named, str(found)
    assert found.valued is not False, str(found)
    assert found.found.extent == f"from site 3 of 4 on, heads {heads} of 4"


@pytest.mark.quick("padding")
@pytest.mark.parametrize("way", [*HARMLESS[:2], "padding side, other kernel", "batch split, bfloat16"])
def test_a_harmless_pair_is_not_blamed(way: str):
    pair = harmless(way, "llama", 0)
    assert pair is not None
    assert not is_same(*pair)
    found = attemper.explain(*pair)
    assert not found.is_fault, found.message
    assert found.value is None


def test_heads_are_compared_by_number_whatever_each_run_keeps():
    model = tiny("gpt2", layers=2)
    fault = next(one for one in FAULTS if one.variant == "one head")
    a = attemper.fingerprint(model.model, [tokens()], heads=[0, 1, 3])
    with fault.patch(model, [1], 1.3):
        b = attemper.fingerprint(model.model, [tokens()])
        other = attemper.fingerprint(model.model, [tokens()], heads=[2])
        swapped = attemper.fingerprint(model.model, [tokens()], heads=[1, 2])
    found = attemper.explain(a, b)
    assert (found.kind, found.value) == ("scale", pytest.approx(1.3, rel=1e-3))
    assert found.extent.endswith("heads 1 of 4")
    found = attemper.explain(a, swapped)  # head 1 alone is in both
    assert (found.kind, found.extent) == ("scale", "from site 2 of 2 on")
    with pytest.raises(InputError, match=r"no head that both keep: 0, 1, 3 in a, 2 in b: take both with the same head"):
        attemper.explain(a, other)


def test_groups_that_one_run_keeps_and_the_other_does_not_are_left_out():
    model = tiny("llama")
    a = clean("llama", False)
    fault = next(one for one in FAULTS if one.variant == "of queries" and one.kind == "head_order")
    with fault.patch(model, [0], 0.0):
        found = attemper.explain(a, attemper.fingerprint(model.model, [tokens()], heads=[0, 3]))
    assert (found.kind, found.site) == ("head_order", "layers.0.self_attn")
    assert "queries of heads 2, 0, 3, 1 of run a" in found.message
    eager = tiny("llama", kernel="eager")
    grouped = next(one for one in FAULTS if one.kind == "grouping")
    with grouped.patch(eager, [0], 0.0):
        found = attemper.explain(a, attemper.fingerprint(eager.model, [tokens()], heads=[2]))
    assert (found.kind, found.site) == ("grouping", "layers.0.self_attn")


def test_a_scale_that_was_mended_with_few_digits_is_equivalent():
    model = tiny("llama")
    a = clean("llama", False)
    for module in model.attentions:
        module.q_proj.weight.data *= 1.4591234
        module.scaling /= 1.4591
    found = attemper.explain(a, attemper.fingerprint(model.model, [tokens()]))
    assert found.kind == "equivalent", found.message
    assert "final scores agree to" in found.message
    for module in model.attentions:
        module.scaling *= 1.02
    found = attemper.explain(a, attemper.fingerprint(model.model, [tokens()]))
    assert found.is_fault, found.message


@pytest.mark.slow("of the benchmark alone")
def test_what_is_above_the_noise_is_measured_without_the_namer():
    fault = next(one for one in FAULTS if one.variant == "norm")
    model = tiny("llama", dtype=torch.bfloat16)
    small, large = (outcome(fault, model, size, [2], "bfloat16", "sdpa") for size in (1e-4, 0.5))
    assert (small.above_noise or 0) < 2 < (large.above_noise or 0)
    exact = outcome(next(one for one in FAULTS if one.kind == "window"), model, 32.0, [2], "bfloat16", "sdpa")
    assert exact.above_noise == float("inf")
    assert outcome(fault, tiny("llama"), 0.5, [2], "float32", "sdpa").above_noise is None


def test_two_faults_at_once_are_both_told(full_size: bool):
    said = list(islice(double_faults("llama", "float32"), None if full_size else 1))
    assert len(said) == (4 if full_size else 1)
    for first, second, found in said:
        assert found.kind == first, found.message
        assert second in [one.kind for one in found.also], found.message


def test_the_explanation_is_json_without_nan():
    fault = next(one for one in FAULTS if one.kind == "window")
    found = outcome(fault, tiny("mistral"), -1.0, [1], "float32", "sdpa").found
    document = json.loads(found.to_json())
    assert document["kind"] == "window"
    assert document["value"] == 23
    assert set(document) == {
        *("kind", "site", "stage", "extent", "value", "residual", "confidence", "also", "message", "advice")
    }
    assert str(found) == f"{document['message']}\nWhat to do: {document['advice']}"


def test_what_is_not_comparable_is_refused_by_what_differs():
    model = tiny("llama", layers=1)
    config: Any = model.model.config
    a = attemper.fingerprint(model.model, [tokens()])
    small = type(model.model)(type(config)(**{**config.to_dict(), "num_attention_heads": 2, "head_dim": 32})).eval()
    for other, batch, words in (
        (model.model, tokens(1), r"the tokens differ \(hash"),
        (model.model, tokens(0, 3), r"3 sequences \(tokens: 96, 96, 96\)"),
        (
            tiny("llama", layers=2).model,
            tokens(),
            r"a has 1 site of attention and b 2; layers\.1\.self_attn has no partner",
        ),
        (small, tokens(), r"site 0 \(layers\.0\.self_attn\) differs in its heads: 4 in a, 2 in b"),
    ):
        with pytest.raises(InputError, match=words):
            attemper.explain(a, attemper.fingerprint(other, [batch]))
    whole, reason = clean("llama", False), "its eager attention is given a bool mask"
    apart = replace(whole, sites=whole.sites[1:], skipped={"layers.0.self_attn": reason})
    with pytest.raises(InputError, match=rf"layers\.0\.self_attn has no partner.*\.0\.self_attn of b: {reason}"):
        attemper.explain(whole, apart)
    with pytest.raises(InputError, match="explain\\(b\\) must be a fingerprint"):
        attemper.explain(a, "b.safetensors")  # pyright: ignore[reportArgumentType]


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
