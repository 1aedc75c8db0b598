"""The tokens of a text as text: by a tokenizer, as they were given, as ids, or as places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attemper.errors import InputError


def checked_labels(tokens: Any, tokenizer: Any) -> None:
    """Refuses what names no tokens.

    Raises:
        InputError: both are given, ``tokens`` is no sequence of strings, or ``tokenizer`` cannot name an id.
    """
    if tokens is not None and tokenizer is not None:
        raise InputError("pattern(tokens=..., tokenizer=...): give one of the two; tokens are named already.")
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str) and all(isinstance(t, str) for t in tokens)
    if tokens is not None and not listed:
        raise InputError(
            f"pattern(tokens=...) must be a sequence of strings, one for each key, got {type(tokens).__name__}."
        )
    if tokenizer is not None and _naming(tokenizer) is None:
        raise InputError(
            "pattern(tokenizer=...) must have convert_ids_to_tokens or decode, or be a function from a list of ids to "
            f"strings; got {type(tokenizer).__name__}."
        )


def labels(ids: Tensor | None, length: int, tokenizer: Any) -> tuple[str, ...]:
    """A string for each of ``length`` tokens: of its id, or ``#place`` where the id is not known."""
    if ids is None:
        return tuple(f"#{place}" for place in range(length))
    numbers = [int(number) for number in ids.tolist()]
    naming = None if tokenizer is None else _naming(tokenizer)
    known = [number for number in numbers if number >= 0]
    named = [str(number) for number in known] if naming is None else naming(known)
    following = iter(named)
    return tuple(next(following) if number >= 0 else f"#{place}" for place, number in enumerate(numbers))


def given_labels(tokens: Sequence[str], real: Tensor | None, length: int) -> tuple[str, ...]:
    """``tokens`` for each of ``length`` keys: given for all of them, or for those that are no padding.

    Raises:
        InputError: there are more or fewer.
    """
    places = torch.arange(length) if real is None else real.nonzero().view(-1)
    if len(tokens) == length:
        return tuple(tokens)
    if len(tokens) != len(places):
        padding = "" if real is None else f" ({len(places)} without padding)"
        raise InputError(f"pattern(tokens=...) has {len(tokens)} strings, and the site has {length} keys{padding}.")
    named = dict(zip(places.tolist(), tokens, strict=True))
    return tuple(named.get(place, "") for place in range(length))


def _naming(tokenizer: Any) -> Callable[[list[int]], list[str]] | None:
    """How a tokenizer names ids, one by one."""
    if hasattr(tokenizer, "convert_ids_to_tokens"):
        return lambda ids: _or_ids(tokenizer.convert_ids_to_tokens(ids), ids)
    if hasattr(tokenizer, "decode"):
        return lambda ids: [str(tokenizer.decode([number])) for number in ids]
    if not callable(tokenizer):
        return None
    function: Callable[[list[int]], Any] = tokenizer
    return lambda ids: _or_ids(function(ids), ids)


def _or_ids(tokens: Sequence[Any], ids: list[int]) -> list[str]:
    """Tokens; the id for one that is not in the vocabulary."""
    if len(tokens) != len(ids):
        raise InputError(f"pattern(tokenizer=...) gave {len(tokens)} strings for {len(ids)} ids: one for each, please.")
    return [str(number) if token is None else str(token) for token, number in zip(tokens, ids, strict=True)]
