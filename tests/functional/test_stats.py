"""AttentionStats: summaries per head, histograms, curves by visible keys, what counts and what does not."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attemper
from attemper import InputError
from attemper.call.result import CallFacts
from attemper.statistics import BINS, NAMES, Column, state_columns
from attemper.types import AttentionStats
from tests.support.calls import had

B, H, Q, K = 2, 3, 12, 12


def measured(backend: str = "blocked", stats: Any = NAMES, **options: Any) -> AttentionStats:
    """Causal rows with an empty one, a non-finite one and a row that sees one key."""
    torch.manual_seed(0)
    query, key = torch.randn(B, H, Q, 4) * 2, torch.randn(B, H, K, 4)
    mask = torch.ones(Q, K, dtype=torch.bool)
    mask[3] = False
    query[1, 2, 5] = math.nan
    names = had(backend, stats)
    options = {"spans": [(0, 2), (7, 7)], **options}
    result = attemper.attention_statistics(query, key, mask, is_causal=True, stats=names, backend=backend, **options)
    assert isinstance(result, AttentionStats)
    return result


def by_hand(values: Tensor, rows: Tensor) -> dict[str, list[float]]:
    """Mean, population std, min, max and count of each head, by Python's own sums."""
    summary: dict[str, list[float]] = {name: [] for name in ("mean", "std", "min", "max", "count")}
    for head in range(values.shape[1]):
        numbers = [float(x) for x, keep in zip(values[:, head].flatten(), rows[:, head].flatten(), strict=True) if keep]
        mean = math.fsum(numbers) / len(numbers)
        summary["mean"].append(mean)
        summary["std"].append(math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / len(numbers)))
        summary["min"].append(min(numbers))
        summary["max"].append(max(numbers))
        summary["count"].append(len(numbers))
    return summary


def test_summaries_per_head_are_those_of_the_valid_rows_that_define_the_statistic(backend: str):
    stats = measured(backend)
    summaries = stats.per_head()
    assert tuple(summaries) == stats.names
    n = stats.visible_keys
    valid = torch.isfinite(stats.lse)
    assert torch.equal(stats.valid, valid)
    assert valid.sum() == B * H * (Q - 1) - 1
    for name, summary in summaries.items():
        rows = valid
        if name == "normalized_entropy" or name == "first_token_mass":
            rows = valid & (n > 1)
        elif name == "key_mass":
            rows = torch.ones(stats.key_mass.shape, dtype=torch.bool)
        want = by_hand(stats[name], rows)
        for part, numbers in want.items():
            got = getattr(summary, part)
            assert got.dtype == torch.float64
            np.testing.assert_allclose(got.numpy(), numbers, rtol=1e-12, atol=1e-14, err_msg=f"{name}.{part}")
        assert summary.empty.tolist() == [B] * H
        assert summary.nonfinite.tolist() == [0, 0, 1]
    kinds = stats.valid.int() + stats.empty.int() + stats.nonfinite.int()
    assert (kinds == 1).all()
    assert stats.empty[:, :, 3].all()
    assert stats.nonfinite.nonzero().tolist() == [[1, 2, 5]]


def test_where_counts_only_the_rows_it_is_given_and_changes_no_value():
    stats = measured()
    keep = torch.arange(Q) < 6
    part = stats.where(keep)
    assert torch.equal(part.valid, stats.valid & keep)
    assert torch.equal(part.empty, stats.empty & keep)
    assert torch.equal(part.nonfinite, stats.nonfinite & keep)
    np.testing.assert_allclose(
        part.per_head()["entropy"].mean.numpy(), by_hand(stats.entropy, stats.valid & keep)["mean"], rtol=1e-12
    )
    assert "key_mass" not in part  # a sum over all rows cannot leave some out
    for name in part:
        assert part[name] is stats[name]
    again = part.where(torch.arange(Q) >= 2)
    assert torch.equal(again.valid, stats.valid & keep & (torch.arange(Q) >= 2))
    nothing = stats.where(torch.zeros(B, 1, Q, dtype=torch.bool))
    assert (nothing.per_head()["entropy"].count == 0).all()
    assert torch.isnan(nothing.per_head()["entropy"].mean).all()
    assert nothing.histogram().sum() == 0


def test_the_histogram_counts_every_row_of_two_keys_or_more_once(backend: str):
    stats = measured(backend)
    counts = stats.histogram()
    assert (counts.shape, counts.dtype) == ((H, BINS), torch.int64)
    want = np.zeros((H, BINS), dtype=np.int64)
    for b, h, i in np.ndindex(B, H, Q):
        if stats.valid[b, h, i] and stats.visible_keys[b, h, i] > 1:
            want[h, min(BINS - 1, int(float(stats.normalized_entropy[b, h, i]) * BINS))] += 1
    assert np.array_equal(counts.numpy(), want)
    uniform = attemper.attention_statistics(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), backend=backend)
    assert uniform.histogram()[0, -1] == 4


def test_the_curve_by_visible_keys_sorts_rows_into_powers_of_two(backend: str):
    stats = measured(backend)
    curve = stats.by_visible_keys()
    assert curve.first.tolist() == [2**i for i in range(BINS)]
    assert curve.last.tolist() == [2 ** (i + 1) - 1 for i in range(BINS)]
    assert set(curve.sums) == {"entropy", "normalized_entropy", "first_token_mass"}
    rows = np.zeros((H, BINS))
    sums = {name: np.zeros((H, BINS)) for name in curve.sums}
    for b, h, i in np.ndindex(B, H, Q):
        n = int(stats.visible_keys[b, h, i])
        if not stats.valid[b, h, i]:
            continue
        bucket = n.bit_length() - 1
        rows[h, bucket] += 1
        for name in sums:
            if name == "entropy" or n > 1:
                sums[name][h, bucket] += float(stats[name][b, h, i])
    assert np.array_equal(curve.rows.numpy(), rows)
    for name, sum_ in sums.items():
        np.testing.assert_allclose(curve.sums[name].numpy(), sum_, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 1023, 1024, 2**20 - 1, 2**20, 2**24])
def test_a_row_falls_into_the_bucket_whose_edges_hold_its_keys(n: int):
    state = dict.fromkeys(state_columns(()), torch.zeros(1, 1, 1)) | {
        Column.VISIBLE_KEYS: torch.full((1, 1, 1), float(n))
    }
    values = {"lse": torch.zeros(1, 1, 1), "max_logit": torch.zeros(1, 1, 1), "entropy": torch.ones(1, 1, 1)}
    curve = AttentionStats(values, state, CallFacts()).by_visible_keys()
    bucket = int(curve.rows[0].argmax())
    assert curve.rows.sum() == 1
    assert curve.first[bucket] <= n <= curve.last[bucket]


def test_summaries_of_parts_of_the_rows_add_up_to_the_whole():
    stats = measured()
    left = torch.arange(Q) < 5
    one, two = stats.where(left), stats.where(~left)
    assert torch.equal(one.histogram() + two.histogram(), stats.histogram())
    curves = [part.by_visible_keys() for part in (one, two, stats)]
    assert torch.equal(curves[0].rows + curves[1].rows, curves[2].rows)
    for name in curves[2].sums:
        torch.testing.assert_close(curves[0].sums[name] + curves[1].sums[name], curves[2].sums[name])


def test_a_statistic_that_was_not_asked_for_says_how_to_ask():
    stats = measured(stats=("entropy",))
    with pytest.raises(AttributeError, match=r"gini was not asked for: pass stats=\('gini',\), or stats='all'"):
        stats.gini
    with pytest.raises(AttributeError, match=r"no attribute 'sharpness'\. Statistics here: lse, entropy, max_logit"):
        stats.sharpness
    with pytest.raises(AttributeError, match="normalized_entropy was not asked for"):
        stats.histogram()
    assert set(stats.by_visible_keys().sums) == {"entropy"}
    assert "entropy" in stats
    assert "gini" not in stats
    assert stats["entropy"] is stats.entropy


def test_detach_leaves_values_and_takes_them_off_the_graph(backend: str):
    query, sink = torch.randn(1, 2, 3, 4, requires_grad=True), torch.zeros(2, requires_grad=True)
    stats = attemper.attention_statistics(query, query, sink_logits=sink * 2, backend=backend)
    assert stats.entropy.requires_grad
    free = copy.deepcopy(stats.detach())  # holds no graph of the sink, which could not be copied
    assert not any(free[name].requires_grad for name in free)
    for name in stats:
        assert torch.equal(free[name], stats[name]), name
    alone = attemper.attention_statistics(query, query, backend=backend).detach()
    assert not alone.merge(alone).entropy.requires_grad


def test_stats_can_be_copied_and_pickled():
    stats = measured()
    for again in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert again.names == stats.names
        for name in stats:
            torch.testing.assert_close(again[name], stats[name], equal_nan=True)
        assert torch.equal(again.valid, stats.valid)


def test_the_representation_names_what_is_held():
    assert repr(measured(stats=("entropy",))) == "AttentionStats(lse, entropy, max_logit; rows [2, 3, 12])"
    sampled = repr(measured(stats=("entropy",), rows=4))
    assert sampled == "AttentionStats(lse, entropy, max_logit; rows [2, 3, 4], 4 of 12 rows, max_logit a lower bound)"


MERGE_MISTAKES = {
    "different statistics": (
        lambda: (part(stats=("entropy",)), part(stats=("mass",))),
        r"merge needs the same statistics in both parts, got \('lse', 'entropy', 'max_logit'\) and",
    ),
    "different rows": (
        lambda: (part(), part(rows=3)),
        r"merge needs the same rows in both parts, got \[1, 2, 4\] and \[1, 2, 3\]",
    ),
    "two sinks": (
        lambda: (part(sink_logits=torch.zeros(2)), part(sink_logits=torch.zeros(2))),
        r"both parts were given sink_logits, or a normalizer with a sink, which would count it twice",
    ),
    "first part too short": (
        lambda: (part(first_tokens=7), part(first_tokens=7)),
        r"the keys of the first part are fewer \(5\) than first_tokens=7",
    ),
    "no statistics": (
        lambda: (part(stats=()), part()),
        r"merge needs the statistics of both parts: pass stats=\('lse',\) to both calls",
    ),
    **{
        f"weights that depend on all keys, {name}": (
            lambda name=name: (part(normalizer=name), part(normalizer=name)),
            f"merge: weights of {name} over some keys do not determine",
        )
        for name in ("scalable_softmax", "sigmoid")
    },
}


def part(stats: Any = "all", rows: int = 4, **options: Any) -> attemper.types.AttentionOutput:
    query, key = torch.randn(1, 2, rows, 4), torch.randn(1, 2, 5, 4)
    return attemper.attention(query, key, key, stats=stats, **options)


@pytest.mark.parametrize("what", MERGE_MISTAKES)
def test_parts_that_do_not_belong_together_are_refused(what: str):
    make, message = MERGE_MISTAKES[what]
    one, two = make()
    with pytest.raises(InputError, match=message):
        one.merge(two)


def test_what_was_read_under_inference_mode_serves_a_later_loss() -> None:
    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    _, stats = attemper.attention(query, query, query, is_causal=True, stats="all")
    assert stats is not None
    with torch.inference_mode():
        stats.per_head()
    torch.where(stats.valid, stats.entropy, 0.0).sum().backward()
    assert query.grad is not None
    rows = stats.valid
    rows.zero_()
    assert (stats.per_head()["entropy"].count == 8).all()
