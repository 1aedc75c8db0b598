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
WHOLE, CROSS, GROUPED = (QUERY, KEY, VALUE), (QUERY[:, :5], KEY, VALUE), (QUERY, KEY[:, :, :2], VALUE[:, :, :2])
FLAT = [part.flatten(0, 1) for part in CROSS]
PACKED = (*FLAT, STARTS_Q, STARTS_K, 5, 9)
QKV, KV = torch.stack(WHOLE, 2), torch.stack(WHOLE[1:], 2)
BIAS = torch.randn(2, 4, 9, 9)


def flash_attn_qkvpacked_func(qkv: Tensor, causal: bool = False) -> Tensor:
    query, key, value = qkv.unbind(2)
    return flash_attn_func(query, key, value, causal=causal)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    key, value = kv.unbind(2)
    return flash_attn_func(q, key, value, causal=causal, window_size=window_size)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool = False) -> Tensor:
    query, key, value = qkv.unbind(1)
    starts = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(query, key, value, *starts, causal=causal)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    key, value = kv.unbind(1)
    starts = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(q, key, value, *starts, causal=causal, window_size=window_size)


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
vars(varlen_attn_out)["__signature__"] = inspect.signature(torch_varlen.varlen_attn_out)


def installed(monkeypatch: pytest.MonkeyPatch, name: str, *things: Any, **named: Any) -> ModuleType:
    """A module of this name that holds these functions and classes."""
    module = ModuleType(name)
    vars(module).update({thing.__name__: thing for thing in things}, **named)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Modules under the names of the packages, and one that has imported the functions as people do."""
    xformers = (memory_efficient_attention, memory_efficient_attention_partial)
    installed(monkeypatch, "flash_attn.flash_attn_interface", *FLASH_2)
    installed(monkeypatch, "xformers.ops.fmha", *xformers)
    installed(monkeypatch, "xformers.ops", *xformers)
    for function in (varlen_attn, varlen_attn_out):
        monkeypatch.setattr(torch_varlen, function.__name__, function)
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


def test_the_stand_in_of_varlen_attn_has_the_parameters_of_torchs() -> None:
    ours, theirs = (inspect.signature(function).parameters for function in (varlen_attn, TORCH_VARLEN))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def triangle(name: str, home: str = "xformers.ops.fmha.attn_bias") -> object:
    """A mask of xformers, or one of somebody else's."""
    return type(name, (), {"__module__": home})()


WINDOW = {"causal": True, "window_size": (3, 0)}
RIGHT: dict[str, Any] = {"causal_alignment": "bottom-right"}
BOTTOM_RIGHT = RIGHT | {"is_causal": True, "window_size": (3, 0)}
XFORMERS, VARLEN = "memory_efficient_attention", "varlen_attn"
Case = tuple[str, tuple[Any, ...], dict[str, Any], tuple[Tensor, ...], dict[str, Any]]
RECORDED: tuple[Case, ...] = (
    # flash_attn aligns causality and windows to the bottom right
    ("flash_attn_func", CROSS, WINDOW, CROSS[:2], BOTTOM_RIGHT),
    ("flash_attn_kvpacked_func", (CROSS[0], KV), WINDOW, CROSS[:2], BOTTOM_RIGHT),
    ("flash_attn_varlen_func", PACKED, WINDOW, CROSS[:2], BOTTOM_RIGHT),
    ("flash_attn_varlen_kvpacked_func", (FLAT[0], KV.flatten(0, 1), *PACKED[3:]), WINDOW, CROSS[:2], BOTTOM_RIGHT),
    ("flash_attn_qkvpacked_func", (QKV,), {"causal": True}, WHOLE[:2], {"is_causal": True}),
    ("flash_attn_varlen_qkvpacked_func", (QKV.flatten(0, 1), STARTS_K, 9), {"causal": True}, WHOLE[:2],
     {"is_causal": True}),
    (XFORMERS, WHOLE, {"scale": 0.4}, WHOLE[:2], {"scale": 0.4}),
    *((VARLEN, PACKED, {"window_size": window, "scale": 0.6}, CROSS[:2], RIGHT | {"window_size": window, "scale": 0.6})
      for window in ((-1, -1), (-1, 0), (3, 0), (2, 1))),
)  # fmt: skip
"""A function, what it is called with, and the attention that it is: queries, keys and mask, and options."""
MORE: tuple[Case, ...] = (
    ("flash_attn_func", WHOLE, {"softmax_scale": 0.7, "alibi_slopes": None}, WHOLE[:2], {"scale": 0.7}),
    ("flash_attn_func", WHOLE, {"causal": True, "softmax_scale": 0.7}, WHOLE[:2], {"is_causal": True, "scale": 0.7}),
    ("flash_attn_func", GROUPED, {"softcap": 0.3}, GROUPED[:2], {"enable_gqa": True, "softcap": 0.3}),
    (XFORMERS, WHOLE, {"attn_bias": BIAS}, (QUERY, KEY, BIAS), {}),
    (XFORMERS, tuple(part[:, :, 0] for part in WHOLE), {"attn_bias": BIAS[:, 0]},
     (QUERY[:, :, :1], KEY[:, :, :1], BIAS[:, :1]), {}),
    (XFORMERS, CROSS, {"attn_bias": triangle("LowerTriangularMask")}, CROSS[:2], {"is_causal": True}),
    (XFORMERS, CROSS, {"attn_bias": triangle("LowerTriangularFromBottomRightMask")}, CROSS[:2],
     RIGHT | {"is_causal": True}),
    (VARLEN, (FLAT[0], *(part[:, :2] for part in FLAT[1:]), *PACKED[3:]), {"enable_gqa": True},
     (CROSS[0], GROUPED[1]), {"enable_gqa": True}),
    ("varlen_attn_out", (torch.empty(10, 4, 8), *PACKED), {}, CROSS[:2], {}),
)  # fmt: skip


@pytest.mark.parametrize("case", [*RECORDED, *MORE], ids=lambda case: case[0])
def test_a_function_of_a_package_is_seen_with_all_that_it_is_told(
    case: Case, packages: ModuleType, seen: Callable[..., None]
) -> None:
    name, tensors, given, attention, options = case
    package = torch_varlen if name.startswith(VARLEN) else packages
    error = close(entropies(Caller(package, name, **given), *tensors), expected(*attention, **options))
    library = "torch" if name == VARLEN else "xformers" if name == XFORMERS else "flash_attn"
    if any(case is one for one in RECORDED):
        seen(library, name, STAND_IN, error_nats=error)


def test_a_function_that_is_exported_again_is_seen_and_every_reference_is_put_back(packages: ModuleType) -> None:
    close(entropies(Caller(sys.modules["xformers.ops"], XFORMERS), *WHOLE), expected(*WHOLE[:2]))
    for home in (packages, sys.modules["xformers.ops"], sys.modules["xformers.ops.fmha"]):
        assert home.memory_efficient_attention is memory_efficient_attention


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
    ("flash_attn.cute.interface", flash_4, {"window_size": (3, None), "learnable_sink": torch.randn(4)}),
]
"""flash_attn 3 and 4, and a kernel from the Hub, whose arguments stand in another order."""


@pytest.mark.parametrize(("home", "function", "options"), FLASH_HOMES)
def test_other_versions_of_flash_attn_are_read_by_the_names_of_their_arguments(
    home: str, function: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = installed(monkeypatch, home, flash_attn_func=function)
    wanted: dict[str, Any] = {"is_causal": True, "scale": 0.7}
    wanted |= RIGHT | {"window_size": (3, -1), "sink_logits": options["learnable_sink"]} if options else {}
    close(entropies(Caller(module, "flash_attn_func", **options), *WHOLE, 0.7, True), expected(*WHOLE[:2], **wanted))


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
    module = installed(monkeypatch, "flash_attn.flash_attn_interface", flash_attn_func=function)
    found = reason(Caller(module, "flash_attn_func", **options), *WHOLE)
    assert why in found
    assert "put attemper.tap beside it" in found


@pytest.mark.parametrize(
    ("name", "tensors", "options", "why"),
    [
        ("flash_attn_with_kvcache", WHOLE, {}, "reads and writes an internal cache"),
        ("flash_attn_varlen_func", PACKED, {"block_table": STARTS_Q}, "reads a paged cache"),
        (XFORMERS, WHOLE, {"attn_bias": object()}, "its xformers mask is a object"),
        (XFORMERS, (QUERY[:, :, None], KEY, VALUE), {}, "grouped heads"),
        (f"{XFORMERS}_partial", WHOLE, {}, "over a part of the keys"),
        (XFORMERS, WHOLE, {"attn_bias": triangle("LowerTriangularMask", "mine")}, "mask is a LowerTriangularMask"),
        (XFORMERS, WHOLE, {"attn_bias": triangle("LowerTriangularMaskWithTensorBias")}, "MaskWithTensorBias"),
        (VARLEN, PACKED, {"seqused_k": torch.tensor([4, 9], dtype=torch.int32)}, "reads an internal cache"),
        (VARLEN, PACKED, {"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "reads an internal cache"),
        (VARLEN, (*(part[:5] for part in FLAT), torch.tensor([0, 5], dtype=torch.int32), None, 5, 9), {},
         "reads an internal cache"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_skipped_by_name(
    packages: ModuleType, name: str, tensors: tuple[Any, ...], options: dict[str, Any], why: str
) -> None:
    found = reason(Caller(torch_varlen if name == VARLEN else packages, name, **options), *tensors)
    assert why in found
    assert "put attemper.tap beside it" in found


def test_a_function_of_the_same_name_elsewhere_is_somebodys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many models bring a ``flash_attn_func`` of their own along, with other shapes: what is inside it is seen."""

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    module = installed(monkeypatch, "somebodys", flash_attn_func=own)
    heads_first = [part.transpose(1, 2) for part in (QUERY, KEY, VALUE)]
    close(entropies(Caller(module, "flash_attn_func"), *heads_first), expected(QUERY, KEY, is_causal=True))


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
