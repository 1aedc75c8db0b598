"""A watch on Triton keeps sums that its kernels make: the same readings, fewer operations, nothing lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper import BackendError, InputError
from attemper.backends.sums import BINNED, BINS, COLUMNS, empty_sums
from attemper.call import call_sums as accumulated
from attemper.call.attention import measurement, run
from attemper.call.packing import Packing
from attemper.call.request import Options
from attemper.call.result import AttentionStats, by_head
from attemper.monitor import calls as monitored
from attemper.monitor.head_sums import SiteSums
from attemper.readings.reading import HeadReading
from attemper.readings.sample import SiteLabel
from tests.sites.own_models import Own

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreted")


def column(sums: Tensor, name: str) -> Tensor:
    """One of ``COLUMNS``, [heads], or of ``BINNED``, [heads, BINS]."""
    if name in COLUMNS:
        return sums[:, COLUMNS.index(name)]
    start = len(COLUMNS) + BINS * BINNED.index(name)
    return sums[:, start : start + BINS]


def sums_of(stats: AttentionStats) -> Tensor:
    """The sums that stand for these statistics, by the functions of ``AttentionStats``."""
    sums = empty_sums(stats.lse.shape[1], torch.device("cpu"))
    for name, rows in (("rows", stats.valid), ("empty", stats.empty), ("nonfinite", stats.nonfinite)):
        column(sums, name).copy_(by_head(rows.double()).sum(1))
    column(sums, "max_logit").copy_(by_head(stats.max_logit.masked_fill(~stats.valid, -torch.inf)).amax(1))
    for name in COLUMNS[4:11]:
        column(sums, name).copy_(by_head(torch.where(stats.defined_rows(name), stats[name].double(), 0.0)).sum(1))
    for name in ("normalized_entropy", "first_token_mass"):
        column(sums, f"rows_of_{name}").copy_(by_head(stats.defined_rows(name).double()).sum(1))
    curve = stats.by_visible_keys()
    column(sums, "histogram").copy_(stats.histogram())
    column(sums, "curve_rows").copy_(curve.rows)
    for name in BINNED[2:]:
        column(sums, name).copy_(curve.sums[name.removeprefix("curve_")])
    return sums


def same(one: HeadReading, two: HeadReading, rtol: float) -> None:
    """Counts, histogram, maximum and the edges of the curve alike; means within ``rtol``."""
    for name in ("rows", "empty_rows", "nonfinite_rows", "normalized_entropy_histogram"):
        assert getattr(one, name) == getattr(two, name), name
    assert [(b.first, b.rows) for b in one.by_visible_keys] == [(b.first, b.rows) for b in two.by_visible_keys]
    means = ("entropy_nats", "normalized_entropy", "effective_tokens", "max_weight", "logit_std", "mass", "max_logit",
             "first_token_mass", "gini")  # fmt: skip
    assert near(one, two, means, rtol)
    for a, b in zip(one.by_visible_keys, two.by_visible_keys, strict=True):
        assert near(a, b, ("entropy_nats", "normalized_entropy", "first_token_mass"), rtol)


def near(one: object, two: object, names: tuple[str, ...], rtol: float) -> bool:
    pairs = [(getattr(one, name), getattr(two, name)) for name in names]
    return all(a is b is None or a == pytest.approx(b, rel=rtol, abs=rtol) for a, b in pairs)


def calls() -> list[AttentionStats]:
    """Rows without keys, with one, with a score that is not finite, and a sink."""
    found = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        query, key = (torch.randn(2, 3, tokens, 8, generator=generator) for tokens in (20, 40))
        mask = torch.rand(2, 1, 20, 40, generator=generator) < 0.6
        mask[:, :, 5], mask[:, :, 6] = False, torch.arange(40) == 0
        query[0, 1, 9] = torch.inf
        found.append(attemper.attention_statistics(query, key, mask, sink_logits=torch.randn(3, generator=generator)))
    return found


def test_sums_give_the_reading_that_their_statistics_give() -> None:
    plain, summed, both = (SiteSums(SiteLabel("site", "self", "eval", None, "full", "softmax", 3)) for _ in range(3))
    for place, stats in enumerate(calls()):
        plain.add(stats, 20, 40)
        summed.add_sums(sums_of(stats), 20, 40)
        both.add(stats, 20, 40) if place else both.add_sums(sums_of(stats), 20, 40)
    want = plain.reading()
    assert want.heads[1].nonfinite_rows == 2
    for got in (summed.reading(), both.reading(), both.reading()):
        assert (got.queries, got.keys) == (20, 40)
        for one, two in zip(got.heads, want.heads, strict=True):
            same(one, two, 1e-14)


class Padded(Own):
    """An attention with a 2-D mask of its tokens, as transformers pass it."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        query, key, value = self.split(x)
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        mask = causal if attention_mask is None else causal & attention_mask.bool()[:, None, None, :]
        return F.scaled_dot_product_attention(query, key, value, mask)


class Counting:
    """Stands in for the monitor's ``accumulate``, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: Any) -> accumulated.CallSums:
        self.calls += 1
        return accumulated.accumulate(*arguments)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counting:
    counting = Counting()
    monkeypatch.setattr(monitored, "accumulate", counting)
    return counting


def watched(model: nn.Module, batches: list[Any], **options: Any) -> attemper.Scan:
    with attemper.watch(model, every=1, **options) as watch:
        for batch in batches:
            model(**batch)
        watch.step()
    return watch.table()


def tokens(*lengths: int, size: int = 20) -> Tensor:
    return torch.stack([torch.arange(size) < length for length in lengths]).long()


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.quick("False-None", "True-7")
def test_a_watch_on_triton_reads_what_one_on_blocked_reads(padded: bool, rows: int | None, counted: Counting) -> None:
    model, x = Padded(), torch.randn(2, 20, 32)
    batch = {"x": x} | ({"attention_mask": tokens(20, 11)} if padded else {})
    found = {name: watched(model, [batch], backend=name, rows=rows) for name in ("triton", "blocked")}
    assert counted.calls == 1
    assert [scan.backend for scan in found.values()] == ["triton", "blocked"]
    got, want = found["triton"], found["blocked"]
    assert got.tokens == want.tokens == (31 if padded else 40)
    for one, two in zip(got.sites[0].heads, want.sites[0].heads, strict=True):
        # Two kernels: float32 statistics of each agree to a few roundings.
        same(one, two, 5e-6)
    rows_of, wanted = (scan.row_statistics(want.sites[0].name) for scan in (got, want))
    assert rows_of.names == wanted.names
    assert torch.equal(rows_of.valid, wanted.valid)
    assert torch.equal(rows_of.visible_keys, wanted.visible_keys)
    for name in rows_of:
        torch.testing.assert_close(rows_of[name], wanted[name], rtol=5e-6, atol=5e-6, msg=name)


def test_a_sink_that_changes_after_its_pass_does_not_change_what_was_read() -> None:
    query, sink = torch.randn(1, 2, 5, 8), torch.zeros(2)
    call = measurement(query, query, None, Options(stats="all", sink_logits=sink, backend="triton"))
    found = accumulated.accumulate(call, None)
    before = found.statistics().mass
    sink += 3
    assert torch.equal(found.statistics().mass, before)
    assert (before < 1).all()


def test_sums_of_a_scan_and_sums_made_in_inference_mode_are_read_outside_of_it(counted: Counting) -> None:
    model, x = Own(), torch.randn(2, 20, 32)
    with attemper.watch(model, backend="triton") as watch:
        with torch.inference_mode():
            model(x)
        for _ in range(2):
            assert watch.table().sites[0].heads[0].rows == 40
    scan = attemper.scan(model, [x, x], backend="triton")
    assert (counted.calls, scan.backend, scan.sites[0].heads[0].rows) == (3, "triton", 80)


class Tapped(nn.Module):
    """A tap with options of the test's choice."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor) -> None:
        attemper.tap(query, key, name="here", **self.options)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "grouped heads, window": lambda: {"enable_gqa": True, "window_size": (4, 2), "causal_alignment": "bottom-right"},
    "bias, softcap": lambda: {"attn_mask": torch.randn(2, 4, 17, 23), "softcap": 3.0, "enable_gqa": True},
    "temperature per row": lambda: {"temperature": torch.rand(1, 1, 17) + 0.5, "enable_gqa": True},
    "sink": lambda: {"sink_logits": torch.randn(4), "enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.quick("window-None", "softcap-5", "row-5", "sink-None")
@pytest.mark.turns(2)
def test_every_option_of_a_tap_is_summed(name: str, rows: int | None, counted: Counting) -> None:
    model = Tapped(**OPTIONS[name]())
    batch = {"query": torch.randn(2, 4, 17, 8), "key": torch.randn(2, 2, 23, 8)}
    found = [watched(model, [batch], backend=backend, rows=rows).sites[0].heads for backend in ("triton", "blocked")]
    assert counted.calls == 1
    for one, two in zip(*found, strict=True):
        same(one, two, 5e-6)


@pytest.mark.parametrize("rows", [None, 6])
def test_packed_documents_are_summed(rows: int | None) -> None:
    query, key = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 24, 8)
    packing = Packing(torch.tensor([0, 7, 7, 9, 20]), torch.tensor([0, 9, 10, 14, 24]))
    options = Options(stats="all", is_causal=True, causal_alignment="bottom-right", backend="triton")
    generator = torch.Generator().manual_seed(3)
    call = measurement(query, key, None, options, packing=packing, rows=rows, generator=generator)
    assert accumulated.accumulates(call)
    got = accumulated.accumulate(call, None)
    stats = run(call).stats
    assert stats is not None
    torch.testing.assert_close(got.sums, sums_of(stats), rtol=2e-6, atol=1e-6)
    assert torch.equal(got.statistics().entropy, stats.entropy)
    assert got.statistics().standard_error().keys() == stats.standard_error().keys()


@pytest.mark.quick("gini", "mean_distance")
@pytest.mark.parametrize("stats", ["mean_distance", "gini", "support_size", "entropy_with_sink"])
def test_what_the_sums_lack_goes_the_ordinary_way(stats: str, counted: Counting) -> None:
    model, batch = Own(), {"x": torch.randn(2, 20, 32)}
    if stats == "gini":
        # Triton has no gini either, and what is named is used or refused.
        unseen = pytest.warns(UserWarning, match="nothing was measured in the first step(.|\n)*it has no second_pass")
        with unseen, pytest.raises(InputError, match="it has no second_pass"):
            watched(model, [batch], backend="triton", stats=stats)
        assert watched(model, [batch], stats=stats).sites[0].heads[0].gini is not None
    else:
        scan = watched(model, [batch], backend="triton", stats=stats)
        want = watched(model, [batch], backend="blocked", stats=stats)
        assert scan.backend == "triton"
        site = scan.sites[0].name
        torch.testing.assert_close(
            scan.row_statistics(site)[stats], want.row_statistics(site)[stats], rtol=5e-6, atol=5e-6
        )
        field = f"{stats}_nats" if stats == "entropy_with_sink" else stats
        one, two = ([getattr(head, field) for head in found.sites[0].heads] for found in (scan, want))
        assert one == pytest.approx(two, rel=5e-6)
    assert counted.calls == 0


def test_a_table_names_every_backend_that_computed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> None:
            attemper.tap(x, x, name="one")
            attemper.tap(x.double(), x.double(), name="two")

    from attemper.backends import table

    # As on a machine whose tensors are where Triton's kernels are: "auto" asks for each call anew.
    there = [
        replace(backend, devices="cpu") if backend.name == "triton" else backend
        for backend in table.BACKENDS
        if backend.name != "native"
    ]
    monkeypatch.setattr(table, "BACKENDS", tuple(there))
    monkeypatch.setattr(table, "_inputs_for", lambda _, given: given)
    scan = watched(Two(), [{"x": torch.randn(1, 2, 9, 8)}])
    assert {site.name for site in scan.sites} == {"one", "two"}
    assert scan.backend == "triton, blocked"
    assert "triton, blocked" in str(scan)


def test_a_backend_for_another_device_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(BackendError, match="its tensors must be on cuda, and these are on cpu"):
        attemper.watch(Own(), backend="triton")
    with pytest.raises(BackendError, match="its tensors must be on cuda, and these are on cpu"):
        attemper.scan(Own(), [torch.randn(1, 4, 32)], backend="triton")
    attemper.watch(nn.Identity(), backend="triton").close()
