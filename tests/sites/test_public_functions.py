"""Attention functions of other packages, as stand-ins of the same signature: seen, or skipped by name."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper

QUERY, KEY, VALUE = (torch.randn(2, 9, 4, 8) for _ in range(3))  # [B, tokens, heads, size]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    heads_first: list[Any] = [part.transpose(1, 2) for part in (q, k, v)]
    return F.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    return sdpa(q, k, v, scale=softmax_scale, is_causal=causal)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return v


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None,
    *, op: Any = None, output_dtype: Any = None,
) -> Tensor:  # fmt: skip
    return sdpa(query, key, value, scale=scale)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Modules under the names of the packages, and one that has imported the functions as people do."""
    flash, xformers, mine = (
        ModuleType("flash_attn.flash_attn_interface"),
        ModuleType("xformers.ops.fmha"),
        ModuleType("mine"),
    )
    for module, function in (
        (flash, flash_attn_func), (flash, flash_attn_varlen_func), (xformers, memory_efficient_attention),
    ):  # fmt: skip
        setattr(module, function.__name__, function)
        setattr(mine, function.__name__, function)
    for module in (flash, xformers, mine):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return mine


class Caller(nn.Module):
    """A model that calls one function of another package."""

    def __init__(self, package: ModuleType, name: str, **options: Any) -> None:
        super().__init__()
        self.package, self.function, self.options = package, name, options

    def forward(self, *tensors: Tensor) -> Tensor:
        return getattr(self.package, self.function)(*tensors, **self.options)


def entropies(model: nn.Module, *tensors: Tensor) -> Tensor:
    with attemper.watch(model) as watch:
        model(*tensors)
    assert watch.failures == 0
    return torch.tensor([head.entropy_nats for head in watch.table().sites[0].heads], dtype=torch.float64)


def expected(stats: attemper.AttentionStats) -> Tensor:
    return stats.per_head()["entropy"].mean


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func_is_seen(packages: ModuleType, causal: bool) -> None:
    found = entropies(Caller(packages, "flash_attn_func", causal=causal, softmax_scale=0.7), QUERY, KEY, VALUE)
    heads_first = (part.transpose(1, 2) for part in (QUERY, KEY))
    stats = attemper.attention_statistics(*heads_first, is_causal=causal, scale=0.7)
    torch.testing.assert_close(found, expected(stats), rtol=0, atol=1e-6)


def test_flash_attn_aligns_causality_and_windows_to_the_bottom_right(packages: ModuleType) -> None:
    query = QUERY[:, :5]
    found = entropies(Caller(packages, "flash_attn_varlen_func", causal=True, window_size=(3, 0)), *_packed(query))
    stats = attemper.attention_statistics(
        query.transpose(1, 2), KEY.transpose(1, 2), is_causal=True, causal_alignment="bottom-right", window_size=(3, 0)
    )
    torch.testing.assert_close(found, expected(stats), rtol=0, atol=1e-6)


def _packed(query: Tensor) -> tuple[Any, ...]:
    """Two documents of 5 queries and 9 keys, one after another."""
    flat = [part.flatten(0, 1) for part in (query, KEY, VALUE)]
    return (*flat, torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 9, 18], dtype=torch.int32), 5, 9)


def test_memory_efficient_attention_is_seen(packages: ModuleType) -> None:
    found = entropies(Caller(packages, "memory_efficient_attention"), QUERY, KEY, VALUE)
    stats = attemper.attention_statistics(QUERY.transpose(1, 2), KEY.transpose(1, 2))
    torch.testing.assert_close(found, expected(stats), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("flash_attn_func", {"alibi_slopes": torch.ones(4)}, "ALiBi slopes"),
        ("memory_efficient_attention", {"attn_bias": object()}, "its xformers mask is a object"),
    ],
)
def test_what_cannot_be_told_is_skipped_by_name(
    packages: ModuleType, name: str, options: dict[str, Any], reason: str
) -> None:
    model = Caller(packages, name, **options)
    with attemper.watch(model) as watch:
        model(QUERY, KEY, VALUE)
    with pytest.raises(attemper.InputError, match=f"saw no attention in Caller.*\n.*{reason}"):
        watch.table()


def test_every_reference_is_put_back(packages: ModuleType) -> None:
    model = Caller(packages, "flash_attn_func")
    with attemper.watch(model):
        model(QUERY, KEY, VALUE)
    assert packages.flash_attn_func is flash_attn_func
    assert sys.modules["flash_attn.flash_attn_interface"].flash_attn_func is flash_attn_func


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_flash_implementations_of_transformers_are_read_by_their_own_convention(
    name: str, padding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.monitor.tiny_models import TINY, eager_entropies, inputs, sharpened

    model = sharpened(TINY[name].build())
    batch = inputs("decoder", padding)
    layers = eager_entropies(model, batch)["attentions"]

    def stand_in(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, None]:
        # Flash's own arithmetic through the dense reference: 2-D padding, causal from the bottom right, a window.
        window = given.get("sliding_window")
        options: dict[str, Any] = {} if window is None or window >= key.shape[2] else {"window_size": (window - 1, 0)}
        mask = None if attention_mask is None else attention_mask[:, None, None, :].bool()
        output = attemper.attention(
            query, key, value, mask, is_causal=True, causal_alignment="bottom-right", scale=given["scaling"],
            enable_gqa=True, backend="reference", **options,
        ).output  # fmt: skip
        return output.transpose(1, 2), None

    mapping = dict(transformers.AttentionInterface._global_mapping) | {"flash_attention_2": stand_in}
    monkeypatch.setattr(transformers.AttentionInterface, "_global_mapping", mapping)
    model.config._attn_implementation_internal = "flash_attention_2"
    with attemper.watch(model) as watch:
        model(**batch)
    scan = watch.table()
    assert scan.skipped == ()
    for site, layer in zip(scan.sites, layers, strict=True):
        heads = torch.tensor([head.entropy_nats for head in site.heads], dtype=torch.float64)
        assert float((heads - layer).abs().max()) < 2e-5, site.name
