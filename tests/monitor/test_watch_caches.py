"""``watch`` while a model decodes: keys of earlier calls, windows that slide, caches of fixed length, prompts in parts.

What is expected are the entropies of the eager weights of the same calls, real queries only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper

tf = pytest.importorskip("transformers")

from attemper.sites.padding import Tokens  # noqa: E402
from tests.monitor.tiny_models import CACHE, TINY, head_entropies, inputs, largest_error, sharpened  # noqa: E402

DECODERS = [name for name, tiny in TINY.items() if tiny.kind == "decoder"]
PARTS = (slice(0, 20), slice(20, 38), slice(38, 39), slice(39, 40))
"""A prompt in two parts, the second with more keys than queries and beyond the windows of 7, and two tokens."""


def caches(model: Any, kind: str) -> Any:
    if kind == "static":
        return tf.StaticCache(config=model.config, max_cache_len=48)
    return tf.DynamicCache(config=model.config)


def expected(model: Any, batch: dict[str, Tensor], kind: str) -> list[list[Tensor]]:
    """For each part, the entropies of each layer's eager weights."""
    cache, found = caches(model, kind), []
    for part in PARTS:
        mask = batch["attention_mask"][:, : part.stop]
        with torch.no_grad():
            given = {"attention_mask": mask, CACHE: cache}
            outputs = model(batch["input_ids"][:, part], **given, output_attentions=True)
        found.append([head_entropies(layer, mask[:, part]) for layer in outputs.attentions])
    return found


def watched(model: Any, batch: dict[str, Tensor], kind: str, observe: str) -> list[attemper.Scan]:
    cache, found = caches(model, kind), []
    for part in PARTS:
        mask = batch["attention_mask"][:, : part.stop]
        with torch.no_grad(), attemper.watch(model, observe=observe) as watch:
            model(batch["input_ids"][:, part], **{"attention_mask": mask, CACHE: cache})
        assert watch.failures == 0
        found.append(watch.table())
    return found


@pytest.mark.quick("llama-sdpa-dynamic-right-replace", "gpt-oss-eager-dynamic-None-beside")
@pytest.mark.parametrize("observe", ["beside", "replace"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "implementation"), [(name, way) for name in DECODERS for way in TINY[name].implementations]
)
@pytest.mark.turns(2)
def test_every_call_of_a_decoding_model_reads_as_its_eager_weights(
    name: str, implementation: str, kind: str, padding: str | None, observe: str, seen: Callable[..., None]
) -> None:
    model, batch = sharpened(TINY[name].build()), inputs("decoder", padding)
    layers = expected(model, batch, kind)
    model.set_attn_implementation(implementation)
    worst = 0.0
    for scan, part in zip(watched(model, batch, kind, observe), layers, strict=True):
        assert scan.skipped == ()
        worst = max(worst, largest_error(scan, "decoder", {"attentions": part}))
    assert worst < 2e-5
    seen("transformers", TINY[name].title, f"decoding with a {kind} cache", error_nats=worst)


@pytest.mark.quick("llama", "gpt-oss")
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_all_calls_of_generate_are_rows_of_one_step(name: str) -> None:
    model: Any = sharpened(TINY[name].build())
    ids = torch.randint(3, 101, (1, 12))
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    with attemper.watch(model) as watch:
        watch.step()
        assert torch.equal(model.generate(ids, **options), plain)
    with torch.no_grad():
        weights = model(plain[:, :-1], output_attentions=True).attentions
    scan = watch.table()
    assert [site.heads[0].rows for site in scan.sites] == [12 + 7] * 2
    # Decoding computes the rows of one pass over everything, one after another.
    assert largest_error(scan, "decoder", {"attentions": [head_entropies(layer, None) for layer in weights]}) < 2e-5


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_cross_attention_is_read_while_decoding(name: str) -> None:
    # In float64: the model's own float32 is another one token by token, and T5's scores, which nothing scales, show it.
    model = sharpened(TINY[name].build()).double()
    batch = inputs(TINY[name].kind, None, batch=1)
    batch = {name: part.double() if part.is_floating_point() else part for name, part in batch.items()}
    ids = batch.pop("decoder_input_ids")[:, :6]
    batch.pop("decoder_attention_mask", None)
    with torch.no_grad():
        outputs = model(**batch, decoder_input_ids=ids, output_attentions=True)
    groups = {"decoder_attentions": outputs.decoder_attentions, "cross_attentions": outputs.cross_attentions}
    cache, encoded = None, None
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), attemper.watch(model, sites=["decoder"]) as watch:
        watch.step()
        for token in range(6):
            given: dict[str, Any] = batch if encoded is None else {"encoder_outputs": encoded}
            given = given | {"decoder_input_ids": ids[:, token : token + 1], CACHE: cache}
            found = model(**given, use_cache=True)
            cache, encoded = found[CACHE], (found.encoder_last_hidden_state,)
    expected = {group: [head_entropies(layer, None) for layer in layers] for group, layers in groups.items()}
    # Where transformers softmaxes T5 in float32 its weights are rounded by eps / 2 each: the entropy by eps * (H + 1).
    off = max(float((layer.sum(-1) - 1).abs().max()) for layers in groups.values() for layer in layers)
    rounding = 0.0 if off < 1e-12 else torch.finfo(torch.float32).eps * (math.log(40) + 1)
    assert largest_error(watch.table(), TINY[name].kind, expected) < 1e-9 + rounding


def test_heads_that_sdpa_packs_while_decoding_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = sharpened(TINY["llama"].build()), inputs("decoder", "left")
    model.set_attn_implementation("sdpa")
    shapes: list[tuple[int, ...]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append(tuple(query.shape))
        return plain(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    scans = watched(model, batch, "dynamic", "beside")
    if shapes[-1] == (3, 4, 1, 12):
        pytest.skip("this transformers packs no heads")
    assert shapes[-1] == (3, 2, 2, 12)
    assert [len(site.heads) for site in scans[-1].sites] == [4, 4]
    assert [site.queries for site in scans[-1].sites] == [1, 1]


def test_a_mask_as_long_as_a_static_cache_is_read_at_the_place_of_the_queries() -> None:
    model = sharpened(TINY["llama"].build())
    batch = inputs("decoder", "left", tokens=30)
    cache = tf.StaticCache(config=model.config, max_cache_len=48)
    whole = torch.cat([batch["attention_mask"], torch.zeros(3, 18, dtype=torch.int64)], 1)
    rows = []
    for part in (slice(0, 29), slice(29, 30)):
        with torch.no_grad(), attemper.watch(model) as watch:
            model(batch["input_ids"][:, part], **{"attention_mask": whole, CACHE: cache})
        rows.append(watch.table().sites[0].heads[0].rows)
    assert rows == [29 + 20 + 4, 3]


def test_padding_that_cannot_be_told_makes_the_site_skipped() -> None:
    class Pooled(nn.Module):
        """An encoder whose queries are fewer than the tokens of its mask, without a cache that explains it."""

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            visible = attention_mask[:, None, None, :].bool()
            query, key = x[:, None, ::2], x[:, None]
            return torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=visible)

    model, x, mask = Pooled(), torch.randn(2, 8, 4), torch.ones(2, 8, dtype=torch.int64)
    with attemper.watch(model) as watch:
        model(x, attention_mask=mask)
    assert watch.table().sites[0].heads[0].rows == 2 * 4
    mask[1, 5:] = 0
    with attemper.watch(model) as watch:
        model(x, attention_mask=mask)
    with pytest.raises(attemper.InputError, match=r"padding of its queries is unknown under a mask of \[2, 8\]"):
        watch.table()


@pytest.mark.parametrize(
    ("past", "queries", "keys", "cross", "real"),
    [
        (None, 6, 6, False, [1, 1, 1, 0, 0, 0]),
        (None, 6, 9, False, None),
        (None, 6, 9, True, [1, 1, 1, 0, 0, 0]),
        (None, 2, 6, False, None),
        (None, 9, 9, False, None),
        (0, 6, 9, False, [1, 1, 1, 0, 0, 0]),
        (2, 2, 9, False, [1, 0]),
        (2, 2, 3, False, [1, 0]),
        (4, 2, 6, False, [0, 0]),
        (5, 2, 7, False, None),
        (torch.tensor([2]), 2, 9, False, [1, 0]),
    ],
)
def test_which_tokens_of_a_mask_are_the_queries(
    past: Any, queries: int, keys: int, cross: bool, real: list[int] | None
) -> None:
    found = Tokens(torch.tensor([[1, 1, 1, 0, 0, 0]]).bool(), None, past).of_queries(queries, keys, cross=cross)
    assert (None if found is None else found[0].int().tolist()) == real


def test_a_cache_that_cannot_tell_its_length_ends_no_forward_pass() -> None:
    class Cache:
        def get_seq_length(self) -> int:
            raise ValueError("no attention layer")

    class Model(nn.Module):
        def forward(self, x: Tensor, past_key_values: Any) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    with attemper.watch(Model()) as watch:
        watch.model(torch.randn(2, 3, 5, 4), past_key_values=Cache())
    assert watch.table().sites[0].heads[0].rows == 2 * 5
