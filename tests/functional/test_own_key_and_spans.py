"""``self_weight`` and ``span_mass``: how spans are given, merged, compiled; values are the oracle's, as all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper import InputError
from tests.support.calls import attended, skip_without

pytestmark = pytest.mark.each

B, H, Q, K, D = 2, 3, 9, 9, 8
NAMES = ("self_weight", "span_mass")
MARKS = torch.stack([torch.arange(K) % 4 == 1, torch.arange(K) % 3 == 0])
LOWER = torch.ones(Q, K, dtype=torch.bool).tril()


@pytest.fixture
def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, H, n, D) for n in (Q, K, K)]


@pytest.fixture(autouse=True)
def _only_where_they_are(request: pytest.FixtureRequest) -> None:
    if "backend" in request.fixturenames:
        skip_without(request.getfixturevalue("backend"), *NAMES)


def test_some_rows_have_what_they_have_among_all(tensors: Any, backend: str):
    options = {"is_causal": True, "stats": NAMES, "spans": [(0, 2), (2, 4)], "backend": backend}
    whole = attemper.attention_statistics(*tensors[:2], **options)
    some = attemper.attention_statistics(*tensors[:2], rows=4, **options)
    assert some.rows is not None
    for name in NAMES:
        torch.testing.assert_close(some[name], whole[name][:, :, some.rows], rtol=1e-6, atol=1e-7)


def test_a_list_of_pairs_means_both_ends_and_every_key_once(tensors: Any, backend: str):
    marks = torch.zeros(K, dtype=torch.bool)
    marks[[0, 1, 2, 3, 8]] = True
    by_marks, by_pairs = (
        attended(backend, *tensors, stats="span_mass", spans=spans).stats.span_mass
        for spans in (marks, [(0, 2), (1, 3), (8, 8)])
    )
    assert torch.equal(by_marks, by_pairs)


def test_spans_merge_over_parts_of_the_keys(tensors: Any, backend: str):
    query, key, value = tensors
    whole = attended(backend, *tensors, stats=("lse", "span_mass"), spans=MARKS)
    one, two = (
        attended(backend, query, key[:, :, part], value[:, :, part], stats=("lse", "span_mass"), spans=MARKS[:, part])
        for part in (slice(0, 4), slice(4, None))
    )
    torch.testing.assert_close(one.merge(two).stats.span_mass, whole.stats.span_mass, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_of_functions_know_them(tensors: Any):
    query, key, _ = (part.double() for part in tensors)

    def both(query: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        stats = attemper.attention_statistics(query, key, is_causal=True, stats=NAMES, spans=marks, backend="blocked")
        return stats.self_weight, stats.span_mass

    many = torch.stack([query, -query])
    marks = torch.stack([MARKS, ~MARKS])
    for got, *want in zip(torch.vmap(both)(many, marks), *map(both, many, marks), strict=True):
        torch.testing.assert_close(got, torch.stack(want))
    step = torch.linspace(-1, 1, query.numel(), dtype=torch.float64).view_as(query)
    slopes = torch.func.jvp(lambda q: both(q, MARKS), (query,), (step,))[1]
    eps = 1e-6
    for slope, up, down in zip(slopes, both(query + eps * step, MARKS), both(query - eps * step, MARKS), strict=True):
        torch.testing.assert_close(slope, (up - down) / (2 * eps), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("spans", [[(0, 3)], MARKS], ids=["pairs", "marks"])
@pytest.mark.slow("a compiler takes seconds")
def test_a_compiled_graph_holds_them(spans: Any, tensors: Any):
    def call(query: Tensor, key: Tensor) -> Tensor:
        stats = attemper.attention_statistics(query, key, is_causal=True, stats=NAMES, spans=spans)
        return stats.self_weight + stats.span_mass

    torch.testing.assert_close(
        torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors[:2]), call(*tensors[:2])
    )


WRONG: dict[str, tuple[Any, str]] = {
    "none": (None, r"span_mass needs spans=.*both included.*\[\(0, 3\)\]"),
    "nothing": ([], r"must be a bool tensor \[9\] or a list of at least one pair"),
    "a pair alone": ((0, 3), r"a span is a pair of ints \(first, last\), got 0"),
    "beyond the keys": ([(0, 9)], r"span \(0, 9\) must have 0 <= first <= last < 9"),
    "before the keys": ([(-3, -1)], r"span \(-3, -1\) must have 0 <= first"),
    "turned around": ([(4, 2)], r"span \(4, 2\) must have 0 <= first <= last < 9.*Both ends are in the span"),
    "no ints": ([(0.0, 2)], r"a span is a pair of ints"),
    "bools": ([(True, False)], r"a span is a pair of ints"),
    "a name": ("prompt", r"must be a bool tensor \[9\] or a list of at least one pair"),
    "numbers": (torch.arange(K), r"must be bool, \[9\] or \[2, 9\].*got \[9\] torch.int64"),
    "too few marks": (MARKS[0, :4], r"must be bool, \[9\] or \[2, 9\].*got \[4\] torch.bool"),
    "marks of other batches": (MARKS[:1].expand(3, K), r"must be bool, \[9\] or \[2, 9\].*got \[3, 9\]"),
    "marks elsewhere": (MARKS[0].to("meta"), r"is on meta, the keys on cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_spans_that_mean_nothing_are_refused(name: str, tensors: Any):
    spans, message = WRONG[name]
    with pytest.raises(InputError, match=rf"attention\((spans|stats)=...\).*{message}"):
        attemper.attention(*tensors, stats="span_mass", spans=spans)


def test_a_call_that_does_not_say_where_queries_stand_has_no_own_key(tensors: Any):
    query, key, value = tensors
    with pytest.raises(InputError, match=r"needs each query's own key, and queries over keys \(2 over 9\) .*cache"):
        attemper.attention(query[:, :, :2], key, value, stats="self_weight")
    with pytest.raises(InputError, match="in cross attention leave it out"):
        attemper.attention_statistics(query[:, :, :2], key, LOWER[-2:], stats="self_weight")
    stats = attemper.attention_statistics(query[:, :, :2], key, stats="self_weight", window_size=(1, 1))
    assert stats.self_weight.shape == (B, H, 2)
