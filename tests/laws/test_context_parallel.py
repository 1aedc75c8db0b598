"""Sequences that are spread over ranks, by simulated shards: what each of them computes, joined, is the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper.call.result import AttentionOutput, AttentionStats
from attemper.monitor.head_sums import SiteSums
from attemper.statistics import STATISTICS
from tests.laws.rows import BACKENDS, close

RANKS, SHARD, HEADS, SIZE = 4, 6, 4, 8
STATS = (
    "entropy", "normalized_entropy", "effective_tokens", "max_weight", "max_logit", "logit_variance",
    "first_token_mass", "lse", "visible_keys",
)  # fmt: skip


@pytest.fixture
def whole() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a sequence of ``RANKS`` shards, float64."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, HEADS, RANKS * SHARD, SIZE, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return 3 * query, key, value


def shards(tensor: Tensor, dimension: int = 2) -> tuple[Tensor, ...]:
    return tensor.split(tensor.shape[dimension] // RANKS, dimension)


def in_a_ring(
    rank: int, queries: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], **options
) -> AttentionOutput:
    """What a rank has of its queries when the keys of the ranks before it have come round, the nearest first."""
    found = attemper.attention(queries, keys[rank], values[rank], is_causal=True, **options)
    for turn in range(rank - 1, -1, -1):
        found = attemper.attention(queries, keys[turn], values[turn], **options).merge(found)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_in_a_ring_merge_states_to_the_rows_of_the_whole_sequence(backend: str, whole) -> None:
    query, key, value = (tensor.clone().requires_grad_() for tensor in whole)
    options = {"stats": STATS, "backend": backend}
    expected = attemper.attention(query, key, value, is_causal=True, **options)
    found = [in_a_ring(rank, part, shards(key), shards(value), **options) for rank, part in enumerate(shards(query))]
    close(torch.cat([one.output for one in found], 2), expected.output, "output")
    assert expected.stats is not None
    for name in STATS:
        close(
            torch.cat([one.stats[name] for one in found if one.stats is not None], 2), expected.stats[name], name, 1e-11
        )
    upstream = torch.randn(expected.output.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(expected.output, (query, key, value), upstream, retain_graph=True)
    parts = [one.output for one in found]
    for one, two in zip(
        torch.autograd.grad(parts, (query, key, value), list(upstream.split(SHARD, 2))), gradients, strict=True
    ):
        close(one, two, "gradient", 1e-9)


def site(stats: list[AttentionStats], heads: int = HEADS) -> Tensor:
    """The sums of a site over some calls."""
    sums = SiteSums("layers.0", "self", "train", heads)
    for part in stats:
        sums.add(part, SHARD, RANKS * SHARD)
    return sums.sums


def test_ranks_that_gather_keys_have_some_rows_of_the_whole_and_their_sums_add_up(whole) -> None:
    query, key, _ = whole
    expected = attemper.attention_statistics(query, key, is_causal=True)
    seen = torch.ones(RANKS * SHARD, RANKS * SHARD, dtype=torch.bool).tril()
    found = [
        attemper.attention_statistics(part, key, attn_mask=mask)
        for part, mask in zip(shards(query), shards(seen, 0), strict=True)
    ]
    for name in expected:
        if STATISTICS[name].mergeable:
            close(torch.cat([one[name] for one in found], 2), expected[name], name, 1e-12)
    close(site(found), site([expected]), "sums", 1e-12)


def test_ranks_that_trade_heads_for_tokens_have_whole_rows_of_some_heads(whole) -> None:
    query, key, _ = whole
    expected = site([attemper.attention_statistics(query, key, is_causal=True)])
    heads = HEADS // RANKS
    for rank, (some, keys) in enumerate(zip(shards(query, 1), shards(key, 1), strict=True)):
        own = site([attemper.attention_statistics(some, keys, is_causal=True)], heads)
        close(own, expected[rank * heads : (rank + 1) * heads], "sums", 1e-12)
