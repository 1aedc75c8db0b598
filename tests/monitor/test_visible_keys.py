"""Masks that are lost while a model trains ring in the next sample. Other lengths, padding and documents do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn

import attemper
from tests.monitor.tiny_models import GROUPED, T5, TEXT, TINY, from_config

Batch = dict[str, Any]
STEPS, AT = 8, 6
"""Steps of a run, and the one from which on a fault is there."""
MASKS = ("visible_keys", "leak")


class Written(nn.Module):
    """A causal model with a mask and names of its own, of which nothing declares what rows should see."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.qkv, self.causal = nn.Embedding(101, 32), nn.Linear(32, 96), True

    def mask(self, keep: Tensor) -> Tensor:
        shown = keep[:, None, None].expand(-1, 1, keep.shape[1], -1)
        return shown.tril() if self.causal else shown

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        query, key, value = self.qkv(self.embedding(tokens)).unflatten(-1, (12, 8)).transpose(1, 2).chunk(3, 1)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=self.mask(keep) | torch.eye(len(tokens[0])).bool()
        )


def llama(**changes: Any) -> Any:
    return from_config(tf.LlamaForCausalLM, tf.LlamaConfig(**GROUPED, **changes), attn_implementation="sdpa")


def ids(length: int = 32, rows: int = 2) -> Tensor:
    return torch.randint(1, 101, (rows, length))


def padded(length: int, real: list[int], *, left: bool = False) -> Batch:
    mask = torch.arange(length) < torch.tensor(real)[:, None]
    return {"input_ids": ids(length, len(real)), "attention_mask": (mask.flip(1) if left else mask).long()}


def packed(*lengths: int, **options: Any) -> Batch:
    positions = torch.cat([torch.arange(one) for one in lengths])[None]
    return {"input_ids": ids(sum(lengths), 1), "position_ids": positions, **options}


def watched(
    model: nn.Module, batches: Callable[[int], Batch], fault: Callable[[nn.Module], None] | None = None, **options: Any
) -> attemper.types.Watch:
    """A closed watch of a short training."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with attemper.watch(model.train(), **options) as watch:
        for step in range(STEPS):
            if fault is not None and step == AT:
                fault(model)
            given = batches(step)
            found = model(**given)
            found = found if isinstance(found, Tensor) else next(iter(found.values()))
            (found.float().square().mean() * 1e-3).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    return watch


def of_masks(watch: attemper.types.Watch) -> list[tuple[str, str, int | None]]:
    live = watch._recorder.judge.alarms
    assert list(live) == watch.run.alarms()
    return [(alarm.kind, alarm.site, alarm.since) for alarm in live if alarm.kind in MASKS]


# --- faults ---


def lose_causality(model: nn.Module) -> None:
    parts: Any = model.modules()
    for part in parts:
        if hasattr(part, "is_causal"):
            part.is_causal = False


def lose_window(model: Any) -> None:
    model.config.sliding_window = None


def lose_mask(model: nn.Module) -> None:
    """The layers get none, and attend as they are told: not causal."""
    lose_causality(model)
    lose_padding(model)


def lose_padding(model: nn.Module) -> None:
    def without(_: nn.Module, args: Any, kwargs: Batch) -> tuple[Any, Batch]:
        return args, kwargs | {"attention_mask": None}

    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.register_forward_pre_hook(without, with_kwargs=True)


def written_without_causality(model: Any) -> None:
    model.causal = False


def of_length(length: int) -> Callable[[int], Batch]:
    return lambda step: {"input_ids": ids(length)}


def written(step: int) -> Batch:
    return {"tokens": ids(), "keep": torch.ones(2, 32, dtype=torch.bool)}


FAULTS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Callable[[Any], None], float]] = {
    "causality": (llama, of_length(32), lose_causality, 15.5),
    "causality, in batches of other lengths": (llama, lambda step: {"input_ids": ids(22 + step)}, lose_causality, 13.5),
    "window": (TINY["mistral"].build, of_length(32), lose_window, 16.5 - (21 + 26 * 7) / 32),
    "mask": (llama, lambda step: padded(32, [32, 20]), lose_mask, float("nan")),
    "padding": (
        TINY["bert"].build, lambda step: padded(32, [32, 12 + step % 3]), lose_padding, float("nan"),
    ),
    "padding, on the left": (
        TINY["bert"].build, lambda step: padded(32, [32, 20], left=True), lose_padding, float("nan"),
    ),
    "what a model of one's own masks": (Written, written, written_without_causality, 15.5),
}  # fmt: skip


@pytest.mark.quick("in batches", "window", "on the left", "own masks")
@pytest.mark.parametrize("name", FAULTS)
def test_a_mask_that_is_lost_rings_in_the_next_sample(name: str):
    model, batches, fault, keys = FAULTS[name]
    torch.manual_seed(0)
    watch = watched(model(), batches, fault)
    found = of_masks(watch)
    assert found, watch.history("visible_keys")
    assert {(kind, since) for kind, _, since in found} == {("visible_keys", AT)}
    assert {site for _, site, _ in found} == {site.name for site in watch.table().sites}
    alarm = next(one for one in watch.alarms() if one.kind == "visible_keys")
    assert alarm.head is None
    assert alarm.severity == "warning"
    assert alarm.value is not None
    if keys == keys:
        assert alarm.value == pytest.approx(keys, rel=1e-4)
        assert f"{keys:+.4g} against what they should" in alarm.message


def test_keys_that_are_hidden_ring_where_more_are_declared():
    model = TINY["mistral"].build()

    def narrow(_: Any) -> None:
        model.config.sliding_window = 4

    watch = watched(model, of_length(32), narrow)
    assert {since for _, _, since in of_masks(watch)} == {AT}
    assert "rows see 3.812 keys in the mean, -2.531 against what they should" in watch.alarms()[-1].message


@pytest.mark.parametrize("cache", [True, False])
def test_documents_that_start_anew_ring_where_they_see_one_another(cache: bool):
    """transformers reads positions that start anew only where it makes no cache."""
    watch = watched(llama(), lambda step: packed(24, 24, 24, 28, **({} if cache else {"use_cache": False})))
    found = of_masks(watch)
    assert found == ([("leak", f"model.layers.{layer}.self_attn", 0) for layer in range(2)] if cache else [])
    head = watch.table().sites[0].heads[0]
    assert head.expected_keys == pytest.approx((3 * 24 * 12.5 + 28 * 14.5) / 100)
    assert head.expected_keys is not None
    assert head.leaked_keys == pytest.approx(50.5 - head.expected_keys if cache else 0)


def test_documents_that_are_lost_ring_as_a_leak_and_not_as_other_keys_too():
    def batches(step: int) -> Batch:
        return packed(10, 12, 10, use_cache=step >= AT)

    assert {(kind, since) for kind, _, since in of_masks(watched(llama(), batches))} == {("leak", AT)}


# --- health ---


def bart() -> Any:
    config = tf.BartConfig(
        vocab_size=101, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128,
    )  # fmt: skip
    return from_config(tf.BartModel, config, attn_implementation="sdpa")


def llama4() -> Any:
    config = tf.Llama4TextConfig(
        **GROUPED, intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    return from_config(tf.Llama4ForCausalLM, config, attn_implementation="sdpa")


def some(step: int, most: int = 32) -> list[int]:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, most + 1, (3,), generator=generator).tolist()


def prefixed(step: int) -> Batch:
    """A mask of the loop's own: the first tokens see one another."""
    length, prefix = 24 + 4 * (step % 3), 4 + step
    places = torch.arange(length)
    shown = (places[None] <= places[:, None]) | (places[None] < prefix)
    return {"input_ids": ids(length), "attention_mask": shown.expand(2, 1, -1, -1)}


def two_sided(step: int) -> Batch:
    decoder = padded(20, some(step, 20))
    return {
        **padded(32, some(step + 50)),
        "decoder_input_ids": decoder["input_ids"],
        "decoder_attention_mask": decoder["attention_mask"],
    }


def kept(step: int) -> Batch:
    lengths = some(step)
    return {"tokens": ids(32, 3), "keep": torch.arange(32) < torch.tensor(lengths)[:, None]}


HEALTHY: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "lengths": (llama, lambda step: {"input_ids": ids(8 + 5 * (step % 4), 1 + step % 3)}),
    "right padding": (llama, lambda step: padded(32, some(step))),
    "left padding": (llama, lambda step: padded(32, some(step), left=True)),
    "packing": (llama, lambda step: packed(*some(step), use_cache=False)),
    "packing by numbers": (
        llama,
        lambda step: {"input_ids": ids(12), "attention_mask": torch.ones(2, 12, dtype=torch.int64)},
    ),
    "window": (TINY["mistral"].build, lambda step: padded(32, some(step), left=step % 2 == 0)),
    "windows in some layers": (TINY["gemma2"].build, lambda step: padded(32, some(step))),
    "packed windows": (TINY["mistral"].build, lambda step: packed(*some(step), use_cache=False)),
    "chunks": (llama4, lambda step: padded(32, some(step), left=step % 2 == 0)),
    "encoder": (TINY["bert"].build, lambda step: padded(32, some(step))),
    "encoder with a decoder": (bart, two_sided),
    "encoder with a decoder by hand": (
        lambda: from_config(tf.T5Model, tf.T5Config(**T5)), two_sided,
    ),
    "prefix": (llama, prefixed),
    "of one's own": (Written, kept),
    "checkpointing": (lambda: _checkpointed(llama()), lambda step: padded(32, some(step))),
    "GPT-2": (TINY["gpt2"].build, lambda step: padded(32, some(step))),
}  # fmt: skip


def _checkpointed(model: Any) -> Any:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.quick("left padding", "packing]", "window]", "decoder]", "own")
def test_batches_of_other_lengths_padding_and_documents_do_not_ring(name: str):
    torch.manual_seed(0)
    model, batches = HEALTHY[name]
    assert of_masks(watched(model(), batches)) == []


@pytest.mark.parametrize("rows", [8, None])
def test_sampled_rows_are_compared_with_what_they_should_see(rows: int | None):
    watch = watched(llama(), lambda step: {"input_ids": ids(*some(step)[:2])}, lose_causality, rows=rows)
    assert {since for _, _, since in of_masks(watch)} == {AT}


def test_decoding_with_a_cache_does_not_ring():
    model = llama().eval()
    with attemper.watch(model) as watch:
        for step in range(3):
            model.generate(**padded(12, [12, 7 + step], left=True), max_new_tokens=4, do_sample=False)
            watch.step()
    assert of_masks(watch) == []


@pytest.mark.slow("takes a second")
def test_accumulated_batches_do_not_ring():
    model = llama().train()
    with attemper.watch(model) as watch:
        for step in range(STEPS):
            for part in range(3):
                model(**padded(16 + 4 * part, [5 + step % 3, 16])).logits.mean().backward()
            watch.step()
    assert of_masks(watch) == []
    assert watch.table().sites[0].heads[0].expected_keys is not None


# --- what is kept ---


def test_a_stored_run_has_the_counts_and_the_verdict_of_its_watch(tmp_path: Path):
    watch = watched(llama(), lambda step: {"input_ids": ids(*some(step)[:2])}, lose_causality, store=tmp_path)
    live = [alarm for alarm in watch._recorder.judge.alarms if alarm.kind in MASKS]
    with attemper.open(tmp_path) as run:
        assert [alarm for alarm in run.alarms() if alarm.kind in MASKS] == live
        assert len(live) == 2
        visible, wanted = (run.history(name).values for name in ("visible_keys", "expected_keys"))
        assert (visible[:AT] == wanted[:AT]).all()
        assert (visible[AT:] > wanted[AT:]).all()
        assert {"visible_keys", "expected_keys"} <= set(run.to_pandas().columns)
        assert [one for one in run.alarms({"visible_keys": None}) if one.kind in MASKS] == []


def test_a_scan_of_a_packed_batch_says_that_documents_leak():
    scan = attemper.scan(llama().eval(), [packed(10, 12, 10)])
    found = [alarm for alarm in scan.alarms if alarm.kind == "leak"]
    assert [(alarm.site, alarm.head) for alarm in found] == [
        (f"model.layers.{layer}.self_attn", None) for layer in (0, 1)
    ]
    assert "rows see 10.62 keys of other documents, in the mean" in found[0].message
    again = attemper.Scan.from_json(scan.to_json())
    assert again.sites[0].heads[0].leaked_keys == scan.sites[0].heads[0].leaked_keys
    kept = attemper.scan(llama().eval(), [packed(10, 12, 10, use_cache=False)])
    assert "leak" not in {alarm.kind for alarm in kept.alarms}


def test_a_layer_that_hides_more_than_its_attributes_tell_is_not_known():
    """The text model of CLIP is causal, and its layers say that they are not."""
    config = tf.CLIPTextConfig(**{**TEXT, "bos_token_id": 1, "eos_token_id": 2}, max_position_embeddings=64)
    head = attemper.scan(from_config(tf.CLIPTextModel, config).eval(), [{"input_ids": ids()}]).sites[0].heads[0]
    assert (head.visible_keys, head.expected_keys) == (16.5, None)
