"""Which rows are padding in models of one's own, and which attention is cross attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper

REAL = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
"""Two sequences of 7 and 4 real tokens."""


def watched(model: nn.Module, *args: Any, **kwargs: Any) -> attemper.Scan:
    with attemper.watch(model) as watch:
        model(*args, **kwargs)
    assert watch.failures == 0
    return watch.table()


def attention(batch_first: bool = True) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()


ADDED = torch.where(REAL, 0.0, -torch.inf)


LOWEST = ADDED.clamp(min=torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("padding", "rows"), [(~REAL, 11), (ADDED, 11), (LOWEST, 11), (torch.linspace(-3, 1, 14).view(2, 7), 14)]
)
def test_padded_queries_are_left_out_and_numbers_added_to_keys_are_a_bias(padding: Tensor, rows: int) -> None:
    model, x = attention(), torch.randn(2, 7, 32)
    scan = watched(model, x, x, x, key_padding_mask=padding)
    (site,) = scan.sites
    assert (site.heads[0].rows, scan.tokens) == (rows, rows)
    weights = model(x, x, x, key_padding_mask=padding, average_attn_weights=False)[1].double()
    counted = torch.special.entr(weights).sum(-1).transpose(0, 1)[:, REAL if rows == 11 else torch.ones_like(REAL)]
    found = torch.tensor([head.entropy_nats for head in site.heads], dtype=torch.float64)
    torch.testing.assert_close(found, counted.mean(1).detach(), rtol=0, atol=2e-6)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    assert watched(layer, x, src_key_padding_mask=padding).sites[0].heads[0].rows == rows


class Around(nn.Module):
    """Calls attention with a mask that it names as it likes."""

    def __init__(self, hides: bool, way: str) -> None:
        super().__init__()
        self.attention, self.hides, self.way = attention(), hides, way

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        real = ~attention_mask if self.hides else attention_mask.bool()
        if self.way == "multi-head":
            return self.attention(x, x, x, key_padding_mask=~real)[0]
        parts = x[:, None]
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(parts, parts, parts, attn_mask=real[:, None, None])
        scores = (parts @ parts.mT).masked_fill(~real[:, None, None], -torch.inf)
        return scores.softmax(-1) @ parts


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", ["multi-head", "sdpa", "by hand"])
@pytest.mark.parametrize("hides", [False, True])
def test_the_calls_own_mask_tells_what_a_bool_mask_of_an_own_model_means(hides: bool, way: str, padded: bool) -> None:
    real = REAL if padded else torch.ones_like(REAL)
    scan = watched(Around(hides, way), torch.randn(2, 7, 32), attention_mask=~real if hides else real)
    assert scan.sites[0].heads[0].rows == (11 if padded else 14)
    assert scan.tokens == (11 if padded else 14)


class Causal(nn.Module):
    """Takes a mask, and does not look at it."""

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)


@pytest.mark.parametrize(
    ("mask", "rows"),
    [(REAL.long(), 11), (REAL.float(), 11), (torch.ones_like(REAL), 14), (torch.zeros_like(REAL), 14)],
)
def test_a_mask_of_numbers_counts_ones_as_real_tokens_and_no_batch_is_all_padding(mask: Tensor, rows: int) -> None:
    assert watched(Causal(), torch.randn(2, 7, 32), mask).sites[0].heads[0].rows == rows


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("around", [compiled, nn.DataParallel])
def test_a_scan_knows_the_mask_that_a_wrapped_model_is_given_by_its_place(around: Callable[[nn.Module], Any]) -> None:
    scan = attemper.scan(around(Causal().eval()), [(torch.randn(2, 7, 32), REAL.long())])
    assert (scan.sites[0].heads[0].rows, scan.tokens) == (11, 11)


@pytest.mark.parametrize("mask", [REAL, ~REAL])
def test_a_bool_mask_that_no_call_explains_makes_the_site_skipped(mask: Tensor) -> None:
    with pytest.raises(attemper.InputError, match="padding of its queries is unknown"):
        watched(Causal(), torch.randn(2, 7, 32), mask)


def test_a_bool_mask_of_a_transformers_model_is_true_for_real_tokens() -> None:
    pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY

    model = TINY["llama"].build().eval()
    scan = watched(model, input_ids=torch.randint(3, 101, (2, 7)), attention_mask=REAL)
    assert {site.heads[0].rows for site in scan.sites} == {11}


class Earlier:
    """Keys of earlier calls, as transformers' caches tell how many they are."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def get_seq_length(self) -> int:
        return self.tokens


class Decoder(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor, *others: Any, **named: Any) -> Tensor:
        return F.scaled_dot_product_attention(x[..., -2:, :], x, x)


class Tower(nn.Module):
    """Attends over patches; as the vision tower of CLIP before transformers made it a PreTrainedModel."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = pixel_values.flatten(2).transpose(1, 2)[:, None]
        return F.scaled_dot_product_attention(patches, patches, patches)


def test_a_vision_tower_of_a_transformers_model_has_no_padding_whatever_its_class() -> None:
    tf = pytest.importorskip("transformers")

    class TextAndImage(tf.PreTrainedModel):
        config_class = tf.PretrainedConfig

        def __init__(self) -> None:
            super().__init__(tf.PretrainedConfig())
            self.vision_model = Tower()

        def forward(self, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
            return self.vision_model(pixel_values=pixel_values)

    scan = watched(TextAndImage().eval(), attention_mask=REAL.long(), pixel_values=torch.randn(2, 8, 3, 4))
    assert scan.skipped == ()
    assert scan.sites[0].heads[0].rows == 2 * 12


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ((), {"past_key_values": Earlier(5)}),
        ((), {"cache": Earlier(5)}),
        ((), {"cache": Earlier(5), "past_key_values": Earlier(0)}),
        ((), {"past_key_values": Earlier(0), "cache": Earlier(5)}),
        ((), {"cache": None, "past_key_values": Earlier(5)}),
        ((Earlier(5),), {"use_cache": True}),
    ],
)
def test_a_cache_is_told_by_what_it_is_whatever_its_name(others: tuple[Any, ...], named: dict[str, Any]) -> None:
    scan = watched(Decoder(), torch.randn(2, 1, 7, 8), torch.tensor([[1] * 7, [1] * 6 + [0]]), *others, **named)
    assert scan.skipped == ()
    assert scan.sites[0].heads[0].rows == 2 + 1


class Reads(nn.Module):
    """Attention of one sequence over another, or over a part of its own: by what ``forward`` calls its arguments."""

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query[:, None], key[:, None], key[:, None])


class Named(Reads):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, context)


class Modulated(Reads):
    """Reads its own tokens; the context only scales them."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x * context.mean(1, keepdim=True), x)


class Remembers(Reads):
    """Takes other tokens into its own sequence, as Transformer-XL does."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, torch.cat([memory, x], 1))


class Reduced(Reads):
    """One sequence, of whose tokens every second is a key, as spatial reduction does."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x[:, ::2])


KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "context, shorter": (Named, (7, 5), "cross"),
    "context, as long": (Named, (7, 7), "cross"),
    "context, longer": (Named, (7, 9), "cross"),
    "context that only modulates": (Modulated, (7, 5), "self"),
    "memory read with its own tokens": (Remembers, (7, 5), "self"),
    "fewer keys, under any name": (Reads, (7, 5), "cross"),
    "more keys, under no name that tells: a cache": (Reads, (1, 9), "self"),
    "fewer keys of the only sequence": (Reduced, (8,), "self"),
}


@pytest.mark.parametrize("name", KINDS)
def test_names_and_lengths_tell_cross_attention(name: str) -> None:
    kind, lengths, expected = KINDS[name]
    (site,) = watched(kind(), *(torch.randn(2, length, 8) for length in lengths)).sites
    assert site.kind == expected


@pytest.mark.parametrize("batch_first", [False, True])
def test_views_of_one_tensor_are_one_sequence_for_multihead_attention(batch_first: bool) -> None:
    model, x, other = attention(batch_first), torch.randn(2, 7, 32), torch.randn(2, 7, 32)
    assert watched(model, x, x, x).sites[0].kind == "self"
    assert watched(model, x.view(2, 7, 32), x[:], x).sites[0].kind == "self"
    assert watched(model, x.mT.mT, x, other).sites[0].kind == "self"
    assert watched(model, x, other, other).sites[0].kind == "cross"
    assert watched(model, x[:, :3], x[:, 3:6], x[:, 3:6]).sites[0].kind == "cross"
