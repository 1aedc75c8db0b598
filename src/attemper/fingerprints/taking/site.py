"""What is kept of an attention site, call after call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from attemper.errors import InputError
from attemper.fingerprints.encoding import round_rows
from attemper.fingerprints.site import (
    ANCHORS,
    COUNTS,
    GRAMS,
    OF_HEADS,
    PROJECTIONS,
    STATISTICS,
    SiteFingerprint,
    chosen_heads,
    key_numbers,
)
from attemper.fingerprints.taking.rows import (
    Plan,
    RowPlaces,
    Rows,
    SeenAttention,
    Taken,
    grams_of,
    groups_of,
    rows_of,
    sketch_of,
    vectors_of,
)
from attemper.text import clean_name

_STATES = ("input", *GRAMS)
"""States of width E that are kept for each row."""
WIDE = ("float32", "float64")
"""Types of runs whose numbers are kept in float32."""


@dataclass(frozen=True, eq=False)
class CallRows:
    """What is kept of one call: nothing of it is as long as its keys, so that no pass holds more than one layer."""

    kind: str
    shape: tuple[int, int, int]
    """Heads, heads of keys, size."""
    facts: Mapping[str, Any]
    """``scale``, ``softcap`` and ``dtype``."""
    keys: int
    lengths: list[int]
    """Tokens of each sequence."""
    query: np.ndarray
    key: np.ndarray
    rows: list[Rows]
    chosen: RowPlaces
    states: dict[str, Taken | None]
    """Vectors of ``_STATES``, until the pass went through."""

    @classmethod
    def of(cls, seen: SeenAttention, first_sequence: int, counts: Mapping[int, int]) -> CallRows:
        """The chosen rows of a call.

        Args:
            first_sequence: number of its first sequence among all batches.
            counts: number of a sequence -> how many of its rows.
        """
        problem = seen.problem
        batch, heads, queries, size = problem.query.shape
        numbers = problem.multiplier.flatten()
        shared = len(numbers) > 0 and bool((numbers == numbers[0]).all())
        facts = {
            "scale": float(numbers[0]) if shared else None,
            "softcap": problem.softcap or None,
            "dtype": str(problem.query.dtype).removeprefix("torch."),
        }
        real = seen.real_queries
        lengths = [queries] * batch if real is None else real.sum(1).tolist()
        chosen = [(number, counts.get(first_sequence + number, 0)) for number in range(batch)]
        plans = [Plan.of(seen, number, first_sequence + number, count) for number, count in chosen if count]
        groups = list(groups_of(plans, problem.key.shape[1:].numel()))
        rows, shape = [rows_of(seen, group) for group in groups], (heads, problem.key.shape[1], size)
        where = RowPlaces.of(seen, groups)
        states = {"residual": where.take(seen.residual), "input": where.take(seen.input)}
        return cls(seen.kind, shape, facts, problem.key.shape[2], lengths, *vectors_of(seen), rows, where, states)

    def end(self, name: str, given: Tensor | None) -> None:
        """Takes what the module that attends, or its block, gives."""
        taken, entered = self.chosen.take(given), self.states["residual"]
        if name == "change" and taken is not None and entered is not None:
            alike = entered[0].shape == taken[0].shape
            taken = (taken[0] - entered[0], taken[1] - entered[1]) if alike else None
        self.states[name] = taken


@dataclass
class SiteRows:
    """What is kept of a site, call after call."""

    name: str
    kind: str
    order: int
    facts: dict[str, Any]
    query: np.ndarray
    key: np.ndarray
    rows: list[Rows] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    keys: int = 0
    anchors: dict[str, Any] = field(default_factory=dict)
    """Those of the first sequence, by name of ``GRAMS``."""
    sketches: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, name: str, order: int, call: CallRows, asked: Sequence[int] | None = None, **facts: Any) -> SiteRows:
        """A new site by its first call.

        Args:
            asked: numbers of the heads to keep; None for all.
            facts: ``inv_freq``, ``matmul_precision`` and ``weights``.
        """
        heads, groups, size = call.shape
        if asked is not None and max(asked) >= heads:
            raise InputError(
                f"fingerprint(heads=...): {clean_name(name)} has no head {max(asked)}, its {heads} are 0 to "
                f"{heads - 1}."
            )
        kept = chosen_heads(asked, heads, groups)
        facts |= {**call.facts, "heads": heads, "kv_heads": groups, "head_dim": size, "kept_heads": kept}
        query, key = call.query, call.key
        if kept is not None:
            query, key = query[list(kept)], key[list(key_numbers(kept, heads, groups))]
        return cls(name, call.kind, order, facts, query, key)

    def add(self, call: CallRows) -> bool:
        """Keeps the chosen rows of a call; whether it is of as many heads as the first."""
        if call.shape != tuple(self.facts[part] for part in ("heads", "kv_heads", "head_dim")):
            return False
        self.keys = max(self.keys, call.keys)
        self.lengths += call.lengths
        kept = self.facts["kept_heads"]
        self.rows += call.rows if kept is None else [rows.of_heads(kept) for rows in call.rows]
        count, entered = sum(len(rows.rows) for rows in call.rows), call.states["residual"]
        self.facts["width"] = self.facts.get("width") if entered is None else entered[0].shape[1]
        for name in _STATES:
            taken = call.states.get(name)
            parts = [np.full((count, *shape), np.nan, np.float32) for shape in ((1 + PROJECTIONS,), (2, 1 + ANCHORS))]
            if taken is not None:
                parts = [sketch_of(taken[0]), grams_of(taken[0], self.anchors.setdefault(name, taken[1]))]
            for own, part in zip((name, f"{name} grams"), parts, strict=True):
                self.sketches[own].append(part if self.facts["dtype"] in WIDE else round_rows(part))
        return True

    def fingerprint(self) -> SiteFingerprint:
        """All rows as one record."""

        def all_of(name: str, axis: int) -> Any:
            return np.concatenate([getattr(rows, name) for rows in self.rows], axis)

        return SiteFingerprint(
            name=self.name,
            kind=self.kind,
            order=self.order,
            **self.facts,
            keys=self.keys,
            **{name: all_of(name, 0) for name in ("rows", "pair_keys")},
            **{name: np.concatenate(self.sketches[name]) for name in _STATES},
            grams=np.stack([np.concatenate(self.sketches[name + " grams"]) for name in GRAMS], 1),
            **{name: all_of(name, 1) for name in OF_HEADS},
            counts=dict(zip(COUNTS, all_of("counts", 2), strict=True)),
            statistics=dict(zip(STATISTICS, all_of("statistics", 2), strict=True)),
            query=self.query,
            key=self.key,
        )
