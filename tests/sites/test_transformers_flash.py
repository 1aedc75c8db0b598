"""transformers' flash attention, with stand-ins of flash_attn beneath it: padding, windows, packing, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper

tf = pytest.importorskip("transformers")

import transformers.integrations.flash_attention as integration  # noqa: E402
import transformers.modeling_flash_attention_utils as flash_utils  # noqa: E402

from attemper.sites.transformers_arguments import reader_of  # noqa: E402
from tests.monitor.tiny_models import (  # noqa: E402
    CACHE,
    TINY,
    eager_entropies,
    head_entropies,
    inputs,
    largest_error,
    sharpened,
    watched_scan,
)
from tests.sites import flash_stand_in  # noqa: E402


@pytest.fixture(autouse=True)
def _flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers finds flash_attn, and does not ask for half precision."""
    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", flash_stand_in.lazy_import(flash_utils))
    monkeypatch.setattr(integration, "get_target_dtype", lambda *_: None)


def with_flash(model: Any, name: str = "flash_attention_2") -> Any:
    """``set_attn_implementation`` asks for a GPU and the package; the models read nothing but this."""
    for part in model.modules():
        if hasattr(part, "config"):
            vars(part.config)["_attn_implementation_internal"] = name  # the configuration of gpt-oss refuses it
    return model


def expected_and_scan(model: Any, batch: dict[str, Tensor]) -> tuple[dict[str, list[Tensor]], attemper.Scan]:
    expected = eager_entropies(model, batch)
    with_flash(model)
    scan = watched_scan(model, batch)
    assert scan.skipped == ()
    return expected, scan


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", [name for name in TINY if name != "t5"])
@pytest.mark.quick("left", "llama")
@pytest.mark.turns(2)
def test_flash_attention_is_read_with_padding_windows_softcap_and_sinks(
    name: str, padding: str | None, seen: Callable[..., None]
) -> None:
    tiny = TINY[name]
    expected, scan = expected_and_scan(sharpened(tiny.build()), inputs(tiny.kind, padding))
    worst = largest_error(scan, tiny.kind, expected)
    assert worst < 2e-5
    seen("transformers", tiny.title, "registry, flash (stand-in)", error_nats=worst)


def packed() -> dict[str, Tensor]:
    """Documents of 17, 8 and 15 tokens in one row."""
    positions = torch.cat([torch.arange(length) for length in (17, 8, 15)])[None]
    return {"input_ids": torch.randint(3, 101, (1, 40)), "position_ids": positions, "use_cache": False}  # type: ignore[dict-item]


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2"])
@pytest.mark.quick("mistral")
def test_packed_documents_do_not_see_each_other(name: str, given: str) -> None:
    model, batch = sharpened(TINY[name].build()), packed()
    with torch.no_grad():
        weights = model(**batch, output_attentions=True).attentions
    starts = torch.tensor([0, 17, 25, 40], dtype=torch.int32)
    assert float(weights[0][0, :, 20, :17].abs().max()) == 0.0
    if given == "cu_seq_lens":
        batch |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 17, "max_length_k": 17}  # type: ignore[dict-item]
    scan = watched_scan(with_flash(model), batch)
    assert scan.skipped == ()
    assert largest_error(scan, "decoder", {"attentions": [head_entropies(layer, None) for layer in weights]}) < 2e-5
    with torch.no_grad(), attemper.watch(model, rows=5) as watch:
        model(**batch)
    assert {site.heads[0].rows for site in watch.table().sites} == {5}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.quick("True-llama", "False-mistral", "True-gpt-oss")
def test_decoding_and_a_prompt_in_two_parts_are_aligned_to_the_last_key(name: str, padded: bool) -> None:
    model = sharpened(TINY[name].build())
    batch = inputs("decoder", "left" if padded else None)
    parts = [slice(0, 20), slice(20, 39), slice(39, 40)]

    def run(watched: bool) -> list[Any]:
        cache, found = tf.DynamicCache(config=model.config), []
        for part in parts:
            mask = batch["attention_mask"][:, : part.stop]
            call: dict[str, Any] = {CACHE: cache, "attention_mask": mask}
            with torch.no_grad():
                if watched:
                    with attemper.watch(model) as watch:
                        model(batch["input_ids"][:, part], **call)
                    found.append(watch.table())
                else:
                    weights = model(batch["input_ids"][:, part], output_attentions=True, **call).attentions
                    found.append([head_entropies(layer, mask[:, part]) for layer in weights])
        return found

    expected = run(watched=False)
    with_flash(model)
    for scan, layers in zip(run(watched=True), expected, strict=True):
        assert scan.skipped == ()
        assert largest_error(scan, "decoder", {"attentions": layers}) < 2e-5


STARTS = {name: torch.tensor([0, 40]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"block_table": torch.zeros(1, 1)}, "called with block_table=, which is not known here"),
        ({"cache": object()}, "called with cache=, which is not known here"),
        ({"attention_mask": torch.ones(1, 1, 40, 40)}, "not the 2-D padding mask"),
        ({"batch": 2, **STARTS, "max_length_q": 40, "max_length_k": 40}, "packed in a way that is not known here"),
        ({"top_left": True}, "masks from the top left"),  # in old versions
    ],
)
def test_what_flash_attention_is_told_beside_that_makes_the_site_skipped(
    call: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = torch.nn.Module()
    module.is_causal = True
    monkeypatch.setattr(integration, "_use_top_left_mask", "top_left" in call)
    query = torch.randn(call.get("batch", 1), 4, 40, 8)
    options = {name: value for name, value in call.items() if name not in ("batch", "top_left", "attention_mask")}
    read = reader_of(integration.flash_attention_forward, "flash_attention_2")
    with pytest.raises(attemper.InputError, match=reason):
        read(module, query, query, call.get("attention_mask"), scaling=1.0, **options)


def test_a_kernel_of_the_hub_is_read_by_the_function_that_it_runs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "kernels-community/flash-attn3"
    mapping = dict(tf.AttentionInterface._global_mapping) | {name: integration.flash_attention_forward}
    monkeypatch.setattr(tf.AttentionInterface, "_global_mapping", mapping)
    masks = tf.AttentionMaskInterface._global_mapping
    monkeypatch.setattr(tf.AttentionMaskInterface, "_global_mapping", dict(masks) | {name: masks["flash_attention_2"]})
    model, batch = sharpened(TINY["mistral"].build()), inputs("decoder", "left")
    expected = eager_entropies(model, batch)
    assert largest_error(watched_scan(with_flash(model, name), batch), "decoder", expected) < 2e-5


@pytest.mark.parametrize("name", ["kernels-community/flash-mla", "mine", "my-flash"])
def test_a_function_that_somebody_registered_is_skipped_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2).contiguous(), None

    mapping = dict(tf.AttentionInterface._global_mapping) | {name: mine}
    monkeypatch.setattr(tf.AttentionInterface, "_global_mapping", mapping)
    model, batch = with_flash(sharpened(TINY["llama"].build()), name), {"input_ids": torch.randint(3, 101, (1, 9))}
    with attemper.watch(model) as watch:
        model(**batch)
    with pytest.raises(attemper.InputError, match=f"self_attn: how '{name}' masks is not known here; put attemper.tap"):
        watch.table()
