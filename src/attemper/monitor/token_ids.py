"""The token ids that batches hold, and what tells two texts apart without keeping them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_HELD = 64
"""Batches whose ids wait for their digest: each is read from the device, which a pass must not wait for."""


def sequences_of(batch: Any, *, whole: bool = False) -> list[Tensor] | None:
    """The token ids of each sequence of a batch, [tokens], padding left out unless ``whole``; None if it holds none."""
    ids, mask = _ids(batch)
    return None if ids is None else _real(ids, None if whole else mask)


def _real(ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """[tokens] of each sequence."""
    if mask is None or mask.shape != ids.shape:
        return list(ids)
    return [row[mask[number].bool()] for number, row in enumerate(ids)]


def _ids(batch: Any) -> tuple[Tensor | None, Tensor | None]:
    """The token ids [B, tokens] that a batch holds, and its mask."""
    if isinstance(batch, Mapping):
        named = {str(key): part for key, part in batch.items() if isinstance(part, Tensor)}
        ids = named.get("input_ids", next((p for key, p in named.items() if key.endswith("input_ids")), None))
        return ids, named.get("attention_mask")
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    whole = (part for part in parts if isinstance(part, Tensor) and part.dim() == 2 and not part.is_floating_point())
    return next(whole, None), None


def hash_of_tokens(rows: Iterable[Tensor], size: int = 16) -> str:
    """A hash of the token ids of sequences, each [tokens], of so many bytes."""
    digest = hashlib.blake2b(digest_size=size)
    for row in rows:
        numbers = row.detach().cpu().to(torch.int64)
        digest.update(len(numbers).to_bytes(8, "little") + numbers.numpy().tobytes())
    return digest.hexdigest()


class TextDigest:
    """The sum of hashes of all sequences that were read: the same whatever the batches, the shards and their order."""

    def __init__(self, before: str | None = f"{0:016x}") -> None:
        self._sum = None if before is None else int(before, 16)
        self._held: list[tuple[Tensor, Tensor | None]] = []

    def add(self, batch: Any) -> None:
        """Takes a batch. Now and then waits for its device."""
        ids, mask = _ids(batch)
        if ids is None:
            self._sum = None
        elif self._sum is not None:
            self._held.append((ids, mask))
        if len(self._held) >= _HELD:
            self._settle()

    @property
    def value(self) -> str | None:
        """16 hexadecimal digits; None where a batch held no token ids."""
        self._settle()
        return None if self._sum is None else f"{self._sum:016x}"

    def _settle(self) -> None:
        rows = [row for ids, mask in self._held for row in _real(ids, mask)]
        self._held.clear()
        if self._sum is not None:
            self._sum = (self._sum + sum(int(hash_of_tokens([row], 8), 16) for row in rows)) % 2**64
