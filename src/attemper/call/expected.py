"""What each row should see: from causality, windows, chunks, documents and padding, without an n x n tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.backends.contract import UNBOUNDED


@dataclass(frozen=True, eq=False)
class Rule:
    """Which keys the rows of an attention should see. Tensors are on the device of the call; nothing waits for it."""

    causal: bool = False
    """No key behind the row's own."""
    left: int = UNBOUNDED
    """Keys before its own that a row sees at most: a window of w keys, its own among them, has w - 1."""
    right: int = UNBOUNDED
    """The same behind its own."""
    chunk: int | None = None
    """Rows see keys of their own chunk of so many, counted from the first token of the document."""
    offset: int = 0
    """Where the first row stands among the keys: behind so many that a cache holds."""
    tokens: Tensor | None = None
    """[B, K] bool: keys that are no padding; None for all."""
    documents: Tensor | None = None
    """[B|1, K] int: of which document each key is. Neighbours of one number are one document."""


def expected_keys(rule: Rule, queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    r"""How many keys each of Q rows should see, of K keys: [B|1, Q] int64.

    .. math:: n_i = |\{j : t_j,\ i - l \le j \le i + r,\ j \le i \text{ if causal},\ d_j = d_i,\ c_j = c_i\}|

    with i the place of the row among the keys, t its tokens, l and r the window, d documents and c chunks. Rows that
    are padding themselves have a number without meaning.

    Example:
        >>> expected_keys(Rule(causal=True, left=1), 4, 4)
        tensor([[1, 2, 2, 2]])
    """
    low, high = expected_ends(rule, queries, keys, device)
    if rule.tokens is None:
        return high - low
    before = torch.nn.functional.pad(rule.tokens.cumsum(1), (1, 0))
    low, high = (end.expand(len(before), queries) for end in (low, high))
    return before.gather(1, high) - before.gather(1, low)


def expected_ends(rule: Rule, queries: int, keys: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """The first key that each row should see and the one behind the last, padding among them: [B|1, Q] int64 each."""
    places = torch.arange(rule.offset, rule.offset + queries, device=device)[None]
    low, high = document_ends(rule.documents, places, keys)
    if rule.chunk is not None:
        start = low
        if rule.tokens is not None:  # padding before the first token is of no chunk
            start = torch.maximum(low, rule.tokens.to(torch.uint8).argmax(1, keepdim=True))
        start = start + (places - start) // rule.chunk * rule.chunk
        low, high = torch.maximum(low, start), torch.minimum(high, start + rule.chunk)
    if rule.left < UNBOUNDED:
        low = torch.maximum(low, places - rule.left)
    right = 0 if rule.causal else rule.right
    if right < UNBOUNDED:
        high = torch.minimum(high, places + right + 1)
    low, high = low.clamp(0, keys), high.clamp(0, keys)
    return low, torch.maximum(low, high)


def document_ends(documents: Tensor | None, places: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The first key of each row's document and the one behind its last, [B|1, Q]; all keys where there are none.

    Args:
        documents: [B|1, K] as in ``Rule``.
        places: [1, Q] of the rows among the keys.
    """
    if documents is None:
        return torch.zeros_like(places), torch.full_like(places, keys)
    at = torch.arange(keys, device=documents.device)
    begins = torch.nn.functional.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
    starts = torch.where(begins, at, 0).cummax(1).values
    nexts = torch.where(begins, at, keys).roll(-1, 1)
    nexts[:, -1:] = keys
    ends = nexts.flip(1).cummin(1).values.flip(1)
    rows = places.clamp(0, keys - 1).expand(len(documents), places.shape[1])
    return starts.gather(1, rows), ends.gather(1, rows)


def documents_of_positions(positions: Tensor, tokens: Tensor | None = None) -> Tensor:
    """[B, T] int64: the documents that positions [B, T] declare, which start anew where one begins.

    Positions count up by one, and go back to the first of the sequence. Those that do anything else declare none, nor
    do those of padding: the whole sequence is document 0 then.

    Args:
        tokens: [B, T] bool: which are no padding; None for all.

    Example:
        >>> documents_of_positions(torch.tensor([[0, 1, 2, 0, 1]]))
        tensor([[0, 0, 0, 1, 1]])
    """
    real = torch.ones_like(positions, dtype=torch.bool) if tokens is None else tokens
    first = positions.gather(1, real.to(torch.uint8).argmax(1, keepdim=True))
    step, both = positions.diff(dim=1), real[:, 1:] & real[:, :-1]
    counts, begins = step == 1, both & (positions[:, 1:] == first) & (step != 1)
    regular = (counts | begins | ~both).all(1, keepdim=True) & counts.any(1, keepdim=True)
    return torch.nn.functional.pad((begins & regular).cumsum(1), (1, 0))


def documents_of_starts(starts: Tensor, tokens: int) -> Tensor:
    """[1, T] int64: the documents that begin at ``starts`` [documents + 1], as ``cu_seq_lens`` has them."""
    places = torch.arange(tokens, device=starts.device)
    return (torch.searchsorted(starts.to(places.dtype), places, right=True) - 1)[None]


def documents_of_numbers(mask: Tensor) -> Tensor:
    """[B, T] int64: the documents of a mask [B, T] that numbers them, 0 for padding; of one of 0 and 1 all are one."""
    numbers = mask.to(torch.int64)
    begins = (numbers.diff(dim=1) != 0) & (numbers[:, 1:] > 0) & (numbers[:, :-1] > 0)
    return torch.nn.functional.pad(begins.cumsum(1), (1, 0))
