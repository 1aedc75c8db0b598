"""Attention functions of torch and of other packages, as stand-ins of the same signature: seen, or skipped by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.attention.varlen as torch_varlen
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from tests.sites.flash_stand_in import flash_attn_func, flash_attn_varlen_func

STAND_IN = "function (stand-in)"
QUERY, KEY, VALUE = (torch.randn(2, 9, 4, 8) for _ in range(3))  # [B, tokens, heads, size]
STARTS_Q, STARTS_K = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 5, 10], [0, 9, 18]))
"""Two documents of 5 queries and 9 keys, one after another."""
FLAT = [part.flatten(0, 1) for part in (QUERY[:, :5], KEY, VALUE)]


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    (q, k, v), starts = qkv.unbind(1), (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *starts, dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    (k, v), starts = kv.unbind(1), (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, k, v, *starts, dropout_p, softmax_scale, causal, window_size, softcap)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    cache_seqlens: Any = None, softmax_scale: float | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    return q


FLASH_2 = (
    flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func,
    flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func, flash_attn_with_kvcache,
)  # fmt: skip


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None,
    *, op: Any = None, output_dtype: Any = None,
) -> Tensor:  # fmt: skip
    return query


def memory_efficient_attention_partial(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None) -> Tensor:
    return query


def installed(monkeypatch: pytest.MonkeyPatch, name: str, *things: Any) -> ModuleType:
    """A module of this name that holds these functions and classes."""
    module = ModuleType(name)
    for thing in things:
        setattr(module, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Modules under the names of the packages, and one that has imported the functions as people do."""
    xformers = (memory_efficient_attention, memory_efficient_attention_partial)
    installed(monkeypatch, "flash_attn.flash_attn_interface", *FLASH_2)
    installed(monkeypatch, "xformers.ops.fmha", *xformers)
    installed(monkeypatch, "xformers.ops", *xformers)
    return installed(monkeypatch, "mine", *FLASH_2, *xformers)


class Caller(nn.Module):
    """A model that calls one function of another package."""

    def __init__(self, package: Any, name: str, **options: Any) -> None:
        super().__init__()
        self.package, self.function, self.options = package, name, options

    def forward(self, *tensors: Any) -> Any:
        return getattr(self.package, self.function)(*tensors, **self.options)


def entropies(model: nn.Module, *tensors: Any) -> Tensor:
    before = model(*tensors)
    with attemper.watch(model) as watch:
        during = model(*tensors)
    assert torch.equal(before, during)
    assert watch.failures == 0
    scan = watch.table()
    assert len(scan.sites) == 1
    return torch.tensor([head.entropy_nats for head in scan.sites[0].heads], dtype=torch.float64)


def expected(query: Tensor, key: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Mean entropy per head of attention over [B, tokens, heads, size]."""
    stats = attemper.attention_statistics(query.transpose(1, 2), key.transpose(1, 2), mask, **options)
    return stats.per_head()["entropy"].mean


def close(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, which must be small."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    return float((found - wanted).abs().max())


def reason(model: nn.Module, *tensors: Any) -> str:
    """Why nothing was seen."""
    with attemper.watch(model) as watch:
        model(*tensors)
    with pytest.raises(attemper.InputError, match="saw no attention in") as error:
        watch.table()
    return str(error.value).splitlines()[-1]


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attn_func_is_seen(packages: ModuleType, causal: bool) -> None:
    found = entropies(Caller(packages, "flash_attn_func", causal=causal, softmax_scale=0.7), QUERY, KEY, VALUE)
    close(found, expected(QUERY, KEY, is_causal=causal, scale=0.7))


BOTTOM_RIGHT: dict[str, Any] = {"is_causal": True, "causal_alignment": "bottom-right", "window_size": (3, 0)}


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("flash_attn_func", (QUERY[:, :5], KEY, VALUE)),
        ("flash_attn_kvpacked_func", (QUERY[:, :5], torch.stack([KEY, VALUE], 2))),
        ("flash_attn_varlen_func", (*FLAT, STARTS_Q, STARTS_K, 5, 9)),
        ("flash_attn_varlen_kvpacked_func", (FLAT[0], torch.stack(FLAT[1:], 1), STARTS_Q, STARTS_K, 5, 9)),
    ],
)
def test_flash_attn_aligns_causality_and_windows_to_the_bottom_right(
    packages: ModuleType, name: str, tensors: tuple[Any, ...], seen: Callable[..., None]
) -> None:
    found = entropies(Caller(packages, name, causal=True, window_size=(3, 0)), *tensors)
    error = close(found, expected(QUERY[:, :5], KEY, **BOTTOM_RIGHT))
    seen("flash_attn", name, STAND_IN, error_nats=error)


@pytest.mark.parametrize("name", ["flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func"])
def test_queries_keys_and_values_in_one_tensor_are_told_apart(
    packages: ModuleType, name: str, seen: Callable[..., None]
) -> None:
    qkv = torch.stack([QUERY, KEY, VALUE], 2)
    tensors = (qkv.flatten(0, 1), STARTS_K, 9) if "varlen" in name else (qkv,)
    error = close(entropies(Caller(packages, name, causal=True), *tensors), expected(QUERY, KEY, is_causal=True))
    seen("flash_attn", name, STAND_IN, error_nats=error)


def test_grouped_heads_and_a_softcap_of_flash_attn_count(packages: ModuleType) -> None:
    found = entropies(Caller(packages, "flash_attn_func", softcap=0.3), QUERY, KEY[:, :, :2], VALUE[:, :, :2])
    close(found, expected(QUERY, KEY[:, :, :2], enable_gqa=True, softcap=0.3))


def flash_3(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: Any = None,
    q_descale: Any = None, window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: Any = None, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    return flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window_size, softcap)


def flash_4(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Tensor | None = None,
    softcap: float = 0.0, mask_mod: Any = None,
) -> Tensor:  # fmt: skip
    return flash_attn_func(q, k, v, 0.0, softmax_scale, causal, (3, 0), softcap)


FLASH_HOMES = [
    ("flash_attn_interface", flash_3, {}),
    ("flash_attn3_1a2b3c.flash_attn_interface", flash_3, {}),
    ("flash_attn.cute.interface", flash_4, {"window_size": (3, None)}),
]
"""flash_attn 3 and 4, and a kernel from the Hub, whose arguments stand in another order."""


@pytest.mark.parametrize(("home", "function", "options"), FLASH_HOMES)
def test_other_versions_of_flash_attn_are_read_by_the_names_of_their_arguments(
    home: str, function: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(home)
    monkeypatch.setattr(module, "flash_attn_func", function, raising=False)
    monkeypatch.setitem(sys.modules, home, module)
    model = Caller(module, "flash_attn_func", **options)
    window = {"window_size": (3, -1), "causal_alignment": "bottom-right"} if options else {}
    close(entropies(model, QUERY, KEY, VALUE, 0.7, True), expected(QUERY, KEY, is_causal=True, scale=0.7, **window))


def test_a_learnable_sink_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = installed(monkeypatch, "flash_attn.cute.interface")
    monkeypatch.setattr(module, "flash_attn_func", flash_4, raising=False)
    sink = torch.randn(4)
    found = entropies(Caller(module, "flash_attn_func", learnable_sink=sink), QUERY, KEY, VALUE)
    close(found, expected(QUERY, KEY, sink_logits=sink))


def unknown(*args: Any, **kwargs: Any) -> Tensor:
    return args[0]


@pytest.mark.parametrize(
    ("function", "options", "why"),
    [
        (flash_attn_func, {"alibi_slopes": torch.ones(4)}, "adds ALiBi slopes"),
        (flash_3, {"qv": QUERY}, "its flash_3 is called with qv=, which is not known here"),
        (flash_3, {"attention_chunk": 4}, "called with attention_chunk="),
        (flash_4, {"mask_mod": print}, "called with mask_mod="),
        (unknown, {"causal": True}, "its unknown has no tensor q"),
    ],
)
def test_what_flash_attn_is_told_beside_that_makes_the_call_skipped_by_name(
    function: Any, options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = installed(monkeypatch, "flash_attn.flash_attn_interface")
    monkeypatch.setattr(module, "flash_attn_func", function, raising=False)
    found = reason(Caller(module, "flash_attn_func", **options), QUERY, KEY, VALUE)
    assert why in found
    assert "put attemper.tap beside it" in found


@pytest.mark.parametrize(
    ("name", "tensors", "options", "why"),
    [
        ("flash_attn_with_kvcache", (QUERY, KEY, VALUE), {}, "reads and writes an internal cache"),
        ("flash_attn_varlen_func", (*FLAT, STARTS_Q, STARTS_K, 5, 9), {"block_table": STARTS_Q}, "reads a paged cache"),
        ("memory_efficient_attention", (QUERY, KEY, VALUE), {"attn_bias": object()}, "its xformers mask is a object"),
        ("memory_efficient_attention", (QUERY[:, :, None], KEY, VALUE), {}, "grouped heads"),
        ("memory_efficient_attention_partial", (QUERY, KEY, VALUE), {}, "over a part of the keys"),
    ],
)
def test_what_cannot_be_told_is_skipped_by_name(
    packages: ModuleType, name: str, tensors: tuple[Any, ...], options: dict[str, Any], why: str
) -> None:
    found = reason(Caller(packages, name, **options), *tensors)
    assert why in found
    assert "put attemper.tap beside it" in found


def test_a_function_of_the_same_name_elsewhere_is_somebodys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many models bring a ``flash_attn_func`` of their own along, with other shapes: what is inside it is seen."""

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    module = installed(monkeypatch, "somebodys")
    monkeypatch.setattr(module, "flash_attn_func", own, raising=False)
    heads_first = [part.transpose(1, 2) for part in (QUERY, KEY, VALUE)]
    close(entropies(Caller(module, "flash_attn_func"), *heads_first), expected(QUERY, KEY, is_causal=True))


def test_memory_efficient_attention_is_seen(packages: ModuleType, seen: Callable[..., None]) -> None:
    found = entropies(Caller(packages, "memory_efficient_attention", scale=0.4), QUERY, KEY, VALUE)
    error = close(found, expected(QUERY, KEY, scale=0.4))
    seen("xformers", "memory_efficient_attention", STAND_IN, error_nats=error)


def test_memory_efficient_attention_is_seen_where_it_is_exported_again(packages: ModuleType) -> None:
    found = entropies(Caller(sys.modules["xformers.ops"], "memory_efficient_attention"), QUERY, KEY, VALUE)
    close(found, expected(QUERY, KEY))


@pytest.mark.parametrize("dimensions", [3, 4])
def test_a_bias_of_memory_efficient_attention_is_added(packages: ModuleType, dimensions: int) -> None:
    bias = torch.randn(2, 4, 9, 9) if dimensions == 4 else torch.randn(2, 9, 9)
    tensors = [part if dimensions == 4 else part[:, :, 0] for part in (QUERY, KEY, VALUE)]
    found = entropies(Caller(packages, "memory_efficient_attention", attn_bias=bias), *tensors)
    heads = slice(None) if dimensions == 4 else slice(0, 1)
    close(found, expected(QUERY[:, :, heads], KEY[:, :, heads], bias if dimensions == 4 else bias[:, None]))


@pytest.mark.parametrize(
    ("name", "alignment"),
    [("LowerTriangularMask", "top-left"), ("LowerTriangularFromBottomRightMask", "bottom-right")],
)
def test_triangles_of_xformers_are_causality(packages: ModuleType, name: str, alignment: str) -> None:
    bias = type(name, (), {"__module__": "xformers.ops.fmha.attn_bias"})()
    found = entropies(Caller(packages, "memory_efficient_attention", attn_bias=bias), QUERY[:, :5], KEY, VALUE)
    close(found, expected(QUERY[:, :5], KEY, is_causal=True, causal_alignment=alignment))


@pytest.mark.parametrize(
    ("name", "home"), [("LowerTriangularMask", "mine"), ("LowerTriangularMaskWithTensorBias", "xformers.ops.fmha")]
)
def test_a_triangle_that_is_not_xformers_or_adds_something_is_skipped(
    packages: ModuleType, name: str, home: str
) -> None:
    bias = type(name, (), {"__module__": home})()
    found = reason(Caller(packages, "memory_efficient_attention", attn_bias=bias), QUERY, KEY, VALUE)
    assert f"its xformers mask is a {name}" in found


def test_every_reference_is_put_back(packages: ModuleType) -> None:
    model = Caller(packages, "flash_attn_func")
    with attemper.watch(model):
        model(QUERY, KEY, VALUE)
    assert packages.flash_attn_func is flash_attn_func
    assert sys.modules["flash_attn.flash_attn_interface"].flash_attn_func is flash_attn_func


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """torch's, which runs on CUDA only, in plain PyTorch."""
    return flash_attn_varlen_func(
        query, key, value, cu_seq_q, cu_seq_q if cu_seq_k is None else cu_seq_k, max_q, max_k, softmax_scale=scale,
        window_size=window_size,
    )  # fmt: skip


def varlen_attn_out(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return out.copy_(varlen_attn(*args, **kwargs))


TORCH_VARLEN = torch_varlen.varlen_attn


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(torch_varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(torch_varlen, "varlen_attn_out", varlen_attn_out)
    return torch_varlen


def test_the_stand_in_of_varlen_attn_has_the_parameters_of_torchs() -> None:
    ours, theirs = (inspect.signature(function).parameters for function in (varlen_attn, TORCH_VARLEN))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_torchs_varlen_attention_is_seen_with_its_windows(
    varlen: ModuleType, window: tuple[int, int], seen: Callable[..., None]
) -> None:
    model = Caller(varlen, "varlen_attn", window_size=window, scale=0.6)
    found = entropies(model, *FLAT, STARTS_Q, STARTS_K, 5, 9)
    error = close(found, expected(QUERY[:, :5], KEY, causal_alignment="bottom-right", window_size=window, scale=0.6))
    seen("torch", "varlen_attn", STAND_IN, error_nats=error)


def test_grouped_heads_of_torchs_varlen_attention_are_shared(varlen: ModuleType) -> None:
    tensors = (FLAT[0], *(part[:, :2] for part in FLAT[1:]), STARTS_Q, STARTS_K, 5, 9)
    found = entropies(Caller(varlen, "varlen_attn", enable_gqa=True), *tensors)
    close(found, expected(QUERY[:, :5], KEY[:, :, :2], enable_gqa=True))


def test_torchs_varlen_attention_into_a_given_tensor_is_seen(varlen: ModuleType) -> None:
    found = entropies(Caller(varlen, "varlen_attn_out"), torch.empty(10, 4, 8), *FLAT, STARTS_Q, STARTS_K, 5, 9)
    close(found, expected(QUERY[:, :5], KEY))


@pytest.mark.parametrize(
    ("starts", "options"),
    [
        (STARTS_K, {"seqused_k": torch.tensor([4, 9], dtype=torch.int32)}),
        (STARTS_K, {"block_table": torch.zeros(2, 1, dtype=torch.int32)}),
        (None, {}),
    ],
)
def test_a_cache_that_torchs_varlen_attention_reads_is_skipped_by_name(
    varlen: ModuleType, starts: Tensor | None, options: dict[str, Any]
) -> None:
    tensors = [part[:5] for part in FLAT] if starts is None else FLAT
    first = torch.tensor([0, 5], dtype=torch.int32) if starts is None else STARTS_Q
    found = reason(Caller(varlen, "varlen_attn", **options), *tensors, first, starts, 5, 9)
    assert "reads an internal cache" in found


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_score_rule_of_flex_attention_is_skipped_by_name() -> None:
    heads_first = [part.transpose(1, 2) for part in (QUERY, KEY, VALUE)]
    model = Caller(flex, "flex_attention", score_mod=lambda score, b, h, i, j: score + i - j)
    assert "changes scores by a custom score_mod" in reason(model, *heads_first)


class DotProductAttention(nn.Module):
    """TransformerEngine's, as far as anybody outside sees it: its kernel is none that is known."""

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **_: Any) -> Tensor:
        weights = (query_layer.transpose(1, 2) @ key_layer.transpose(1, 2).transpose(2, 3)).softmax(-1)
        return (weights @ value_layer.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.core = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.core(query, key, value)


class MegatronAttention(DotProductAttention):
    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [DotProductAttention, MegatronAttention])
def test_transformer_engine_is_skipped_by_name_and_points_to_the_tap(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch, seen: Callable[..., None]
) -> None:
    installed(monkeypatch, "transformer_engine.pytorch", DotProductAttention)
    plain = DotProductAttention.forward
    found = reason(Block(kind()), QUERY, KEY, VALUE)
    assert "core: TransformerEngine chooses layout, mask and kernel inside; put attemper.tap beside it" in found
    assert DotProductAttention.forward is plain
    why = "layout, mask and kernel are chosen inside; attemper.tap measures it"
    seen("TransformerEngine", "DotProductAttention", "module (stand-in)", skipped=why)
