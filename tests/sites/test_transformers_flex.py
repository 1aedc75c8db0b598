"""transformers' flex_attention beside what the table of models shows: what it refuses, masks by rule, compilation."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import attemper

tf = pytest.importorskip("transformers")

import transformers.integrations.flex_attention as integration  # noqa: E402
import transformers.masking_utils as masking_utils  # noqa: E402

from attemper.sites.transformers_arguments import block_mask_of, reader_of  # noqa: E402
from tests.monitor.tiny_models import (  # noqa: E402
    TINY,
    Tiny,
    eager_entropies,
    head_entropies,
    inputs,
    largest_error,
    sharpened,
    watched_scan,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without", "ignore:`torch.jit.script_method`", "ignore:_compile flag on"
)


@pytest.fixture
def eager_flex() -> Any:
    with torch.compiler.set_stance("force_eager"):
        yield


def test_transformers_itself_has_no_flex_attention_for_gpt2(seen: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="does not support an attention implementation through torch's flex_attention"):
        TINY["gpt2"].build().set_attn_implementation("flex_attention")
    seen("transformers", "GPT-2", "registry, flex", skipped="transformers has no flex_attention for it")


def without_attention_dropout(tiny: Tiny) -> Tiny:
    """A model with every dropout but that of weights, which transformers' flex_attention has not."""
    config = copy.deepcopy(tiny.config)
    for name in ("dropout", "activation_dropout", "hidden_dropout_prob", "hidden_dropout"):
        if isinstance(getattr(config, name, None), (int, float)):
            setattr(config, name, 0.1)
    for name in ("attention_dropout", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return dataclasses.replace(tiny, config=config)


@pytest.mark.parametrize("name", [name for name in TINY if name not in ("gpt2", "gpt-oss", "t5")])
@pytest.mark.quick("gemma2")
def test_forward_passes_in_train_mode_are_bit_identical_under_flex_attention(name: str, eager_flex: None) -> None:
    """All that can be held: there is no backward pass on a CPU."""
    tiny = without_attention_dropout(TINY[name])
    model, batch = sharpened(tiny.build()).train(), inputs(tiny.kind, "right", tokens=12)
    model.set_attn_implementation("flex_attention")

    def passes() -> list[Tensor]:
        torch.manual_seed(5)
        found = [model(**batch)[0] for _ in range(5)]
        return [*found, torch.get_rng_state()]

    with torch.no_grad():
        plain = passes()
        with attemper.watch(model, every=2, rows=3) as watch:
            during = passes()
    assert (watch.sampled, watch.failures) == (3, 0)
    assert {site.mode for site in watch.table().sites} == {"train"}
    assert all(torch.equal(one, other) for one, other in zip(plain, during, strict=True))
    if name in ("bert", "vit", "whisper"):
        assert not torch.equal(plain[0], plain[1]), "no dropout: this shows nothing about random numbers"


def test_the_position_bias_of_t5_counts_under_flex_attention(eager_flex: None, seen: Callable[..., None]) -> None:
    model = sharpened(TINY["t5"].build())
    batch = inputs("encoder-decoder", None, batch=1)
    expected = eager_entropies(model, batch)
    model.set_attn_implementation("flex_attention")
    worst = largest_error(watched_scan(model, batch), "encoder-decoder", expected)
    assert worst < 2e-5
    seen("transformers", "T5", "registry, flex (one row)", error_nats=worst)


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_sinks_count_under_flex_attention(
    padding: str | None, monkeypatch: pytest.MonkeyPatch, eager_flex: None, seen: Callable[..., None]
) -> None:
    def stand_in(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """What flex computes where it can: a mask by rule, then the sink as one more key."""
        assert s_aux is not None
        assert scaling is not None
        visible = flex.create_mask(attention_mask.mask_mod, query.shape[0], 1, query.shape[2], key.shape[2], "cpu")
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, -torch.inf)
        sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return (weights @ value).transpose(1, 2).contiguous(), None

    mapping = dict(tf.AttentionInterface._global_mapping) | {"flex_attention": stand_in}
    monkeypatch.setattr(tf.AttentionInterface, "_global_mapping", mapping)
    monkeypatch.setattr(integration, "flex_attention_forward", stand_in)
    model, batch = sharpened(TINY["gpt-oss"].build()), inputs("decoder", padding)
    expected = eager_entropies(model, batch)
    model.set_attn_implementation("flex_attention")
    worst = largest_error(watched_scan(model, batch), "decoder", expected)
    assert worst < 2e-5
    seen("transformers", "gpt-oss", "registry, flex (stand-in)", error_nats=worst)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.quick("mistral")
def test_packed_documents_do_not_see_each_other(name: str, implementation: str, eager_flex: None) -> None:
    positions = torch.cat([torch.arange(length) for length in (17, 8, 15)])[None]
    batch = {"input_ids": torch.randint(3, 101, (1, 40)), "position_ids": positions, "use_cache": False}
    model = sharpened(TINY[name].build())
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions
    assert float(weights[0][0, :, 20, :17].abs().max()) == 0.0
    model.set_attn_implementation(implementation)
    expected = {"attentions": [head_entropies(layer, None) for layer in weights]}
    assert largest_error(watched_scan(model, batch), "decoder", expected) < 2e-5


def reading(mask: Any, query: Tensor, key: Tensor, **call: Any) -> Tensor:
    """Entropies that the flex convention reads, [B, H, Q]."""
    module: Any = nn.Module()
    read = reader_of(integration.flex_attention_forward, "flex_attention")
    call_ = read(module, query, key, mask, **call)
    options = call_.options
    return attemper.attention_statistics(
        call_.query, call_.key, call_.mask, scale=options.scale, softcap=options.softcap,
        enable_gqa=options.enable_gqa, is_causal=options.is_causal, sink_logits=options.sink_logits,
    ).entropy  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_tensor_mask_is_added_and_only_its_first_head_is_read(dtype: torch.dtype, eager_flex: None) -> None:
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8)
    mask = torch.randn(2, 4, 6, 12).to(dtype)
    module: Any = nn.Module().eval()
    output = integration.flex_attention_forward(module, query, key, key, mask, scaling=0.5, softcap=2.0)[0]
    scores = 2.0 * torch.tanh(query @ key.repeat_interleave(2, 1).transpose(2, 3) * 0.5 / 2.0)
    weights = (scores + mask[:, :1, :, :9]).softmax(-1)
    expected = (weights @ key.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    entropy = -(weights * weights.log()).sum(-1)
    found = reading(mask, query, key, scaling=0.5, softcap=2.0)
    torch.testing.assert_close(found, entropy, rtol=0, atol=1e-5)


def test_entropies_in_bfloat16_do_not_come_from_a_rounded_log_sum_exp() -> None:
    query, key = ((3 * torch.randn(2, 4, 30, 8)).bfloat16() for _ in range(2))
    scores = query.double() @ key.double().mT * 0.5
    weights = scores.softmax(-1)
    expected = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    found = reading(None, query, key, scaling=0.5)
    assert float((found - expected).abs().max()) < 2e-5
    from_lse = scores.logsumexp(-1).bfloat16().double() - (weights * scores).sum(-1)
    assert float((from_lse - expected).abs().max()) > 0.01


RULES: dict[str, Callable[..., Tensor]] = {
    "by position": lambda b, h, i, j: i >= j,
    "by head": lambda b, h, i, j: i >= j + h,
    "by sample": lambda b, h, i, j: j <= b + 1,
    "by a table of both": lambda b, h, i, j: (TABLE[b, h] > 0) & (i >= j) | (j == 0),
}
TABLE = torch.arange(12).reshape(3, 4) % 2


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_asked_for_every_head_and_sample_that_it_tells_apart(name: str) -> None:
    query = torch.randn(3, 4, 10, 8)
    block_mask = flex.create_block_mask(RULES[name], 3, 4, 10, 10, device="cpu")
    found = block_mask_of(nn.Identity(), block_mask, query, query)
    assert torch.equal(found.expand(3, 4, 10, 10), flex.create_mask(RULES[name], 3, 4, 10, 10, "cpu"))
    if name == "by position":
        assert found.shape == (1, 1, 10, 10)


def test_a_block_mask_without_a_rule_is_skipped_by_name() -> None:
    count, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    block_mask = flex.BlockMask.from_kv_blocks(count, indices, BLOCK_SIZE=8)
    query = torch.randn(1, 2, 16, 8)
    with pytest.raises(attemper.InputError, match="made of blocks without a rule"):
        block_mask_of(nn.Identity(), block_mask, query, query)


def test_a_compiled_kernel_is_watched_without_a_graph_more_and_never_by_its_eager_twin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    # Only the kernel is compiled here: making its mask would take seconds.
    plain: Any = getattr(masking_utils, "create_block_mask")  # noqa: B009
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **given: plain(**given | {"_compile": False}))
    counter = CompileCounterWithBackend("eager")
    kernel: Any = object.__new__(integration.WrappedFlexAttention)
    kernel._is_flex_compiled, kernel.training = True, False
    kernel._compiled_flex_attention = torch.compile(flex.flex_attention, backend=counter)
    monkeypatch.setattr(integration.WrappedFlexAttention, "_instance", kernel)
    model, batch = sharpened(TINY["llama"].build()), inputs("decoder", "left")
    expected = eager_entropies(model, batch)
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        before = model(**batch).logits
        graphs = counter.frame_count
        assert graphs > 0
        with attemper.watch(model) as watch:
            during = model(**batch).logits
    assert torch.equal(before, during)
    assert counter.frame_count == graphs
    assert largest_error(watch.table(), "decoder", expected) < 2e-5


def test_what_transformers_compiles_during_a_watch_is_flex_attention_itself(
    monkeypatch: pytest.MonkeyPatch, eager_flex: None
) -> None:
    monkeypatch.setattr(integration.WrappedFlexAttention, "_instance", None)
    compiled: list[Any] = []
    plain = torch.compile

    def compile_(function: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(function)
        return plain(function, *args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile_)
    model = sharpened(TINY["llama"].build())
    model.set_attn_implementation("flex_attention")
    with torch.no_grad(), attemper.watch(model):
        model(**inputs("decoder", None))
    kernels = [function for function in compiled if function.__name__ == "flex_attention"]
    assert kernels
    assert all(kernel is flex.flex_attention for kernel in kernels)
