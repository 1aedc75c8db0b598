"""Context parallelism on ranks that one process plays: each way to spread sequences gives the rows of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.call.result import AttentionStats
from tests.support.calls import Result, attended

TOKENS, HEADS, GROUPS = 24, 4, 2
STATS = ("entropy", "max_logit", "first_token_mass", "logit_variance", "normalized_entropy", "effective_tokens")


@pytest.fixture
def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of two sequences."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, TOKENS, 8, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS))
    return (3 * query).requires_grad_(), key.requires_grad_(), value.requires_grad_()


def whole_of(query: Tensor, key: Tensor, value: Tensor) -> Result:
    return attended("auto", query, key, value, is_causal=True, enable_gqa=True, stats=STATS)


def assert_rows(found: list[AttentionStats], whole: AttentionStats, rows: Tensor, atol: float) -> None:
    """The parts, one after another, are these rows of the whole."""
    for name in STATS:
        together = torch.cat([part[name] for part in found], 2)
        torch.testing.assert_close(together, whole[name][:, :, rows], rtol=1e-12, atol=atol, msg=name)


@pytest.mark.parametrize("ranks", [2, 4])
def test_states_of_a_ring_merge_to_the_whole_with_their_gradients(
    ranks: int, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    query, key, value = (part.split(TOKENS // ranks, 2) for part in operands)

    def attend(rank: int) -> Result:
        options: dict[str, Any] = {"enable_gqa": True, "stats": STATS}
        found = attended("auto", query[rank], key[rank], value[rank], is_causal=True, **options)
        for turn in range(rank - 1, -1, -1):  # the nearest first: what comes holds earlier keys
            found = attended("auto", query[rank], key[turn], value[turn], **options).merge(found)
        return found

    ring, whole = [attend(rank) for rank in range(ranks)], whole_of(*operands)
    output = torch.cat([part.output for part in ring], 2)
    torch.testing.assert_close(output, whole.output, rtol=1e-12, atol=1e-12)
    assert_rows([part.stats for part in ring], whole.stats, torch.arange(TOKENS), 1e-12)
    losses = [output.square().sum() + sum(part.stats.entropy.sum() for part in ring)]
    losses += [whole.output.square().sum() + whole.stats.entropy.sum()]
    one, two = (torch.autograd.grad(loss, operands, retain_graph=True) for loss in losses)
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_keys_give_exact_rows_also_of_chunks_that_balance_the_load(
    ranks: int, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    query, key, _ = operands
    chunks = torch.arange(TOKENS).chunk(2 * ranks)
    own = [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)]
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    found = [
        attemper.attention_statistics(query[:, :, rows], key, attn_mask=visible[rows], enable_gqa=True, stats=STATS)
        for rows in own
    ]
    assert_rows(found, whole_of(*operands).stats, torch.cat(own), 1e-14)


def test_all_to_all_has_whole_sequences_of_some_heads(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, _ = operands
    whole, each = whole_of(*operands).stats, HEADS // GROUPS
    for rank in range(GROUPS):
        heads = slice(rank * each, (rank + 1) * each)
        found = attemper.attention_statistics(
            query[:, heads], key[:, rank : rank + 1], is_causal=True, enable_gqa=True, stats=STATS
        )
        for name in STATS:
            torch.testing.assert_close(found[name], whole[name][:, heads], rtol=1e-12, atol=1e-14, msg=name)
