"""How many keys each row should see, against marks of every query and key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attemper.backends.contract import UNBOUNDED
from attemper.call.visible_keys import (
    Rule,
    documents_of_numbers,
    documents_of_positions,
    documents_of_starts,
    expected_keys,
)


def counted(rule: Rule, queries: int, keys: int) -> Tensor:
    """[B, Q], by asking every pair."""
    batch = max(1, *(len(one) for one in (rule.tokens, rule.documents) if one is not None), 0)
    found = torch.zeros(batch, queries, dtype=torch.int64)
    for b in range(batch):
        tokens = [True] * keys if rule.tokens is None else rule.tokens[b % len(rule.tokens)].tolist()
        documents = [0] * keys if rule.documents is None else rule.documents[b % len(rule.documents)].tolist()
        first = tokens.index(True) if True in tokens else 0
        for row in range(queries):
            own = row + rule.offset
            for key in range(keys):
                origin = max(documents.index(documents[own]), first if rule.tokens is not None else 0)
                sees = tokens[key] and documents[key] == documents[own]
                sees &= not rule.causal or key <= own
                sees &= own - key <= rule.left and (rule.causal or key - own <= rule.right)
                sees &= rule.chunk is None or (key - origin) // rule.chunk == (own - origin) // rule.chunk
                found[b, row] += int(sees)
    return found


@st.composite
def rules(draw: st.DrawFn) -> tuple[Rule, int, int]:
    queries, offset = draw(st.integers(1, 9)), draw(st.integers(0, 4))
    keys, batch = queries + offset, draw(st.integers(1, 3))
    side = st.one_of(st.just(UNBOUNDED), st.integers(0, 5))
    starts = torch.tensor([[draw(st.integers(0, 1)) for _ in range(keys)] for _ in range(batch)])
    padding = [draw(st.integers(0, keys - 1)) for _ in range(batch)]
    tokens = torch.arange(keys) >= torch.tensor(padding)[:, None]
    tokens = tokens.flip(1) if draw(st.booleans()) else tokens
    rule = Rule(
        causal=draw(st.booleans()),
        left=draw(side),
        right=draw(side),
        chunk=draw(st.one_of(st.none(), st.integers(1, 4))),
        offset=offset,
        tokens=draw(st.sampled_from([None, tokens])),
        documents=draw(st.sampled_from([None, starts.cumsum(1)])),
    )
    return rule, queries, keys


@given(rules())
def test_rows_should_see_the_keys_that_their_rules_leave(drawn: tuple[Rule, int, int]):
    rule, queries, keys = drawn
    found, wanted = expected_keys(rule, queries, keys).expand(-1, queries), counted(rule, queries, keys)
    places = torch.arange(queries) + rule.offset
    real = torch.ones_like(wanted, dtype=torch.bool) if rule.tokens is None else rule.tokens[:, places]
    found, wanted, real = torch.broadcast_tensors(found, wanted, real)
    assert torch.equal(found[real], wanted[real])


def test_rows_see_all_keys_without_a_rule():
    assert expected_keys(Rule(), 3, 5).tolist() == [[5, 5, 5]]


@pytest.mark.parametrize(
    ("positions", "tokens", "documents"),
    [
        ([0, 1, 2, 0, 1], None, [0, 0, 0, 1, 1]),
        ([0, 0, 1, 0, 1], None, [0, 1, 1, 2, 2]),
        ([2, 3, 4, 2, 3], None, [0, 0, 0, 1, 1]),
        ([0, 1, 2, 3, 4], None, [0, 0, 0, 0, 0]),
        ([7, 8, 9, 10, 11], None, [0, 0, 0, 0, 0]),
        ([0, 0, 0, 0, 0], None, [0, 0, 0, 0, 0]),
        ([0, 1, 2, 5, 6], None, [0, 0, 0, 0, 0]),
        ([1, 1, 0, 1, 2], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]),
        ([-1, 0, 1, 0, 1], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1]),
        ([0, 1, 0, 1, 1], [1, 1, 1, 1, 0], [0, 0, 1, 1, 1]),
        ([0, 1, 2, 2, 2], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]),
    ],
)  # fmt: skip
def test_documents_begin_where_positions_start_anew(positions: list[int], tokens: list[int] | None, documents):
    real = None if tokens is None else torch.tensor([tokens]).bool()
    assert documents_of_positions(torch.tensor([positions]), real).tolist() == [documents]


def test_each_sequence_declares_its_own_documents():
    positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3], [3, 1, 0, 2]])
    assert documents_of_positions(positions).tolist() == [[0, 0, 1, 1], [0] * 4, [0] * 4]


def test_documents_begin_at_their_starts():
    assert documents_of_starts(torch.tensor([0, 2, 5], dtype=torch.int32), 6).tolist() == [[0, 0, 1, 1, 1, 2]]


@pytest.mark.parametrize(
    ("mask", "documents"),
    [([1, 1, 2, 2, 0], [0, 0, 1, 1, 1]), ([0, 0, 1, 1, 1], [0] * 5), ([1, 1, 1, 0, 0], [0] * 5)],
)
def test_a_mask_of_numbers_declares_documents(mask: list[int], documents: list[int]):
    assert documents_of_numbers(torch.tensor([mask])).tolist() == [documents]
