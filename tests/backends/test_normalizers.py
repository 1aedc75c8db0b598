"""Attention by softmax's alternatives: every backend that has them against loops over rows, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attemper
from attemper import nn
from attemper.call.normalizer import Normalization
from attemper.errors import InputError
from tests.support import cases, oracle, row_oracle
from tests.support.calls import FEATURES, PRESENT, had, known

pytestmark = pytest.mark.usefixtures("poisoned_empty")
BACKENDS = tuple(name for name in PRESENT if "normalizer" in FEATURES[name] and name != "triton")
"""Triton's interpreter has tests of its own (tests/backends/triton)."""
CASES = tuple(case for case in cases.CASES if "sink" not in case.name and case.name not in ("all at once", "float64"))


@dataclass(frozen=True)
class Given:
    """A normalizer, and the oracle's of each head."""

    name: str
    make: Any
    oracle_of: Any

    def normalizer(self, heads: int) -> Any:
        return self.make(heads) if isinstance(self.make, FunctionType) else self.make


def _alphas(heads: int) -> Tensor:
    return torch.tensor([1.0, 1.2, 1.5, 2.5, 1.00001, 4.0][:heads], dtype=torch.float64)


NORMALIZERS = (
    Given("sparsemax", "sparsemax", lambda h: row_oracle.sparsemax),
    Given("entmax15", "entmax15", lambda h: row_oracle.entmax(1.5)),
    Given("entmax per head", lambda heads: Normalization("entmax", per_head=_alphas(heads)),
          lambda h: row_oracle.entmax(float(_alphas(6)[h]))),
    Given("top 3", nn.TopK(3), lambda h: row_oracle.topk(3)),
    Given("threshold", nn.Threshold(0.11), lambda h: row_oracle.threshold(0.11)),
    Given("sigmoid", "sigmoid", lambda h: row_oracle.sigmoid(0.0)),
    Given("sigmoid per head", lambda heads: Normalization("sigmoid", per_head=torch.linspace(-2, 1, heads)),
          lambda h: row_oracle.sigmoid(float(torch.linspace(-2, 1, 6)[h]))),
)  # fmt: skip
by_normalizer = {"argnames": "given", "argvalues": NORMALIZERS, "ids": [given.name for given in NORMALIZERS]}


@cache
def wanted(case: cases.Case, given: Given) -> row_oracle.Results:
    call = cases.oracle_call(case)
    if given.name == "sigmoid per head":
        biases = torch.linspace(-2, 1, case.heads)
        return row_oracle.forward(call, [row_oracle.sigmoid(float(biases[h])) for h in range(case.heads)])
    return row_oracle.forward(call, [given.oracle_of(h) for h in range(case.heads)])


@pytest.mark.each
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(**by_normalizer)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_output_and_statistics_are_those_of_loops_over_rows(case: cases.Case, given: Given, backend: str):
    if given.name == "top 3" and case.options.get("temperature") == float("inf"):
        with pytest.raises(InputError, match="makes all scores equal, so that top-k would take the first keys"):
            attemper.attention(**cases.tensors(case), normalizer=given.normalizer(case.heads), backend=backend)
        return
    want = wanted(case, given)
    names = had(backend, [name for name in (*row_oracle.NAMES, "key_mass") if name in case.names])
    result = attemper.attention(
        **cases.tensors(case), normalizer=given.normalizer(case.heads), stats=names, backend=backend
    )
    stats = known(result.stats)
    eps = float(torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps)
    # A score is off by a few roundings of its terms; no normalizer moves a weight by more than its score, but near
    # alpha = 4, where the derivative at the edge of the support has no bound.
    steep = 400 if given.name == "entmax per head" and case.heads > 3 else 1
    tolerance = 24 * eps * (4 + want.terms) * steep
    stored = float(torch.finfo(case.dtype).eps)
    close(result.output, want.output, tolerance + 2 * stored * np.abs(want.output).max(initial=0))
    for name in names:
        expected = want.statistics[name]
        if name == "visible_keys":
            assert np.array_equal(oracle.numbers(stats[name]), expected)
        elif name == "support_size":
            if eps > 1e-10 and given.name == "entmax per head":
                continue  # softmax's weights, and those of alpha = 1.00001, fall below float32's least number
            # A weight that is a rounding away from 0 may fall to either side.
            assert np.abs(oracle.numbers(stats[name]) - expected).max(initial=0) <= (0 if eps < 1e-10 else 1)
        else:
            scale = 1 + np.abs(expected[np.isfinite(expected)]).max(initial=0)
            # -log p of a weight near 0 is steep.
            more = 60 if name in ("entropy", "normalized_entropy", "effective_tokens") else 4
            close(stats[name], expected, more * tolerance * scale)


def close(got: Tensor, want: oracle.Array, tolerance: float) -> None:
    found = oracle.numbers(got)
    same = found == want
    assert np.isfinite(found[np.isfinite(want.astype(float))]).all()
    error = np.where(same, 0, np.abs(np.where(same, 0, found) - np.where(same, 0, want)))
    assert error.max(initial=0) <= tolerance


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize(**by_normalizer)
@pytest.mark.parametrize(
    "name", ["plain", "mask with empty rows", "bias", "grouped heads, mask per head", "softcap, bias",
             "temperature per row", "causal window bottom-right", "left padding", "one key"],
)  # fmt: skip
@pytest.mark.each
def test_gradients_are_those_of_the_reference(name: str, given: Given, backend: str):
    case = next(case for case in cases.CASES if case.name == name)
    dtype = torch.float64 if backend == "blocked" else torch.float32
    case = replace(case, name=f"{case.name} {dtype}", dtype=dtype)
    names = had(
        backend,
        (
            "entropy",
            "effective_tokens",
            "max_weight",
            "max_logit",
            "mean_logit",
            "logit_variance",
            "mass",
            "first_token_mass",
            "mean_distance",
            "gini",
            "key_mass",
            "score_variance",
            *(name for name in ("self_weight", "span_mass") if name in case.names),
        ),
    )
    found = []
    for where in ("reference", backend):
        call = cases.leaves(cases.tensors(case))
        normalizer = given.normalizer(case.heads)
        leaves = [value for value in call.values() if isinstance(value, Tensor) and value.requires_grad]
        if isinstance(normalizer, Normalization) and isinstance(normalizer.per_head, Tensor):
            parameter = normalizer.per_head.to(dtype).clone().requires_grad_()
            normalizer = replace(normalizer, per_head=parameter)
            leaves.append(parameter)
        result = attemper.attention(**call, normalizer=normalizer, stats=names, backend=where)
        results = [result.output, *(known(result.stats)[n] for n in names)]
        generator = torch.Generator().manual_seed(3)
        above = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.dtype) for r in results]
        found.append(torch.autograd.grad(results, leaves, above))
    for one, two in zip(*found, strict=True):
        # A float32 bias has a float32 gradient, whatever the rest is.
        tolerance = 1e-10 if one.dtype == torch.float64 else 1e-6 if dtype == torch.float64 else 2e-5
        assert torch.isfinite(one).all()
        assert ((one - two).abs().max() <= tolerance * (1 + one.abs().max())).item()


@pytest.mark.parametrize(**by_normalizer)
@pytest.mark.quick("sparsemax")
def test_the_reference_differentiates_once_and_twice(
    given: Given, full_size: bool, derivatives_agree: Callable[..., bool]
):
    generator = torch.Generator().manual_seed(0)
    size = 4 if full_size else 2
    query, key, value = (torch.randn(1, 2, 3, size, generator=generator, dtype=torch.float64) for _ in range(3))
    heads = torch.linspace(1.2, 1.7, 2, dtype=torch.float64)
    inputs = [t.clone().requires_grad_() for t in (query * 2, key, value, heads)]

    def attended(q: Tensor, k: Tensor, v: Tensor, parameter: Tensor) -> tuple[Tensor, Tensor]:
        normalizer = given.normalizer(2)
        if isinstance(normalizer, Normalization) and normalizer.per_head is not None:
            normalizer = replace(normalizer, per_head=parameter)
        result = attemper.attention(q, k, v, normalizer=normalizer, stats=("entropy",), backend="reference")
        return result.output, known(result.stats).entropy + 0 * parameter.sum()

    assert derivatives_agree(attended, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(**by_normalizer)
@pytest.mark.each
def test_hidden_keys_empty_rows_and_scores_that_are_not_finite(given: Given, backend: str):
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    key[0, 0, 3] = torch.nan
    key[0, 1, 2] = torch.inf
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, 2:] = False
    mask[1] = False
    mask[2, 2:] = True
    output, stats = attemper.attention(
        query, key, value, mask, normalizer=given.normalizer(2), stats=("all",), backend=backend
    )
    stats = known(stats)
    assert torch.equal(stats.visible_keys[0, 0], torch.tensor([2, 0, 4, 2]))
    assert (output[:, :, 1] == 0).all()
    assert stats.entropy[:, :, 1].eq(0).all()
    assert stats.max_logit[:, :, 1].isneginf().all()
    assert torch.equal(stats.valid[0, 0], torch.tensor([True, False, False, True]))
    assert stats.nonfinite[:, :, 2].all()
    assert stats.entropy[:, :, 2].isnan().all()
    assert torch.isfinite(output[:, :, [0, 3]]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(**by_normalizer)
@pytest.mark.each
def test_a_row_that_sees_nothing_has_no_gradient_whatever_comes_from_above(given: Given, backend: str):
    query, key, value = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    output, stats = attemper.attention(
        query, key, value, mask, normalizer=given.normalizer(2), stats=("all",), backend=backend
    )
    results = [output, known(stats).entropy, known(stats).mass]
    above = [torch.ones_like(r) for r in results]
    for part in above:
        # The reference is plain PyTorch: there inf times 0 is NaN.
        part[:, :, 1] = 7.0 if backend == "reference" else torch.inf
    for gradient in torch.autograd.grad(results, (query, key, value), above):
        assert torch.isfinite(gradient).all()
    (of_query,) = torch.autograd.grad(known(attemper.attention(
        query, key, value, mask, normalizer=given.normalizer(2), stats=("entropy",), backend=backend
    ).stats).entropy.sum(), query)  # fmt: skip
    assert (of_query[:, :, 1] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigmoids_that_all_vanish_have_no_entropy_and_mass_0(backend: str):
    query, key = torch.full((1, 1, 1, 4), 10.0), torch.full((1, 1, 3, 4), -10.0)
    output, stats = attemper.attention(query, key, key, normalizer="sigmoid", stats="all", backend=backend)
    stats = known(stats)
    assert stats.mass.item() == 0
    assert stats.entropy.item() == 0
    assert (output == 0).all()
    assert not stats.defined_rows("entropy").any()
    assert stats.defined_rows("mass").all()
    assert stats.per_head()["entropy"].count.item() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_share_and_at_the_border_of_k_the_lower_index_wins(backend: str):
    query, key = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 4, 4)
    value = torch.eye(4)[None, None]
    for normalizer in ("sparsemax", "entmax15", nn.Entmax(1000.0), nn.Entmax(1.00001), nn.Threshold(0.25)):
        output, _ = attemper.attention(query, key, value, normalizer=normalizer, backend=backend)
        assert torch.allclose(output, torch.full_like(output, 0.25), atol=2e-7)
    output, _ = attemper.attention(query, key, value, normalizer=nn.TopK(2), backend=backend)
    assert output.flatten().tolist() == [0.5, 0.5, 0, 0]
    output, _ = attemper.attention(query, key, value, normalizer=nn.TopK(9), backend=backend)
    assert torch.allclose(output, torch.full_like(output, 0.25))


def test_sampled_rows_are_those_rows():
    query, key = torch.randn(2, 4, 64, 8), torch.randn(2, 4, 64, 8)
    whole = attemper.attention_statistics(query, key, is_causal=True, normalizer="sparsemax")
    some = attemper.attention_statistics(query, key, is_causal=True, normalizer="sparsemax", rows=9)
    assert some.rows is not None
    assert torch.allclose(some.entropy, whole.entropy[..., some.rows], atol=1e-6)
    assert torch.equal(some.support_size, whole.support_size[..., some.rows])


def test_what_only_softmax_has_is_refused_by_name():
    query = torch.randn(1, 1, 3, 4)
    with pytest.raises(InputError, match="lse belongs to softmax; normalizer='sparsemax' has none"):
        attemper.attention(query, query, query, normalizer="sparsemax", stats=("lse",))
    with pytest.raises(
        InputError, match="sink_logits=\\.\\.\\.\\) is a logit of softmax; normalizer='entmax' has no sink"
    ):
        attemper.attention(query, query, query, normalizer=nn.Entmax(1.2), sink_logits=torch.zeros(1))
    stats = known(attemper.attention(query, query, query, normalizer="sparsemax", stats="all").stats)
    with pytest.raises(AttributeError, match="lse belongs to softmax: weights of sparsemax have none"):
        _ = stats.lse
    with pytest.raises(InputError, match="merge: weights of sparsemax over some keys do not determine"):
        stats.merge(stats)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.TopK(0), r"TopK\(k=\.\.\.\) must be an int of at least 1, got 0"),
        (lambda: nn.TopK(2.0), "must be an int of at least 1, got 2.0"),  # pyright: ignore[reportArgumentType]
        (lambda: nn.Threshold(1.0), "must be a number from 0 to below 1, got 1.0"),
        (lambda: nn.Entmax(0.5), "must be a finite number of at least 1, or a tensor, got 0.5"),
        (lambda: nn.Entmax(1.0, learned=True), "must start between 1.001 and 10.0"),
        (lambda: nn.Sink(0), "must be an int of at least 1, got 0"),
    ],
)
def test_numbers_without_a_meaning_are_refused(make: Any, message: str):
    with pytest.raises(InputError, match=message):
        make()


def test_a_parameter_that_fits_no_head_is_refused():
    query = torch.randn(1, 4, 3, 4)
    with pytest.raises(InputError, match=r"alpha must be a number, or a floating tensor \[heads\] = \[4\]"):
        attemper.attention(query, query, query, normalizer=nn.Entmax(1.3, learned=True, num_heads=3))


def test_softmax_with_one_more_and_a_sink_of_0_are_one_thing_and_sinks_add_up():
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    one = attemper.attention(query, key, value, normalizer="softmax_plus_one", stats="all")
    sink = attemper.attention(query, key, value, normalizer=nn.Sink(2), stats="all")
    given = attemper.attention(query, key, value, sink_logits=torch.zeros(2), stats="all")
    assert torch.equal(one.output, sink.output)
    assert torch.equal(one.output, given.output)
    assert torch.equal(known(one.stats).lse, known(given.stats).lse)
    both = attemper.attention(query, key, value, normalizer="softmax_plus_one", sink_logits=torch.zeros(2), stats="all")
    alone = attemper.attention(query, key, value, sink_logits=torch.full((2,), 2.0).log(), stats="all")
    assert torch.allclose(known(both.stats).mass, known(alone.stats).mass)


@pytest.mark.parametrize("name", ["plain", "causal", "causal window bottom-right", "window", "left padding",
                                  "mask with empty rows", "bias", "bottom-right, more rows than keys"])  # fmt: skip
def test_scalable_softmax_counts_the_keys_that_each_row_sees(name: str):
    case = next(case for case in cases.CASES if case.name == name)
    call = cases.tensors(case)
    s = torch.tensor([0.4, 0.7, 1.0, 1.3])
    result = attemper.attention(**call, normalizer=Normalization("scalable_softmax", per_head=s), stats="all")
    counts = known(attemper.attention(**call, stats="all").stats).visible_keys
    temperature = 1 / (s[:, None] * counts.clamp(min=1).log()).clamp(min=1e-30)
    want = attemper.attention(**call, temperature=temperature, stats="all")
    assert torch.allclose(result.output, want.output, atol=1e-6)
    assert torch.allclose(known(result.stats).entropy, known(want.stats).entropy, atol=1e-5)


@pytest.mark.slow("compiles for seconds")
@pytest.mark.parametrize(**by_normalizer)
@pytest.mark.quick("entmax per head")
def test_a_compiled_call_is_one_graph_with_the_same_result(given: Given):
    query, key, value = (torch.randn(1, 2, 6, 8, requires_grad=True) for _ in range(3))

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attemper.attention(q, k, v, is_causal=True, normalizer=given.normalizer(2), stats="all")
        return result.output.sum() + known(result.stats).entropy.sum()

    plain, compiled = attended(query, key, value), torch.compile(attended, backend="aot_eager", fullgraph=True)
    again = compiled(query, key, value)
    assert torch.allclose(plain, again)
    one, two = (torch.autograd.grad(loss, (query, key, value)) for loss in (plain, again))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, two, strict=True))
