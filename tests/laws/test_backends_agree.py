"""Any call: the blocked backend, however tiled, gives what the reference gives, results and gradients, in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attemper.statistics import NAMES
from tests.support import calls
from tests.support.cases import tells_own_key

FIXED = ("visible_keys", "support_size")


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@st.composite
def any_call(draw: st.DrawFn) -> tuple[dict[str, Any], tuple[int, ...], tuple[str, ...]]:
    """Arguments of ``attention``, a tile, and statistics to ask for."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch, groups, repeats = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys, size = draw(st.integers(1, 9)), draw(st.integers(1, 12)), draw(st.integers(1, 4))
    heads, spread = groups * repeats, draw(st.sampled_from([0.3, 2.0, 10.0]))
    call: dict[str, Any] = {
        "query": normal(generator, batch, heads, queries, size) * spread,
        "key": normal(generator, batch, groups, keys, size),
        "value": normal(generator, batch, groups, keys, draw(st.integers(1, 4))),
        "enable_gqa": repeats > 1,
        "is_causal": draw(st.booleans()),
        "causal_alignment": draw(st.sampled_from(["top-left", "bottom-right"])),
        "window_size": (draw(st.integers(-1, 5)), draw(st.integers(-1, 5))),
        "first_tokens": draw(st.integers(1, 4)),
        "softcap": draw(st.sampled_from([None, None, 3.0, 30.0])),
        "scale": draw(st.sampled_from([None, 0.7, -0.4])),
    }

    def broadcast(*shape: int) -> list[int]:
        return [n if draw(st.booleans()) else 1 for n in shape]

    mask = draw(st.sampled_from(["none", "bool", "bias", "both"]))
    if mask != "none":
        visible = torch.rand(broadcast(batch, heads, queries, keys), generator=generator) < draw(
            st.sampled_from([0.3, 0.8])
        )
        bias = normal(generator, *broadcast(batch, heads, queries, keys)[draw(st.integers(0, 3)) :])
        call["attn_mask"] = visible if mask == "bool" else bias
        if mask == "both":
            call["attn_mask"] = torch.where(visible, bias, -torch.inf)
    if draw(st.booleans()):
        call["sink_logits"] = normal(generator, heads) * 3
    if draw(st.booleans()):
        shape = broadcast(batch, heads, queries)
        call["temperature"] = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.3
    tile = (draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.sampled_from([1, 10, 100, 10_000])))
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=len(NAMES)))
    if not tells_own_key(call, queries, keys):
        names = [name for name in names if name != "self_weight"] or ["entropy"]
    call["spans"] = torch.rand((batch if draw(st.booleans()) else 1, keys), generator=generator) < 0.5
    return call, tile, tuple(names)


def results(backend: str, call: dict[str, Any], names: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a call returns, and gradients of all of it with fixed random gradients from above."""
    tensors = {
        name: value.detach().clone().requires_grad_()
        for name, value in call.items()
        if isinstance(value, Tensor) and value.dtype != torch.bool
    }
    output, stats = calls.attended(backend, **(call | tensors), stats=names)
    got = {"output": output, **{name: stats[name] for name in names}}
    generator = torch.Generator().manual_seed(0)
    above = {name: normal(generator, *value.shape) for name, value in got.items()}
    # mass is a constant where there is no sink, and then one backend has no graph for it.
    smooth = [name for name in got if name not in FIXED and got[name].requires_grad]
    grads = torch.autograd.grad(
        [got[name] for name in smooth], list(tensors.values()), [above[name] for name in smooth], allow_unused=True
    )
    return got, {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(tensors.items(), grads, strict=True)
    }


def assert_same(call: dict[str, Any], tile: tuple[int, ...], names: tuple[str, ...], tiled) -> None:
    want, want_grads = results("reference", call, names)
    tiled(*tile)
    got, got_grads = results("blocked", call, names)
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
    for name, value in want_grads.items():
        size = max(1.0, value.abs().max().item()) if value.numel() else 1.0
        torch.testing.assert_close(
            got_grads[name], value, rtol=1e-8, atol=1e-10 * size, msg=lambda text, name=name: f"d{name}: {text}"
        )


@pytest.mark.slow("tests/fuzz holds all backends against the oracle by default")
@settings(max_examples=3 * settings().max_examples)
@given(drawn=any_call())
def test_blocked_gives_what_the_reference_gives(drawn: Any, tiled):
    call, tile, names = drawn
    assert_same(call, tile, names, tiled)


@pytest.mark.slow("tests/fuzz holds all backends against the oracle by default")
@settings(max_examples=2 * settings().max_examples)
@given(drawn=any_call(), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_blocked_gives_what_the_reference_gives_on_packed_documents(drawn: Any, lengths: list[int], tiled):
    call, tile, names = drawn
    total, (_, heads, _, size), groups = sum(lengths), call["query"].shape, call["key"].shape[1]
    generator = torch.Generator().manual_seed(0)
    tensors = [normal(generator, total, n, size) for n in (heads, groups, groups)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    skipped = ("query", "key", "value", "attn_mask", "temperature")
    options = {name: value for name, value in call.items() if name not in skipped}
    options["spans"] = torch.arange(total) % 3 == 1
    outcomes = []
    for backend in ("reference", "blocked"):
        if backend == "blocked":
            tiled(*tile)
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output, stats = calls.packed(backend, *leaves, offsets, offsets, stats=names, **options)
        loss = output.square().sum() + sum(
            stats[n].nan_to_num(neginf=0.0).square().sum() for n in names if stats[n].requires_grad
        )
        outcomes.append(([output, *(stats[name] for name in names)], torch.autograd.grad(loss, leaves)))
    for one, two in zip(outcomes[0][0], outcomes[1][0], strict=True):
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-10)
    for one, two in zip(outcomes[0][1], outcomes[1][1], strict=True):
        torch.testing.assert_close(two, one, rtol=1e-7, atol=1e-8)
