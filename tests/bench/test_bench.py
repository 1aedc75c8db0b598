"""What ``attemper.bench`` measures: the right calls, checked first; never how long they took."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise, permutations
from typing import Any

import pytest
import torch

from attemper.bench.attention import measure, others, ours, peak_extra_bytes
from attemper.bench.hardware import kept_memory, machine, peak_flops, resident_bytes
from attemper.bench.shape import Shape
from attemper.bench.timing import rounds
from attemper.errors import BackendError, InputError
from attemper.functional import attention

SMALL = Shape.of("2,4,24,16")


def test_a_shape_is_read_with_and_without_key_heads():
    assert Shape.of("1,8,2048,64") == Shape(1, 8, 8, 2048, 2048, 64)
    assert Shape.of("8,32,8,1,8192,128", causal=True) == Shape(8, 32, 8, 1, 8192, 128, causal=True)
    for text in ("1,8,2048,64", "8,32,8,1,8192,128"):
        assert str(Shape.of(text)) == text


def test_a_shape_without_meaning_is_refused():
    for text in ("1,8,2048", "1,8,0,64", "1,8,3,4,4,16", "a,b,c,d", "", "1,8,2048,64.5"):
        with pytest.raises(InputError, match=r"B,H,N,D .* got"):
            Shape.of(text)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3)])
def test_operations_are_counted_over_visible_pairs(queries: int, keys: int):
    shape = Shape(2, 4, 2, queries, keys, 16)
    visible = int(torch.ones(queries, keys).tril().sum())
    assert shape.flops == 2 * 4 * queries * keys * 16 * 4
    assert replace(shape, causal=True).flops == 2 * 4 * visible * 16 * 4
    assert replace(shape, causal=True, backward=True).flops == 2 * 4 * visible * 16 * 14
    window = replace(shape, causal=True, window=2)
    near = torch.ones(queries, keys).tril().triu(-1)
    assert torch.equal(window.visible(torch.arange(queries)), near.bool())
    assert window.flops == 2 * 4 * int(near.sum()) * 16 * 4


ALL = {"sdpa", "two_sdpa_calls", "eager_entropy"}
WAYS: dict[str, tuple[Shape, set[str]]] = {
    "full": (SMALL, ALL),
    "causal": (replace(SMALL, causal=True), ALL),
    "window": (replace(SMALL, causal=True, window=7), {"sdpa", "eager_entropy"}),
    "one query of grouped heads": (Shape.of("2,8,2,1,40,16"), {"sdpa", "sdpa_packed_heads"}),
    **{dtype: (replace(SMALL, dtype=dtype), ALL) for dtype in ("bfloat16", "float16")},
    **{f"{dtype}, causal": (replace(SMALL, causal=True, dtype=dtype), ALL) for dtype in ("bfloat16", "float16")},
}


@pytest.mark.parametrize("name", WAYS)
def test_the_ways_to_attention_and_to_its_entropy_agree(name: str):
    shape, names = WAYS[name]
    ways = others(shape, shape.tensors())
    assert set(ways) == names
    query, key, value = (tensor.float() for tensor in shape.tensors())
    options: dict[str, Any] = {"window_size": (shape.window - 1, 0)} if shape.window else {}
    want = attention(query, key, value, **shape.options, **options, stats=("entropy",), backend="reference")
    assert want.stats is not None
    for way in (*ways.values(), ours(shape, shape.tensors(), (), "auto")):
        output, *entropy = way()  # pyright: ignore[reportGeneralTypeIssues]
        half = shape.dtype != "float32"
        torch.testing.assert_close(output.float(), want.output, rtol=0, atol=4e-2 if half else 1e-5)
        for found in () if half else entropy:
            torch.testing.assert_close(found, want.stats.entropy, rtol=0, atol=1e-5)


def test_backward_takes_the_gradient_of_the_entropy_along():
    shape = replace(SMALL, backward=True)
    query, key, value = (tensor.requires_grad_() for tensor in shape.tensors())
    result = attention(query, key, value, stats=("entropy",), backend="blocked")
    assert result.stats is not None
    want = torch.autograd.grad(result.output.sum() + result.stats.entropy.sum(), (query, key, value))
    plain = torch.autograd.grad(attention(query, key, value, backend="blocked").output.sum(), (query, key, value))
    got = ours(shape, shape.tensors(), ("entropy",), "blocked")()
    without = ours(shape, shape.tensors(), (), "blocked")()
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))  # pyright: ignore[reportArgumentType]
    assert all(torch.equal(one, two) for one, two in zip(without, plain, strict=True))  # pyright: ignore[reportArgumentType]
    assert not torch.equal(want[0], plain[0])


def test_a_row_says_what_was_measured_and_how_exact_it_was():
    row = measure(replace(SMALL, causal=True), backend="blocked", pairs=3)
    told = row.to_dict()
    assert set(row.ratios) == {"without_statistics", "sdpa", "two_sdpa_calls", "eager_entropy"}
    assert set(row.other_ms) | {"ours"} == set(row.least_ms) == set(row.ratios) | {"ours"}
    assert row.backend == "blocked"
    assert row.clock == "wall"
    assert row.pairs == 3
    assert row.machine == machine()
    assert row.machine.threads == torch.get_num_threads()
    assert 0 < row.output_error < 1e-5
    assert 0 < row.entropy_error_nats < 1e-5
    assert math.isclose(row.gflops, row.shape.flops / row.ms / 1e6)
    assert (told["peak_share"] is None) == (told["peak_share_quartiles"] is None) == (row.peak_gflops is None)
    assert told["shape"]["causal"] is True


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda output: output + 1e-3, r"off by 1\.0e-03 in its output .* nothing is timed"),
     (lambda output: output * math.nan, "nothing is timed")],
    ids=["wrong", "nan"],
)  # fmt: skip
def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch, change, message: str):
    def wrong(*arguments: object, **options: object):
        result = attention(*arguments, **options)  # pyright: ignore[reportArgumentType]
        return result if options["backend"] == "reference" else result._replace(output=change(result.output))

    monkeypatch.setattr("attemper.bench.attention.attention", wrong)
    monkeypatch.setattr("attemper.bench.attention.rounds", lambda *_: pytest.fail("timed"))
    with pytest.raises(BackendError, match=message):
        measure(SMALL, backend="blocked")


def test_the_time_of_one_thread_is_not_that_of_several(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(InputError, match="torch has 2"):
        measure(SMALL, backend="blocked", cpu_time=True)


@pytest.mark.parametrize("names", ["ab", "abc", "abcdef"])
def test_every_way_runs_as_often_as_the_others_and_after_each_of_them_equally_often(names: str):
    order: list[str] = []
    ways = {name: (lambda name=name: order.append(name)) for name in names}
    size = len(names)
    times = rounds(ways, 2 * size, 1e9)
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys(names, 2 * size)
    timed = order[size:]
    turns = [timed[start : start + size] for start in range(0, len(timed), size)]
    assert {turn[0] for turn in turns} == set(names)
    pairs = Counter(pair for turn in turns for pair in pairwise(turn))
    assert pairs == dict.fromkeys(permutations(names, 2), 2)


def test_few_rounds_are_left_when_they_would_take_too_long():
    times = rounds({"a": lambda: None}, 40, 0.0)
    assert len(times["a"]) == 3


def test_without_the_native_library_the_peak_is_not_known(monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise BackendError("missing")

    monkeypatch.setattr("attemper.bench.hardware.library", missing)
    assert peak_flops(1) is None
    assert measure(SMALL, backend="blocked", pairs=3).peak_share is None


def test_the_share_of_the_peak_is_that_of_its_round(monkeypatch: pytest.MonkeyPatch):
    seconds, peaks = count(), iter([1e6, 4e6, 2e6])
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))  # every call takes a second
    monkeypatch.setattr("attemper.bench.timing.peak_flops", lambda *_, **__: next(peaks))
    row = measure(SMALL, backend="blocked", pairs=3)
    assert row.peak_gflops == 4e-3
    assert row.peak_share == SMALL.flops / 2e6
    assert row.peak_share_quartiles == pytest.approx((0.375e-6 * SMALL.flops, 0.75e-6 * SMALL.flops))


@pytest.mark.skipif(not os.confstr_names.get("CS_GNU_LIBC_VERSION"), reason="another C library than glibc")
def test_memory_that_one_way_frees_is_kept_for_the_next_and_given_back_at_the_end():
    size = 16 << 20
    with kept_memory():
        tensors = [torch.ones(size // 4) for _ in range(4)]
        full = resident_bytes("VmRSS")
        del tensors
        assert resident_bytes("VmRSS") > full - size
    assert resident_bytes("VmRSS") < full - 3 * size


def test_the_rates_of_all_threads_add_up(monkeypatch: pytest.MonkeyPatch):
    class Library:
        @staticmethod
        def attemper_peak_flops(rounds: int) -> float:
            return 10.0 * rounds

    ticks = iter(range(1000))
    monkeypatch.setattr("attemper.bench.hardware.library", lambda: Library)
    assert peak_flops(1, bursts=2, clock=lambda: float(next(ticks))) == 10.0 * 20_000


@pytest.mark.slow("measures in a process of its own")
def test_extra_memory_of_eager_size_is_seen():
    # The reference holds float64 n x n tensors: 8 n^2 bytes each, beside which nothing else counts.
    extra = peak_extra_bytes(Shape.of("1,2,512,16"), backend="reference")
    if extra is not None:
        assert extra > 8 * 2 * 512 * 512
