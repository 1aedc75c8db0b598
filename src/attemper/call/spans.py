"""``spans=``: the keys whose weight ``span_mass`` sums."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attemper.checks import index_of
from attemper.errors import InputError

Spans: TypeAlias = Tensor | Sequence[tuple[int, int]]
"""Marks of keys, [K] or [B, K] bool, or pairs (first, last) of keys, both in the span."""


def span_keys(where: str, spans: Spans | None, key: Tensor, asked: bool) -> Tensor | None:
    """[B|1, K] bool: the marked keys of ``key`` [B, G, K, D]; None where ``span_mass`` is not ``asked``."""
    if spans is None:
        if asked:
            raise InputError(
                f"{where}(stats=...): span_mass needs spans=, the keys whose weight is summed: pairs (first, last), "
                "both included, such as spans=[(0, 3)] for the first four keys, or a bool tensor [keys]."
            )
        return None
    marks = _of_marks(where, spans, key) if isinstance(spans, Tensor) else _of_pairs(where, spans, key)
    return marks if asked else None


def _of_marks(where: str, spans: Tensor, key: Tensor) -> Tensor:
    batch, keys = key.shape[0], key.shape[2]
    if spans.dtype != torch.bool or spans.shape not in ((keys,), (1, keys), (batch, keys)):
        raise InputError(
            f"{where}(spans=...) must be bool, [{keys}] or [{batch}, {keys}] (True: the key is in the span), got "
            f"{list(spans.shape)} {spans.dtype}. Pairs of numbers come as a list: spans=[(first, last)]."
        )
    if spans.device != key.device:
        raise InputError(
            f"{where}(spans=...) is on {spans.device}, the keys on {key.device}: bring them to one device."
        )
    return spans if spans.dim() == 2 else spans[None]


def _of_pairs(where: str, spans: Any, key: Tensor) -> Tensor:
    keys = key.shape[2]
    if isinstance(spans, str) or not isinstance(spans, Sequence) or not spans:
        raise InputError(
            f"{where}(spans=...) must be a bool tensor [{keys}] or a list of at least one pair (first, last), got "
            f"{spans!r}."
        )
    marks = torch.zeros((1, keys), dtype=torch.bool, device=key.device)
    for span in spans:
        first, last = _pair(where, span, keys)
        marks[:, first : last + 1] = True
    return marks


def _pair(where: str, span: Any, keys: int) -> tuple[int, int]:
    ends = [index_of(end) for end in span] if isinstance(span, Sequence) and len(span) == 2 else [None, None]
    first, last = ends
    if first is None or last is None:
        raise InputError(f"{where}(spans=...): a span is a pair of ints (first, last), got {span!r}.")
    if not 0 <= first <= last < keys:
        raise InputError(
            f"{where}(spans=...): span ({first}, {last}) must have 0 <= first <= last < {keys}, the number of keys. "
            "Both ends are in the span: (0, 3) is the first four keys, (3, 3) the fourth alone."
        )
    return first, last


def spans_in_words(spans: Spans | Any) -> list[list[int]] | str:
    """Which keys ``spans`` marks, so that what was measured with others is told apart: ranges [first, last] in order,
    a digest where each sequence has its own marks, or that a function of each batch marks them, which has no name.
    """
    if callable(spans):
        return "a function of each batch"
    if not isinstance(spans, Tensor):
        marked = sorted({key for first, last in spans for key in range(first, last + 1)})
    elif spans.dim() == 2 and spans.shape[0] > 1:
        marks = spans.detach().cpu().contiguous()
        digest = hashlib.blake2b(marks.numpy().tobytes(), digest_size=6).hexdigest()
        return f"of each of {marks.shape[0]} sequences of {marks.shape[1]} keys, #{digest}"
    else:
        marked = spans.detach().cpu().reshape(-1).nonzero()[:, 0].tolist()
    ranges: list[list[int]] = []
    for key in marked:
        if ranges and ranges[-1][1] == key - 1:
            ranges[-1][1] = key
        else:
            ranges.append([key, key])
    return ranges
