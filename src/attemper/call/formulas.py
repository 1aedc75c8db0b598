r"""The statistics of rows from their state: one formula each, which autograd differentiates.

The state of a row is relative to its maximum m (``attemper.statistics.Column``), so these formulas add small numbers of
one sign: ``lse = m + z``, ``H = z + a``, ``effective = 1 / c``, ``max_weight = exp(-z)``, ``mu = m - a``. Where a
rowwise kernel leaves the quantity itself, it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from attemper.call import transforms
from attemper.call.state import LazyState, State, detach, same_graph
from attemper.statistics import TABLE, Column

VANISHED = -1000.0
"""exp(VANISHED) is 0: a finite distance for a part that sees nothing, so that 0 times it stays 0."""

OF_SINK = tuple(row.name for row in TABLE if row.uses_sink)
"""Statistics that follow from the sink, too."""
_OWN = {row.name: row.column for row in TABLE}


class Row:
    """What formulas read: ``row[column]`` of the state, ``row[name]`` of a statistic or a step, each computed once."""

    def __init__(self, state: State, sink: Tensor | None, exact: bool = False) -> None:
        """``exact``: the state has more digits than the results, so that no bound is needed before they are rounded."""
        self.state = state
        self.sink = sink
        self.known: dict[str, Tensor] = {}
        self.exact = exact

    def __contains__(self, column: Column) -> bool:
        return column in self.state

    def __getitem__(self, name: Column | str) -> Tensor:
        if isinstance(name, Column):
            return self.state[name]
        if name not in self.known:
            own = _OWN.get(name)
            if own is not None and own in self.state:
                return self.state[own]
            value = FORMULAS[name](self)
            self.known[name] = value if self.exact else self.bound(name, value)
        return self.known[name]

    def bound(self, name: str, value: Tensor) -> Tensor:
        """A statistic no larger than it can be, were it not for rounding."""
        bound = BOUNDS.get(name)
        return value if bound is None else at_most(value, bound(self["count"].to(value.dtype)))

    def round(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """A statistic of an exact state in the type of its call; counts are whole numbers in every type."""
        return value if value.dtype == torch.int64 else self.bound(name, value.to(dtype))


class LazyStatistics(Mapping[str, Tensor]):
    """The statistics ``names`` of rows, each [B, H, Q], computed on first access.

    Whenever that is, they are on the autograd graph as if computed when this object was made. Those that are not
    ``asked`` (kept for merging only) are off it.
    """

    def __init__(
        self,
        state: State,
        names: Iterable[str],
        sink: Tensor | None,
        asked: Iterable[str] | None = None,
        given: Mapping[str, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            state: what a backend left.
            names: what is wanted.
            sink: [H] or None.
            asked: those of ``names`` that keep their gradient; None for all.
            given: values that no formula gives (``key_mass``).
            dtype: type of the results, where the state has more digits: they are rounded once, at the end.
        """
        self.names = tuple(names)
        self._asked = self.names if asked is None else tuple(asked)
        self._dtype = dtype
        self._row = Row(state, sink, exact=dtype is not None)
        self._values: dict[str, Tensor] = {} if given is None else dict(given)
        self._graph = torch.is_grad_enabled()
        if sink is not None:
            # Its owner may change it before anybody asks.
            for name in OF_SINK:
                if name in self.names:
                    self[name]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            if name not in self.names:
                raise KeyError(name)
            value = self._row.known.get(name) if self._dtype is None else None
            if value is None:
                value = self._compute(name)
            self._values[name] = value if name in self._asked else value.detach()
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def settle(self) -> Mapping[str, Tensor]:
        """Itself; in a compiled graph, which leaves out what nobody reads, all of them computed at once."""
        return {name: self[name] for name in self.names} if torch.compiler.is_compiling() else self

    def detach(self) -> LazyStatistics:
        """The same statistics outside the autograd graph; none is computed for it."""
        sink = None if self._row.sink is None else self._row.sink.detach()
        given = {name: value.detach() for name, value in self._values.items()}
        return LazyStatistics(detach(self._row.state), self.names, sink, given=given, dtype=self._dtype)

    def _compute(self, name: str) -> Tensor:
        state, known = self._row.state, self._row.known
        with same_graph(self._graph):
            if isinstance(state, LazyState) and not known and _OWN[name] not in state:
                known |= state.statistics(n for n in self.names if self._row.sink is None or n not in OF_SINK)
            value = self._row[name]
            return value if self._dtype is None else self._row.round(name, value, self._dtype)


def log_count(n: Tensor) -> Tensor:
    """log n of counts given as floats; 0 for n = 0.

    Rounded down, so that no entropy exceeds the true bound by a rounding.
    """
    wide = torch.float32 if n.device.type == "mps" else torch.float64
    exact = n.clamp(min=1.0).to(wide).log()
    rounded = exact.to(n.dtype)
    below = torch.nextafter(rounded, rounded.new_zeros(()))
    # In the widest type the logarithm itself may have been rounded up: one step down is below it for certain.
    return below if n.dtype == wide else torch.where(rounded > exact, below, rounded)


def at_most(value: Tensor, bound: Tensor) -> Tensor:
    """``value`` cut at ``bound`` without touching its gradient: only rounding ever exceeds it."""
    if not value.requires_grad and not transforms.forward_mode():
        return torch.minimum(value, bound)
    return value - (value - bound).detach().clamp(min=0.0)


def _where_seen(seen: Tensor, value: Tensor, other: float) -> Tensor:
    """``value`` before a second ``where`` that hides what nothing sees: its gradient there would be NaN, not 0."""
    return torch.where(seen, value, other) if value.requires_grad else value


def inverse(value: Tensor) -> Tensor:
    present = value != 0
    return torch.where(present, 1.0 / _where_seen(present, value, 1.0), 0.0)


def _entropy(row: Row) -> Tensor:
    return row[Column.ENTROPY] if Column.ENTROPY in row else row[Column.LOG_SUM] + row[Column.MEAN_DEPTH]


def _mass(row: Row) -> Tensor:
    """Weight applied to values: 1, or sigmoid(lse - sink); 0 where nothing is seen, NaN where a score is not finite."""
    seen, lse = row["seen"], row["lse"]
    finite = _where_seen(seen, lse, 0.0)
    if row.sink is None:
        finite = finite.detach() if row.exact else finite
        return torch.where(seen, finite - finite + 1.0, 0.0)
    return torch.where(seen, torch.sigmoid(finite - row.sink.to(lse.dtype)[:, None]), 0.0)


def _entropy_with_sink(row: Row) -> Tensor:
    """mass H + h(mass), h the binary entropy: the sink counted as one more outcome."""
    entropy = row["entropy"]
    if row.sink is None:
        return entropy
    mass, seen, lse = row["mass"], row["seen"], row["lse"]
    gap = torch.where(seen, lse, 0.0) - row.sink.to(lse.dtype)[:, None]
    log_sigmoid = torch.nn.functional.logsigmoid
    binary = -mass * log_sigmoid(gap) - (1 - mass) * log_sigmoid(-gap)
    return torch.where(seen, mass * entropy + binary, 0.0)


def _mean_logit(row: Row) -> Tensor:
    # Sigmoids may all vanish: nothing is a mean then.
    weighted = row[Column.MASS] != 0 if Column.MASS in row else row["seen"]
    return torch.where(weighted, row[Column.MAXIMUM] - row[Column.MEAN_DEPTH], 0.0)


def _support_size(row: Row) -> Tensor:
    if Column.SUPPORT not in row:
        return row["visible_keys"]
    return row[Column.SUPPORT].detach().nan_to_num(0.0).to(torch.int64)


FORMULAS: Mapping[str, Callable[[Row], Tensor]] = {
    # Steps. No gradient ever belongs to a count.
    "count": lambda row: row[Column.VISIBLE_KEYS].detach(),
    "seen": lambda row: row["count"] > 0,
    # Statistics.
    "lse": lambda row: row[Column.MAXIMUM] + row[Column.LOG_SUM],
    "entropy": _entropy,
    "normalized_entropy": lambda row: row["entropy"] / row["count"].clamp(min=2.0).log(),
    "effective_tokens": lambda row: inverse(row[Column.SQUARED_WEIGHTS]),
    "max_weight": lambda row: torch.where(row["seen"], torch.exp(-row[Column.LOG_SUM]), 0.0),
    "mean_logit": _mean_logit,
    "visible_keys": lambda row: row["count"].to(torch.int64),
    "mass": _mass,
    "support_size": _support_size,
    "entropy_with_sink": _entropy_with_sink,
}
"""Statistic or step -> how it follows from the state, where no state column is the statistic itself."""

BOUNDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "entropy": log_count,
    "normalized_entropy": lambda n: n.new_ones(()),
}
"""Statistic -> the largest value that it can have, from the counts of visible keys: only rounding ever exceeds it."""
