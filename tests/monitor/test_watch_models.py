"""``watch`` sees transformers' models whatever their attention implementation, a pretrained one among them, and no bit
of them changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper

tf = pytest.importorskip("transformers")

from tests.monitor.more_models import OTHERS, expected  # noqa: E402
from tests.monitor.tiny_models import (  # noqa: E402
    GROUPED,
    TINY,
    Tiny,
    eager_entropies,
    head_entropies,
    inputs,
    largest_error,
    sharpened,
    watched_scan,
)
from tests.support import encoder  # noqa: E402
from tests.support.identical_training import assert_identical_training  # noqa: E402
from tests.support.scans import of_heads  # noqa: E402

IMPLEMENTATIONS = [(name, way) for name, tiny in TINY.items() for way in tiny.implementations]
WITHOUT_FLEX = ("gpt2", "gpt-oss", "t5")
"""Models whose flex_attention transformers refuses (GPT-2), or cannot run on a CPU (sinks, the bias of T5)."""

FLEX_WARNINGS = pytest.mark.filterwarnings(
    *("ignore:flex_attention called without", "ignore:`torch.jit.script_method`", "ignore:_compile flag on"),
    "ignore:.*should not be instantiated",  # torch compiles the mask, and warns of itself
)


@pytest.fixture
def eager_flex() -> Iterator[None]:
    """What transformers compiles runs as it stands: the same calls of the same functions, in milliseconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def watched_error(model: Any, tiny: Tiny, batch: dict[str, Tensor], implementation: str) -> float:
    """Error of watched entropies against the eager weights; outputs must be those of the unwatched model."""
    model.set_attn_implementation("eager")
    expected = eager_entropies(model, batch)
    model.set_attn_implementation(implementation)
    scan = watched_scan(model, batch)
    assert scan.skipped == ()
    return largest_error(scan, tiny.kind, expected)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
@pytest.mark.quick("sdpa-left", "gpt-oss-eager-left", "gemma2-eager-left", "t5-eager-left")
@pytest.mark.turns(2)
def test_watched_entropies_are_those_of_eager_weights(
    name: str, implementation: str, padding: str | None, seen: Callable[..., None]
) -> None:
    tiny = TINY[name]
    worst = watched_error(sharpened(tiny.build()), tiny, inputs(tiny.kind, padding), implementation)
    assert worst < 2e-5
    seen("transformers", tiny.title, f"registry, {implementation}", error_nats=worst)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", TINY)
@pytest.mark.quick("left", "llama")
@pytest.mark.turns(2)
def test_scan_agrees_with_eager_weights_on_every_site(
    name: str, padding: str | None, seen: Callable[..., None]
) -> None:
    tiny = TINY[name]
    model, batch = sharpened(tiny.build()), inputs(tiny.kind, padding, tiny.tokens)
    scan = attemper.scan(model, [batch])
    assert scan.skipped == ()
    worst = largest_error(scan, tiny.kind, eager_entropies(model, batch))
    assert worst < 2e-5
    seen("transformers", tiny.title, "scan, attemper implementation", error_nats=worst)


@pytest.mark.slow("takes seconds")
@FLEX_WARNINGS
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", [name for name in TINY if name not in WITHOUT_FLEX])
@pytest.mark.quick("gemma2-right")
def test_flex_attention_is_read_with_its_masks_windows_and_softcap(
    name: str, padding: str | None, eager_flex: None, seen: Callable[..., None]
) -> None:
    tiny = TINY[name]
    worst = watched_error(sharpened(tiny.build()), tiny, inputs(tiny.kind, padding), "flex_attention")
    assert worst < 2e-5
    seen("transformers", tiny.title, "registry, flex", error_nats=worst)


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
@pytest.mark.quick("llama-sdpa", "t5-eager")
def test_training_steps_with_dropout_are_bit_identical(
    name: str, implementation: str, steps: int, seen: Callable[..., None]
) -> None:
    tiny = TINY[name]

    def made() -> tuple[Any, Callable[[Any], Tensor]]:
        model, batch = tiny.build(dropout=0.1), inputs(tiny.kind, "right", tokens=12, batch=2)
        model.set_attn_implementation(implementation)
        return model, lambda root: root(**batch)[0].square().mean()

    assert_identical_training(made, steps)
    seen("transformers", tiny.title, f"registry, {implementation}", identical_steps=steps)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize(
    ("name", "implementation"), [(name, way) for name, other in OTHERS.items() for way in other.implementations]
)
@pytest.mark.quick(
    "OPT-sdpa-left",
    "RoBERTa-sdpa-left",
    "ModernBERT-sdpa-left",
    "Gemma 3-sdpa-left",
    "Mixtral-sdpa-left",
    "DeepSeek V3-sdpa-left",
    "Llama 4-sdpa-left",
    "BART-sdpa-left",
    "CLIP-sdpa-left",
)
@pytest.mark.turns(2)
def test_every_module_that_returns_eager_weights_is_seen_under_its_own_name(
    name: str, implementation: str, padding: str | None, seen: Callable[..., None]
) -> None:
    other = OTHERS[name]
    model, batch = sharpened(other.build()), inputs(other.kind, padding)
    layers = expected(model, batch)
    model.set_attn_implementation(implementation)
    scan = watched_scan(model, batch)
    assert scan.skipped == ()
    assert {site.name for site in scan.sites} == set(layers)
    worst = max(float((of_heads(site) - layers[site.name]).abs().max()) for site in scan.sites)
    assert worst < 2e-5
    seen("transformers", other.title, f"registry, {implementation}", error_nats=worst)


def test_every_image_of_a_packed_vision_tower_is_a_call_of_its_own(
    monkeypatch: pytest.MonkeyPatch, seen: Callable[..., None]
) -> None:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as file

    weights: dict[str, list[Tensor]] = {}
    plain = file.eager_attention_forward

    def spy(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(module, *args, **kwargs)
        weights.setdefault(names[module], []).append(found[1])
        return found

    model, batch = qwen2_vl()
    names = {module: name for name, module in model.named_modules()}
    monkeypatch.setattr(file, "eager_attention_forward", spy)
    with torch.no_grad():
        model(**batch)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), attemper.watch(model) as watch:
        model(**batch)
    scan = watch.table()
    assert scan.skipped == ()
    assert [(site.queries, site.keys) for site in scan.sites] == [(16, 16), (32, 32)] * 2 + [(30, 30)] * 2
    worst = 0.0
    for site in scan.sites:
        name, _, call = site.name.partition("#")
        expected_nats = head_entropies(weights[name][int(call or 1) - 1], None)
        worst = max(worst, float((of_heads(site) - expected_nats).abs().max()))
    assert worst < 2e-5
    seen("transformers", "Qwen2-VL", "registry, sdpa", error_nats=worst)


def qwen2_vl() -> tuple[Any, dict[str, Tensor]]:
    """A model that reads two images, of 16 and 32 patches, in one row of text."""
    text = {key: value for key, value in GROUPED.items() if key != "head_dim"} | {"bos_token_id": 1, "eos_token_id": 2}
    config = tf.Qwen2VLConfig(
        text_config=text | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 3], "rope_theta": 1e4}},
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 48, "num_heads": 4, "patch_size": 4, "in_channels": 3,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=99, video_token_id=98, vision_start_token_id=97, vision_end_token_id=96,
    )  # fmt: skip
    model = tf.Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    ids = torch.randint(3, 90, (1, 30))
    ids[0, [2, 11]], ids[0, 3:7], ids[0, 12:20] = 97, 99, 99
    grid = torch.tensor([[1, 4, 4], [1, 4, 8]])
    pixels, kinds = torch.randn(48, 3 * 2 * 4 * 4), (ids == 99).int()
    return sharpened(model), {
        "input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds
    }  # fmt: skip


# --- a pretrained encoder ---

MINILM = "MiniLM, pretrained"
ENGLISH = [
    "Attention is a weighted mean whose weights the tokens choose for themselves. " * 12,
    "How sharp should that choice be?",
    "If a head gives all its weight to a single token, it looks something up: the subject of the sentence, perhaps.",
]


def english(number: int) -> dict[str, Tensor]:
    return dict(encoder.loaded()[1](ENGLISH[-number:], return_tensors="pt", padding=True))


def encoder_with(implementation: str) -> Any:
    model = copy.deepcopy(encoder.loaded()[0])
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.slow("takes seconds")
@FLEX_WARNINGS
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(("implementation", "way"), [("eager", "eager"), ("sdpa", "sdpa"), ("flex_attention", "flex")])
@pytest.mark.quick("sdpa-sdpa-3")
def test_watched_entropies_of_a_pretrained_encoder_are_those_of_its_eager_weights(
    implementation: str, way: str, number: int, eager_flex: None, seen: Callable[..., None]
) -> None:
    batch = english(number)
    expected = eager_entropies(encoder.loaded()[0], batch)
    model = encoder_with(implementation)
    for scan in (attemper.scan(model, [batch]), watched_scan(model, batch)):
        assert scan.skipped == ()
        assert scan.tokens == int(batch["attention_mask"].sum())
        worst = largest_error(scan, "encoder", expected)
        assert worst < 5e-6
    seen("transformers", MINILM, f"registry, {way}", error_nats=worst)


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_training_steps_of_a_pretrained_encoder_are_bit_identical(
    implementation: str, steps: int, seen: Callable[..., None]
) -> None:
    batch = english(2)
    batch = {name: part[:, :16] for name, part in batch.items()}

    def made() -> tuple[nn.Module, Callable[[Any], Tensor]]:
        model = encoder_with(implementation)
        assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.1
        return model, lambda root: (root(**batch).last_hidden_state - 1).square().mean()

    assert_identical_training(made, steps)
    seen("transformers", MINILM, f"registry, {implementation}", identical_steps=steps)
