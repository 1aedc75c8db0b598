"""``scan(..., keep_rows=...)``: which queries of a text are kept, and the statistics of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from attemper.call.result import AttentionStats
from attemper.errors import InputError
from attemper.readings.rows import Rows, SiteRows
from attemper.readings.sample import SiteKey
from attemper.readings.sums import SiteTotals

Choice: TypeAlias = str | Sequence[int] | Tensor
"""Of each text: "last", places of queries (below 0 from its last token back), or marks, [Q] or [B, Q] bool."""
KeepRows: TypeAlias = Choice | Callable[[Any], Choice]
"""The choice, or what makes it from a batch."""

ADVICE = (
    "Pass 'last', a list of places such as [0, -1] (below 0 from the text's last token back), or a function of a batch "
    "that gives one of these or a bool tensor [B, Q]."
)


class RowKeeper:
    """Keeps rows of chosen queries, site by site: padding is never kept, and nothing of a pass that failed."""

    def __init__(self, keep: KeepRows) -> None:
        """``InputError``: ``keep`` is nothing that chooses queries."""
        self._keep = keep
        self._choice: Choice = "last" if callable(keep) else _check(keep)
        self._parts: dict[SiteKey, list[SiteRows]] = {}
        self._texts: dict[SiteKey, int] = {}

    def take_batch(self, batch: Any) -> None:
        """Chooses for the batch that the next pass reads."""
        if callable(self._keep):
            self._choice = _check(self._keep(batch))

    def add(self, key: SiteKey, stats: AttentionStats) -> None:
        """Takes the chosen rows of a call."""
        read = stats.valid | stats.empty | stats.nonfinite  # all rows but those of padding
        marks = _marks(self._choice, read.any(1), key[0])
        texts, queries = marks.nonzero(as_tuple=True)
        names = (name for name in stats.names if name != "key_mass")
        values = {name: stats[name].detach().transpose(1, 2)[texts, queries].cpu().numpy() for name in names}
        start = self._texts.get(key, 0)
        self._texts[key] = start + marks.shape[0]
        kept = SiteRows(*key, start + texts.cpu().numpy(), queries.cpu().numpy(), values)
        self._parts.setdefault(key, []).append(kept)

    def move(self, site: SiteKey, other: SiteKey) -> None:
        """Makes the rows of a site those of another one, behind those that it has."""
        start = self._texts.get(other, 0)
        self._texts[other] = start + self._texts.pop(site, 0)
        moved = [replace(part, name=other[0], texts=start + part.texts) for part in self._parts.pop(site, [])]
        self._parts.setdefault(other, []).extend(moved)

    def rows(self, sites: Mapping[SiteKey, SiteTotals]) -> Rows:
        if not any(len(part.texts) for parts in self._parts.values() for part in parts):
            raise InputError(f"scan(keep_rows=...) kept nothing: no text has a token that it chooses. {ADVICE}")
        kept = ((_join(parts), sites[key].label) for key, parts in self._parts.items() if key in sites)
        return Rows(tuple(replace(rows, layer=label.layer) for rows, label in kept))


def _check(choice: Any) -> Choice:
    if isinstance(choice, Tensor):
        if choice.dtype == torch.bool and choice.dim() in (1, 2):
            return choice
        raise InputError(f"scan(keep_rows=...): marks of queries are bool, [Q] or [B, Q], got {choice.dtype}. {ADVICE}")
    if choice == "last":
        return choice
    places = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
    if not places or not all(isinstance(place, int) and not isinstance(place, bool) for place in choice):
        raise InputError(f"scan(keep_rows=...) cannot choose queries by {choice!r}. {ADVICE}")
    return choice


def _marks(choice: Choice, read: Tensor, site: str) -> Tensor:
    """Which rows are kept, [B, Q] bool; ``read`` [B, Q]: those that are not padding."""
    queries = read.shape[1]
    if isinstance(choice, Tensor):
        if choice.shape[-1] != queries or choice.shape[:-1] not in ((), (1,), read.shape[:1]):
            raise InputError(
                f"scan(keep_rows=...) marks {list(choice.shape)}, but {site} attends with queries {list(read.shape)}: "
                "marks are [Q] or [B, Q]."
            )
        return read & choice.to(read.device)
    places = [-1] if isinstance(choice, str) else choice
    count = read.cumsum(1)
    marks = torch.zeros_like(read)
    for place in places:
        if place < 0:
            marks |= count == count[:, -1:] + place + 1
        elif place < queries:
            marks[:, place] = True
    return read & marks


def _join(parts: list[SiteRows]) -> SiteRows:
    """Parts of one site, one after another; a statistic that some of them lack is missing in those: NaN."""
    names = dict.fromkeys(name for part in parts for name in part.values)
    values = {name: np.concatenate([_values(part, name) for part in parts]) for name in names}
    texts, queries = (np.concatenate([getattr(part, name) for part in parts]) for name in ("texts", "queries"))
    first = parts[0]
    return SiteRows(first.name, first.kind, first.mode, texts, queries, values)


def _values(part: SiteRows, name: str) -> np.ndarray:
    found = part.values.get(name)
    return np.full((len(part.texts), part.heads), np.nan, np.float32) if found is None else found
