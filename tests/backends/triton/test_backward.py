"""The backward kernels where the table of features does not reach: statistics alone, documents, sampled rows, broadcast
biases, parts of the gradients, rows that see nothing, and which blocks are visited at all."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import attemper
from attemper.backends.contract import Problem
from attemper.backends.triton import launch
from attemper.backends.triton.scores import intervals
from attemper.backends.triton.softmax.backward_key import row_blocks
from attemper.backends.triton.tuning import Config
from attemper.call.normalizer import Normalization
from attemper.statistics import ONE_PASS, ROWWISE_ONE_PASS
from attemper.types import AttentionStats
from tests.backends.triton.test_rowwise import computed
from tests.support import oracle
from tests.support.calls import attended

pytestmark = [pytest.mark.each, pytest.mark.usefixtures("poisoned_empty")]

NAMES = tuple(name for name in ONE_PASS if name not in oracle.INTEGERS)
UNIT = 2.0**-24


def gradients(function: Any, call: dict[str, Any], names: tuple[str, ...], backend: str, dtype: torch.dtype) -> Any:
    """d(sum of the results times numbers drawn once) by every floating tensor of the call."""
    found = computed(call, "softmax", names, backend, dtype, function)
    return {name: found[f"d{name}"] for name in call if f"d{name}" in found}


def assert_as_exact_as_blocked(function: Any, call: dict[str, Any], names: tuple[str, ...]) -> None:
    """Every gradient is within twice the error of blocked plus 8 roundings of the largest entry, against float64.

    That of one temperature per head is a sum that cancels: see ``terms_of_temperature``. Its budget has 4 roundings of
    what is added.
    """
    truth = gradients(function, call, names, "reference", torch.float64)
    blocked = gradients(function, call, names, "blocked", torch.float32)
    for name, got in gradients(function, call, names, "triton", torch.float32).items():
        assert torch.isfinite(got).all(), name
        error, yardstick = ((g.double() - truth[name]).abs().max() for g in (got, blocked[name]))
        roundings = 8 * truth[name].abs().max()
        if name == "temperature":
            roundings = 4 * terms_of_temperature(function, call, names, truth[name])
        budget = 2 * yardstick + UNIT * roundings
        assert error <= budget, f"d{name}: error {error:.2e}, budget {budget:.2e}"


def terms_of_temperature(function: Any, call: dict[str, Any], names: tuple[str, ...], wanted: Tensor) -> Tensor:
    """The largest sum of ``|dS S| / T`` of a head: dT = -sum dS S / T, over all keys and rows, is what is left of it.

    dS adds up to 0 along a row, S does not: dT is 5 to 40 times smaller than what is added, and the four sums of the
    test differ from one draw to the next by luck. Within twice the error of blocked plus 8 roundings of dT itself
    were, of effective_tokens, 35 of 40 draws before distances were kept in bits and 33 of 40 since; the
    root mean square error of a row, in roundings, was 52 before and is 50 since, that of blocked is 44. In roundings of what is added the
    largest error of a draw is 3.4 in the median and at most 6.2 (blocked 2.6 and 4.0), of entropy 1.7 and 2.8 (0.8 and 1.3).
    """
    query, key, temperature = (call[part].double() for part in ("query", "key", "temperature"))
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT / math.sqrt(query.shape[3])
    scores /= temperature[..., None]
    bias = torch.zeros_like(scores)
    above = gradients(function, call | {"attn_mask": bias}, names, "reference", torch.float64)["attn_mask"]
    terms = above * scores / temperature[..., None]
    torch.testing.assert_close(-terms.sum((2, 3))[..., None], wanted)
    return terms.abs().sum((2, 3)).max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("logit_variance")
def test_a_statistic_without_values_has_the_reference_gradient(name: str, tiled):
    tiled(4, 8)
    call = {"query": 2 * torch.randn(1, 4, 9, 6), "key": torch.randn(1, 2, 19, 6), "enable_gqa": True}
    call |= {"is_causal": True, "causal_alignment": "bottom-right", "temperature": torch.rand(1, 4, 1) + 0.5}
    if name == "mass":
        call["sink_logits"] = torch.randn(4)
    assert_as_exact_as_blocked(attemper.attention_statistics, call, (name,))


@pytest.mark.parametrize(
    "options",
    [
        {"window_size": (5, 2)}, {"is_causal": True, "window_size": (7, -1), "softcap": 4.0},
        {"attn_mask": torch.rand(1, 1, 40, 33, generator=torch.Generator().manual_seed(0)) < 0.6},
        {"is_causal": True, "causal_alignment": "bottom-right"},
    ],
    ids=["window", "causal window, softcap", "mask", "bottom-right"],
)  # fmt: skip
@pytest.mark.quick("causal window")
def test_sampled_rows_have_the_reference_gradient(options: dict[str, Any], tiled):
    tiled(4, 8)
    query, key = 2 * torch.randn(1, 2, 40, 5), torch.randn(1, 2, 33, 5)
    call = {"query": query, "key": key, "rows": 7, **options}
    assert_as_exact_as_blocked(attemper.attention_statistics, call, NAMES[:-1])


BOTTOM_RIGHT = {"causal_alignment": "bottom-right"}
LENGTHS = {
    "longer keys": ((3, 9, 4), (8, 9, 11)),
    "longer queries": ((8, 5, 9), (3, 5, 4)),
    "empty documents": ((0, 7, 0, 6, 0), (0, 4, 5, 6, 0)),
    "queries without keys": ((4, 5, 3), (6, 0, 2)),
    "one document": ((7,), (10,)),
    "many of one token": ((1,) * 9, (1,) * 9),
}


MORE = pytest.mark.long("more cases in Triton's interpreter")


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize(
    "options", [{"is_causal": True, **BOTTOM_RIGHT}, pytest.param({"window_size": (2, 1)}, marks=MORE)], ids=str
)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.quick("empty documents")
def test_packed_documents_have_the_reference_gradient(lengths: str, options: dict[str, Any], tiled):
    tiled(4, 4)
    of_queries, of_keys = LENGTHS[lengths]
    call = {
        "query": 2 * torch.randn(sum(of_queries), 4, 5),
        "key": torch.randn(sum(of_keys), 2, 5),
        "value": torch.randn(sum(of_keys), 2, 3),
        "cu_seqlens_q": torch.tensor((0, *itertools.accumulate(of_queries)), dtype=torch.int32),
        "cu_seqlens_k": torch.tensor((0, *itertools.accumulate(of_keys))),
        "enable_gqa": True,
        **options,
    }
    assert_as_exact_as_blocked(attemper.varlen_attention, call, ("entropy", "logit_variance"))


@pytest.mark.slow("takes many seconds")
@pytest.mark.quick("(2, 1, 9)-float32")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", list(itertools.product((1, 2), (1, 4), (1, 9))), ids=str)
def test_the_gradient_of_a_bias_is_summed_over_what_it_was_broadcast_over(shape: tuple[int, ...], kind: str, tiled):
    tiled(4, 8)
    if kind != "float32" and shape != (1, 4, 9):
        pytest.skip("other types differ in how the mask is read, not in how its gradient is summed")
    bias = torch.randn(*shape, 11).to(getattr(torch, kind))
    bias[..., 4] = -torch.inf
    query, key, value = 2 * torch.randn(2, 4, 9, 5), torch.randn(2, 2, 11, 5), torch.randn(2, 2, 11, 3)
    grads = {}
    for backend, dtype in (("reference", torch.float64), ("blocked", torch.float32), ("triton", torch.float32)):
        leaf = bias.clone().requires_grad_()
        output, stats = attemper.attention(
            query.to(dtype), key.to(dtype), value.to(dtype), leaf, enable_gqa=True, is_causal=True,
            sink_logits=torch.ones(4), softcap=6.0, stats=("entropy", "max_logit"), backend=backend,
        )  # fmt: skip
        assert stats is not None
        loss = output.double().square().sum() + (stats.entropy + stats.max_logit).double().square().sum()
        grads[backend] = torch.autograd.grad(loss, leaf)[0]
    assert grads["triton"].dtype == bias.dtype
    error, yardstick = (
        (grads[name].double() - grads["reference"].double()).abs().max() for name in ("triton", "blocked")
    )
    own = UNIT if kind != "bfloat16" else 2.0**-8
    assert error <= 2 * yardstick + 8 * max(own, UNIT) * grads["reference"].abs().max().double()
    assert (grads["triton"][..., 4] == 0).all()


OWN = {"softmax": torch.tensor([-0.5, 0.7]), "entmax": torch.tensor([1.3, 1.8]), "sigmoid": torch.tensor([-1.0, 0.5])}
PLACES = ("query", "key", "value", "attn_mask", "temperature", "own")
"""``own``: logits of softmax's sink, alpha of entmax, the bias of sigmoids."""


def called(chosen: str, tensors: dict[str, Any], names: tuple[str, ...]) -> tuple[Tensor, AttentionStats]:
    options = {name: value for name, value in tensors.items() if name != "own"}
    if chosen == "softmax":
        return attended("triton", **options, sink_logits=tensors["own"], stats=names)
    normalizer = Normalization(chosen, per_head=tensors["own"]) if "own" in tensors else Normalization(chosen, 3.0)
    return attended("triton", **options, normalizer=normalizer, stats=names)


@pytest.mark.parametrize("chosen", ["softmax", "entmax"])
@pytest.mark.parametrize("wanted", [(place,) for place in PLACES] + [("key", "own"), ("query", "value")], ids=str)
@pytest.mark.quick("('key', 'own')-softmax")
def test_a_gradient_is_the_same_whatever_else_is_wanted(wanted: tuple[str, ...], chosen: str):
    call = {
        "query": torch.randn(1, 2, 7, 5), "key": torch.randn(1, 2, 9, 5), "value": torch.randn(1, 2, 9, 5),
        "attn_mask": torch.randn(1, 1, 7, 9), "temperature": torch.rand(1, 2, 7) + 0.5, "own": OWN[chosen],
    }  # fmt: skip
    results = []
    for names in (PLACES, wanted):
        given: dict[str, Any] = {name: value.clone().requires_grad_(name in names) for name, value in call.items()}
        output, stats = called(chosen, given, ("entropy",))
        (output.square().sum() + stats.entropy.square().sum()).backward()
        results.append({name: given[name].grad for name in PLACES})
    for name in PLACES:
        if name in wanted:
            assert torch.equal(results[0][name], results[1][name]), name
        else:
            assert results[1][name] is None, name


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize(
    ("chosen", "hidden"),
    [("softmax", "by a mask"), ("softmax", "by the window"),
     *(pytest.param(name, "by a mask", marks=MORE) for name in ("entmax", "sigmoid", "sparsemax", "topk"))],
)  # fmt: skip
@pytest.mark.quick("window")
def test_a_row_that_sees_nothing_has_no_gradient_and_gives_none_whatever_comes_from_above(
    chosen: str, hidden: str, tiled
):
    tiled(4, 4)
    query, key, value = torch.randn(1, 2, 10, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
    empty = torch.tensor([2, 8, 9])
    query[:, :, empty] = torch.nan
    options: dict[str, Any] = {"is_causal": True, "window_size": (2, 0)}
    if hidden == "by a mask":
        options = {"attn_mask": torch.ones(10, 6, dtype=torch.bool).index_fill(0, empty, False)}
    else:
        query[:, :, 2] = 1.0
        empty = empty[1:]
    tensors = {"query": query, "key": key, "value": value} | ({"own": OWN[chosen]} if chosen in OWN else {})
    names = NAMES if chosen == "softmax" else tuple(name for name in ROWWISE_ONE_PASS if name not in oracle.INTEGERS)
    grads = []
    for poison in (1.0, torch.inf, torch.nan):
        given = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        output, stats = called(chosen, given | options, names)
        assert (output[:, :, empty] == 0).all()
        assert (stats.entropy[..., empty] == 0).all()
        results = [output, *(stats[name] for name in names if stats[name].requires_grad)]
        above = [torch.ones_like(result).index_fill(2, empty, poison) for result in results]
        grads.append(torch.autograd.grad(results, list(given.values()), above))
    for query_grad, *others in grads:
        assert (query_grad[:, :, empty] == 0).all()
        for other, first in zip(others, grads[0][1:], strict=True):
            assert torch.isfinite(other).all()
            assert torch.equal(other, first)


@pytest.mark.parametrize("chosen", ["softmax", pytest.param("entmax", marks=MORE)])
def test_offsets_of_64_bits_change_nothing(chosen: str, monkeypatch: pytest.MonkeyPatch, tiled):
    tiled(4, 8)
    call = {"query": torch.randn(1, 2, 7, 5), "key": torch.randn(1, 1, 13, 5), "value": torch.randn(1, 1, 13, 3)}
    call |= {"attn_mask": torch.randn(7, 13), "own": OWN[chosen]}
    found, asked = [], []
    for wide in (launch.wide, lambda tensors, block: asked.append(block) or True):
        monkeypatch.setattr(launch, "wide", wide)
        given = {name: tensor.clone().requires_grad_() for name, tensor in call.items()}
        output, stats = called(chosen, given | {"enable_gqa": True}, ("entropy",))
        loss = output.square().sum() + stats.entropy.sum()
        found.append([output, stats.entropy, *torch.autograd.grad(loss, list(given.values()))])
    assert len(asked) >= {"softmax": 4, "entmax": 2}[chosen]
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_the_gradient_of_a_maximum_goes_to_the_lowest_key_among_ties(tiled):
    tiled(2, 4)
    query, key = torch.ones(1, 1, 3, 1, requires_grad=True), torch.zeros(1, 1, 12, 1)
    key[0, 0, [5, 6, 11], 0] = 2.0
    key.requires_grad_()
    stats = attemper.attention_statistics(query, key, scale=1.0, stats=("max_logit",), backend="triton")
    (grad,) = torch.autograd.grad(stats.max_logit.sum(), key)
    assert grad.flatten().tolist() == [0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0]


@triton.jit
def visits(out, marks, structure, halvings, CALL: tl.constexpr, ROWS: tl.constexpr):
    """Of each block of keys: the rows that are visited and those taken to see all of it; of each row: its interval."""
    block = tl.program_id(0)
    start, before, inside_from, inside_to, edges = row_blocks(block * CALL.BLOCK_N, structure, halvings, CALL, False)
    tl.store(out + block * 5, start)
    tl.store(out + block * 5 + 1, before)
    tl.store(out + block * 5 + 2, inside_from)
    tl.store(out + block * 5 + 3, inside_to)
    tl.store(out + block * 5 + 4, edges)
    row = tl.arange(0, ROWS)
    low, high, _, _ = intervals(tl.minimum(row, structure.rows - 1), structure, CALL)
    tl.store(marks + row * 2, low)
    tl.store(marks + row * 2 + 1, high)


def structures() -> list[tuple[str, dict[str, Any], int, int]]:
    cases: list[tuple[str, dict[str, Any], int, int]] = []
    for left, right, offset in itertools.product((0, 3, 1 << 62), (-4, 0, 2, 1 << 62), (-5, 0, 6)):
        cases.append(("plain", {"left": left, "right": right, "bottom_right": offset != 0}, 13, 13 + (offset or 4)))
    positions = torch.tensor([0, 1, 4, 9, 10, 11, 20])
    for left, right in itertools.product((2, 1 << 62), (0, 3)):
        cases.append(("positions", {"left": left, "right": right, "positions": positions}, 7, 23))
    for (of_queries, of_keys), bottom in itertools.product(LENGTHS.values(), (False, True)):
        packing = {
            "cu_seqlens_q": torch.tensor((0, *itertools.accumulate(of_queries))),
            "cu_seqlens_k": torch.tensor((0, *itertools.accumulate(of_keys))),
            "bottom_right": bottom,
        }
        for left, right in ((1 << 62, 1 << 62), (1 << 62, 0), (2, 1)):
            given = {"left": left, "right": right, **packing}
            cases.append(("packed", given, sum(of_queries), sum(of_keys)))
            if not bottom:
                places = torch.cat([2 * torch.arange(length) for length in of_queries])
                cases.append(("sampled", given | {"positions": places}, sum(of_queries), sum(of_keys)))
    return cases


@MORE
def test_every_row_that_sees_a_key_is_visited_once_and_unmasked_blocks_are_seen_whole():
    skipped, rows_max = 0, 32
    for index, (name, given, rows, keys) in enumerate(structures()):
        query, key = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, keys, 1)
        problem = Problem(query, key, None, None, torch.ones(1, 1, 1), **given)
        block_m, block_n = ((4, 4), (2, 8))[index % 2]
        count = -(-keys // block_n)
        out, marks = torch.zeros(count, 5, dtype=torch.int32), torch.zeros(rows_max, 2, dtype=torch.int32)
        constants = launch.constants(problem, Config(block_m, block_n, 4, 1), 0)["CALL"]
        cast(Any, visits)[(count,)](
            out, marks, launch.structure(problem), rows.bit_length(), CALL=constants, ROWS=rows_max
        )
        low, high = marks[:rows, 0, None], marks[:rows, 1, None]
        visible = (torch.arange(keys) >= low) & (torch.arange(keys) < high)
        for number, (start, before, inside_from, inside_to, edges) in enumerate(out.tolist()):
            part = visible[:, number * block_n : (number + 1) * block_n]
            assert inside_from == start + before * block_m
            last = inside_to + (edges - before) * block_m
            assert not part[: max(start, 0)].any(), (name, given)
            assert not part[last:].any(), (name, given)
            assert part[inside_from:inside_to].all(), (name, given)
            assert inside_to <= max(rows, inside_from)
            skipped += rows - (min(last, rows) - start)
    assert skipped > 500
