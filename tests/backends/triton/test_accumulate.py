"""Sums of a site on the device: what ``SiteSums`` adds up, from kernels that a flag turns off."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.backends import triton as kernels
from attemper.backends.contract import Problem
from attemper.backends.triton.sums import BINNED, BINS, COLUMNS, SUMMED, WIDTH, empty_sums
from attemper.call.result import AttentionStats, by_head

SUMMING = import_module("attemper.backends.triton.sums")

pytestmark = pytest.mark.usefixtures("poisoned_empty")

UP, DOWN = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)

WHOLE = [0, 1, 2, 11, 12, *range(13, 13 + 64)]
"""Columns of whole numbers."""


def call(**changes: Any) -> tuple[Problem, AttentionStats]:
    """A problem, and the statistics of blocked for it. Rows that see nothing, one, and many keys."""
    query, key = torch.randn(2, 4, 70, 8), torch.randn(2, 2, 90, 8)
    mask = torch.rand(2, 1, 70, 90) < 0.7
    mask[:, :, 5], mask[:, :, 6] = False, torch.arange(90) == 0
    query[0, 1, 20] = torch.nan
    sink = torch.randn(4)
    options = {"is_causal": True, "enable_gqa": True, "sink_logits": sink}
    stats = attemper.attention_statistics(query, key, mask, stats="all", backend="blocked", **options)
    first = mask.any(2).any(1)
    problem = Problem(
        query, key, None, mask, torch.full((1, 1, 1), 8**-0.5), sink=sink, right=0, columns=SUMMED,
        first_keys=first & (first.cumsum(-1) <= 1), **changes,
    )  # fmt: skip
    return problem, stats


def expected(stats: AttentionStats) -> Tensor:
    """The same sums by the functions that a watch uses."""
    sums = empty_sums(stats.lse.shape[1], torch.device("cpu"))
    column = {name: place for place, name in enumerate(COLUMNS)}
    for name, rows in (("rows", stats.valid), ("empty", stats.empty), ("nonfinite", stats.nonfinite)):
        sums[:, column[name]] = by_head(rows.double()).sum(1)
    sums[:, column["max_logit"]] = by_head(stats.max_logit.masked_fill(~stats.valid, -torch.inf)).amax(1).double()
    for name in COLUMNS[4:11]:
        sums[:, column[name]] = by_head(torch.where(stats.defined_rows(name), stats[name].double(), 0.0)).sum(1)
    for name in ("normalized_entropy", "first_token_mass"):
        sums[:, column[f"rows_of_{name}"]] = by_head(stats.defined_rows(name).double()).sum(1)
    curve = stats.by_visible_keys()
    binned = (stats.histogram().double(), curve.rows, *(curve.sums[name.removeprefix("curve_")] for name in BINNED[2:]))
    sums[:, len(COLUMNS) :] = torch.cat(binned, 1)
    return sums


@pytest.mark.slow("takes seconds in Triton's interpreter")
def test_the_sums_are_those_that_a_watch_reduces_to():
    problem, stats = call()
    sums, want = empty_sums(4, torch.device("cpu")), expected(stats)
    kernels.accumulate(problem, UP, sums)
    assert sums.shape == (4, WIDTH) == (4, len(COLUMNS) + BINS * len(BINNED))
    torch.testing.assert_close(sums, want, rtol=2e-6, atol=1e-6)
    assert torch.equal(sums[:, WHOLE], want[:, WHOLE])
    assert (sums[:, 1] >= 2).all()
    assert sums[1, 2] == 1


MORE = pytest.mark.long("more cases in Triton's interpreter")


@pytest.mark.slow("takes seconds in Triton's interpreter")
@pytest.mark.parametrize(
    ("programs", "chunks"), [(8, 2), *(pytest.param(*each, marks=MORE) for each in ((1, 1), (16, 4), (72, 18)))]
)
def test_however_rows_are_cut_into_chunks_the_sums_are_the_same(
    programs: int, chunks: int, monkeypatch: pytest.MonkeyPatch
):
    """Chunks of many blocks of rows and of one, one chunk that has none, and more chunks than are added at a time."""
    monkeypatch.setattr(SUMMING, "PROGRAMS", programs)
    monkeypatch.setattr(SUMMING, "BLOCK", 8 if chunks > 3 else 32)
    made: list[Any] = []
    empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda self, size, **options: made.append(size) or empty(self, size, **options)
    )
    problem, stats = call()
    sums, want = empty_sums(4, torch.device("cpu")), expected(stats)
    kernels.accumulate(problem, UP, sums)
    assert (chunks, 4, WIDTH) in made
    torch.testing.assert_close(sums, want, rtol=2e-6, atol=1e-6)
    kernels.accumulate(problem, UP, sums)
    assert torch.equal(sums[:, WHOLE], 2 * want[:, WHOLE])
    torch.testing.assert_close(sums[:, 3], want[:, 3], rtol=2e-6, atol=1e-6)


def test_a_maximum_below_0_is_kept():
    """Of chunks that are not there, and of those before, nothing is taken for a maximum of 0."""
    query = torch.full((1, 1, 3, 8), 1.0)
    problem = Problem(query, -query, None, None, torch.ones(1, 1, 1), columns=SUMMED)
    sums = empty_sums(1, torch.device("cpu"))
    kernels.accumulate(problem, UP, sums)
    kernels.accumulate(replace(problem, multiplier=torch.full((1, 1, 1), 2.0)), UP, sums)
    assert sums[0, 3] == -8.0
    assert sums[0, 0] == 6


def test_chosen_rows_are_measured_at_their_own_places():
    problem, stats = call()
    rows = torch.tensor([0, 5, 6, 20, 33, 69], dtype=torch.int32)
    sums = empty_sums(4, torch.device("cpu"))
    kernels.accumulate(replace(problem, rows=rows), UP, sums)
    chosen = torch.zeros(70, dtype=torch.bool).index_fill_(0, rows.long(), True)
    torch.testing.assert_close(sums, expected(stats.where(chosen)), rtol=2e-6, atol=1e-6)


@pytest.mark.slow("takes seconds in Triton's interpreter")
def test_rows_that_are_not_tokens_are_left_out():
    problem, stats = call()
    tokens = torch.rand(2, 70) < 0.5
    sums = empty_sums(4, torch.device("cpu"))
    kernels.accumulate(problem, UP, sums, included=tokens)
    torch.testing.assert_close(sums, expected(stats.where(tokens[:, None])), rtol=2e-6, atol=1e-6)


def arguments(problem: Problem, flag: Tensor, sums: Tensor) -> tuple[Any, ...]:
    return (*replace(problem, backend="triton").values(), None, flag, sums, None)


@pytest.mark.slow("takes many seconds")
def test_the_operator_passes_opcheck_and_adds_what_the_kernel_adds():
    problem, stats = call()
    sums = empty_sums(4, torch.device("cpu"))
    result = torch.library.opcheck(torch.ops.attemper.accumulate.default, arguments(problem, UP, sums.clone()))
    assert set(result.values()) == {"SUCCESS"}, result
    torch.ops.attemper.accumulate(*arguments(problem, UP, sums))
    torch.testing.assert_close(sums, expected(stats), rtol=2e-6, atol=1e-6)


@pytest.mark.slow("compiles for seconds")
def test_in_a_compiled_graph_the_flag_alone_decides_and_nothing_recompiles():
    problem, stats = call()
    sums, flag = empty_sums(4, torch.device("cpu")), DOWN.clone()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def layer(query: Tensor) -> Tensor:
        torch.ops.attemper.accumulate(query, *arguments(problem, flag, sums)[1:])
        return query * 2

    for sampled in (False, True, False):
        flag.fill_(sampled)
        layer(problem.query)
    assert len(graphs) == 1
    torch.testing.assert_close(sums, expected(stats), rtol=2e-6, atol=1e-6)


def test_while_the_flag_is_down_no_row_is_measured(monkeypatch: pytest.MonkeyPatch):
    """Memory of measured rows, of chunks and sums stay as they were, where zeros would count as rows without keys."""
    made: list[Tensor] = []

    def zeros(self: Tensor, *args: Any, **options: Any) -> Tensor:
        made.append(self.new_zeros(*args, **options))
        return made[-1]

    monkeypatch.setattr(Tensor, "new_empty", zeros)
    problem, _ = call()
    sums, before = empty_sums(4, torch.device("cpu")), empty_sums(4, torch.device("cpu"))
    made.clear()
    kernels.accumulate(problem, DOWN, sums)
    states = [tensor for tensor in made if tensor.shape == (len(SUMMED), 2, 4, 70)]
    assert states
    chunks = [tensor for tensor in made if tensor.shape[1:] == (4, WIDTH)]
    assert chunks
    assert all((tensor == 0).all() for tensor in states + chunks)
    assert torch.equal(sums, before)
