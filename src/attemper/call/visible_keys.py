"""How many keys each row sees, by its masks, and how many it should: from causality, windows, chunks, documents and
padding, without an n x n tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.backends.contract import UNBOUNDED, Problem
from attemper.backends.reference import positions
from attemper.call.attn_mask import shows

_ROWS = 256
"""Rows of a block."""


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
    return _window_ends((low, high), places, rule.left, 0 if rule.causal else rule.right, keys)


def _window_ends(
    ends: tuple[Tensor, Tensor], places: Tensor, left: int, right: int, keys: int
) -> tuple[Tensor, Tensor]:
    """``ends`` no further from the ``places`` of rows than a window reaches."""
    low, high = ends
    if left < UNBOUNDED:
        low = torch.maximum(low, places - left)
    if right < UNBOUNDED:
        high = torch.minimum(high, places + right + 1)
    low, high = low.clamp(0, keys), high.clamp(0, keys)
    return low, torch.maximum(low, high)


def document_ends(documents: Tensor | None, places: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """The first key of each row's document and the one behind its last, [B|1, Q]; all keys where there are none.
    ``places`` [1, Q]: of the rows among the keys.
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
    do those of padding: the whole sequence is document 0 then. ``tokens`` [B, T] bool: which are no padding.

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


def visible_keys(query: Tensor, keys: int, mask: Tensor | None, causal: bool, offset: int = 0) -> Tensor:
    """[B or 1, H or 1, Q] int64, of attention with this mask (bool: True = visible; floating: added) and causality.
    ``offset``: the place of the first query among the keys.
    """
    places = torch.arange(query.shape[2], device=query.device)[None] + offset
    _, high = _window_ends(document_ends(None, places, keys), places, UNBOUNDED, 0 if causal else UNBOUNDED, keys)
    return visible_between(mask, keys, None, high if causal or mask is None else None)


def structured_visible_keys(problem: Problem) -> Tensor:
    """``visible_keys`` under windows, either alignment and packed documents."""
    (places, documents), keys = positions(problem), problem.key.shape[2]
    low, high = document_ends(None, places[None], keys)
    if documents is not None and problem.cu_seqlens_k is not None:
        high = problem.cu_seqlens_k.to(places).diff()[documents[0]][None]
    elif problem.mask is not None and min(problem.left, problem.right) >= UNBOUNDED:
        return visible_between(problem.mask, keys, None, None)
    return visible_between(problem.mask, keys, *_window_ends((low, high), places, problem.left, problem.right, keys))


def visible_between(mask: Tensor | None, keys: int, low: Tensor | None, high: Tensor | None) -> Tensor:
    """[B, H, Q], each dimension full or 1: keys that a mask shows from ``low`` up to before ``high``, [B|1, Q]; None
    for the first and the last. Without a mask all of them; there is a ``high`` then.
    """
    if mask is None:
        assert high is not None
        return (high if low is None else high - low)[:, None]
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask.expand(*mask.shape[:3], keys)
    if high is None:
        return torch.cat([shows(part).sum(-1) for part in mask.split(_ROWS, 2)], 2)
    if mask.shape[2] == 1:
        counts = torch.nn.functional.pad(shows(mask)[:, :, 0].cumsum(-1), (1, 0))
        counts = counts.expand(max(len(counts), len(high)), *counts.shape[1:])
        ends = (
            end[:, None].expand(*counts.shape[:2], end.shape[1]) for end in ((high,) if low is None else (high, low))
        )
        last, *first = (counts.gather(2, end) for end in ends)
        return last - first[0] if first else last
    # Row by row there is no n x n tensor of counts, only blocks of marks.
    places = torch.arange(keys, device=mask.device)
    found = []
    for start in range(0, max(mask.shape[2], 1), _ROWS):
        rows = slice(start, start + _ROWS)
        band = places < high[:, None, rows, None]
        if low is not None:
            band &= places >= low[:, None, rows, None]
        found.append((shows(mask[:, :, rows]) & band).sum(-1))
    return torch.cat(found, 2)
