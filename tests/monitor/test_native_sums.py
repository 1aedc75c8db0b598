"""Rows that the native kernels sum per head in one pass give the readings that their statistics give."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.backends.sums import COLUMNS, WIDTH
from attemper.call.result import AttentionStats
from attemper.monitor import head_sums
from attemper.readings.reading import SiteReading
from attemper.readings.sample import SiteLabel
from tests.support.fixtures import NATIVE

pytestmark = pytest.mark.skipif(not NATIVE, reason="the native kernels are not built here")
BATCH, HEADS, ROWS = 3, 4, 37


def statistics(seed: int = 0, spoiled: bool = False, flat: bool = False, **options: Any) -> AttentionStats:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (3 * torch.randn(BATCH, HEADS, ROWS, 16, generator=generator) for _ in range(3))
    if spoiled:
        query[1, 2, 5:9] = torch.inf
    if flat:
        query[:, 1] = 0.0
    stats = attemper.attention(query, key, value, stats="all", backend="native", **options).stats
    assert stats is not None
    return stats


def reading(stats: AttentionStats) -> SiteReading:
    site = head_sums.SiteSums(SiteLabel("site", "self", "eval", None, "full", "softmax", HEADS))
    site.add(stats, ROWS, ROWS)
    return site.reading()


def mask(share: float) -> Tensor:
    return torch.rand(BATCH, 1, ROWS, ROWS, generator=torch.Generator().manual_seed(1)) < share


REAL = torch.rand(BATCH, 1, ROWS, generator=torch.Generator().manual_seed(2)) > 0.3
EACH = torch.rand(BATCH, HEADS, ROWS, generator=torch.Generator().manual_seed(3)) > 0.3
CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "half": {"attn_mask": mask(0.5)}, "few": {"attn_mask": mask(0.03)},
    "spoiled": {"spoiled": True}, "some flat": {"flat": True, "is_causal": True},
    "below 0": {"attn_mask": torch.full((ROWS, ROWS), -300.0)},
    "three first tokens": {"first_tokens": 3, "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("included", [None, REAL, EACH], ids=["all", "real", "each"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.turns(3)
def test_readings_are_those_of_the_statistics(
    case: str, included: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = statistics(**CASES[case])
    stats = stats if included is None else stats.where(included)
    assert stats.sums() is not None
    got = reading(stats)
    monkeypatch.setattr(AttentionStats, "sums", lambda _: None)
    want = reading(stats)
    assert sum(head.rows for head in want.heads) > 0
    assert same(got, want)


def same(one: Any, two: Any) -> bool:
    """Equal, numbers but for their last digits in float32."""
    if isinstance(one, float) and isinstance(two, float):
        return one == pytest.approx(two, rel=2e-7, abs=1e-9)
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    if is_dataclass(one):
        return all(same(getattr(one, part.name), getattr(two, part.name)) for part in fields(one))
    return one == two


def test_what_counts_which_rows() -> None:
    stats = statistics(spoiled=True, attn_mask=mask(0.03))
    sums = stats.sums()
    assert sums is not None
    assert sums.shape == (HEADS, WIDTH)
    for name, rows in (("rows", stats.valid), ("empty", stats.empty), ("nonfinite", stats.nonfinite)):
        assert rows.any()
        assert torch.equal(sums[:, COLUMNS.index(name)], rows.sum((0, 2)).double())
    assert "max_logit" in COLUMNS


def test_any_number_of_threads_gives_the_same_bits() -> None:
    stats, before = statistics(is_causal=True), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(stats.sums())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_what_the_sums_lack_is_reduced_from_statistics() -> None:
    assert statistics(sink_logits=torch.zeros(HEADS)).sums() is None
    assert statistics(normalizer="sparsemax").sums() is None
    query = torch.randn(1, 2, 5, 8)
    assert attemper.attention_statistics(query, query, stats=("entropy",), backend="native").sums() is None
    assert attemper.attention_statistics(query, query, stats="all", backend="blocked").sums() is None
