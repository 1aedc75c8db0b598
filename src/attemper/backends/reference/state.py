"""What the reference leaves of each row: state columns by their definitions, in float64, for every normalizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from attemper.backends.reference import softmax
from attemper.statistics import Column


class Rows:
    """Rows of scores and the weights p that follow, renormalised to sum 1, each [B, H, Q, K] in float64."""

    def __init__(
        self, s: Tensor, visible: Tensor, weights: Tensor, *, factors: Mapping[Column, Tensor], smallest: float | None
    ) -> None:
        """A row that sees no key, or a score that is not finite, has no weights: its columns say so.

        Args:
            s: -inf where hidden.
            visible: bool.
            weights: as they were computed; NaN where a visible score is not finite.
            factors: u of every column that is a sum of p u, broadcastable to ``s``; its last dimension may be shorter
                than the keys, where u is 0 beyond it.
            smallest: of a rowwise normalizer: a sum of weights below it is 0 in the precision of the call, and no
                statistic of weights is defined. None for softmax, whose weights sum to 1.
        """
        self.s, self.visible, self.factors = s, visible, factors
        self.n = visible.sum(-1)
        self.seen = self.n > 0
        self.bad = (visible & ~torch.isfinite(torch.where(visible, s, 0.0))).any(-1)
        self.finite = torch.where(visible & ~self.bad[..., None], s, 0.0)
        # 0 in a row without any, so that no difference is of infinities.
        self.maximum = at_maximum(torch.where(self.seen[..., None], s, 0.0), s)
        self.p, self.mass = weights, None
        if smallest is not None:
            total = weights.sum(-1)
            none = ~(total >= smallest)
            self.p = torch.where(none[..., None], 0.0, weights) / torch.where(none, 1.0, total)[..., None]
            self.mass = torch.where(none, 0.0, total)

    def columns(self) -> dict[Column, Callable[[], Tensor]]:
        """State column -> its values [B, H, Q], computed when it is called."""
        row, p = self._row, self.p
        columns = {
            Column.MAXIMUM: lambda: row(self.maximum, -math.inf),
            Column.VISIBLE_KEYS: self.n.double,
            Column.MEAN_DEPTH: lambda: row(self.maximum - self._mean()),
            Column.ENTROPY: lambda: row(0.0 - (p * torch.where(p > 0, p, 1.0).log()).sum(-1)),  # -(0.0) would be -0.0
            Column.VARIANCE: lambda: row((p * (self.finite - self._mean()[..., None]) ** 2).sum(-1)),
            Column.SQUARED_WEIGHTS: lambda: row((p * p).sum(-1)),
            Column.GINI: lambda: row(self._gini()),
            Column.PLAIN_DEPTH: lambda: row(self.maximum - self._plain_mean()),
            Column.PLAIN_VARIANCE: lambda: row(self._plain_variance()),
        }
        columns |= {column: partial(self._sum_with, u) for column, u in self.factors.items()}
        return columns | (self._of_softmax() if self.mass is None else self._of_rowwise(self.mass))

    def _sum_with(self, u: Tensor) -> Tensor:
        """sum p u."""
        return self._row((self.p[..., : u.shape[-1]] * u).sum(-1))

    def _of_softmax(self) -> dict[Column, Callable[[], Tensor]]:
        """What comes from the sum of exponentials."""
        top = self.maximum.detach()
        log_sum = softmax.log_sum(torch.where(self.seen[..., None], self.s, 0.0), top)
        return {
            # The difference is 0, and has the gradient of the maximum.
            Column.LOG_SUM: lambda: self._row(log_sum + (top - self.maximum)),
            Column.LARGEST_WEIGHT: lambda: self._row(torch.exp(self.maximum - (top + log_sum))),
        }

    def _of_rowwise(self, mass: Tensor) -> dict[Column, Callable[[], Tensor]]:
        return {
            Column.THRESHOLD: lambda: torch.zeros_like(mass),  # a kernel's own affair
            Column.MASS: lambda: self._row(mass),
            Column.SUPPORT: lambda: (self.p > 0).sum(-1).double(),
            Column.LARGEST_WEIGHT: lambda: self._row(at_maximum(self.p, self.s)),
        }

    def key_mass(self) -> Tensor:
        """[B, H, K]: the sum of p over the rows that have weights."""
        return torch.where((self.seen & ~self.bad)[..., None], self.p, 0.0).sum(-2)

    def _row(self, value: Tensor, empty: float = 0.0) -> Tensor:
        return torch.where(self.bad, math.nan, torch.where(self.seen, value, empty))

    def _mean(self) -> Tensor:
        return (self.p * self.finite).sum(-1)

    def _plain_mean(self) -> Tensor:
        """Of the visible scores, every one alike."""
        return self.finite.sum(-1) / self.n.clamp(min=1)

    def _plain_variance(self) -> Tensor:
        shift = torch.where(self.visible, self.finite - self._plain_mean()[..., None], 0.0)
        return shift.square().sum(-1) / self.n.clamp(min=1)

    def _gini(self) -> Tensor:
        keys, n = self.p.shape[-1], self.n[..., None]
        rank = torch.arange(1, keys + 1, device=self.p.device) - (keys - n)
        return (self.p.sort(-1).values * (2 * rank - n - 1)).sum(-1) / self.n.clamp(min=1)


def at_maximum(values: Tensor, s: Tensor) -> Tensor:
    """``values`` at the largest score of each row; among ties the gradient goes to the lowest index."""
    if s.shape[-1] == 0:
        return s.new_zeros(s.shape[:-1])
    return values.gather(-1, s.argmax(-1, keepdim=True)).squeeze(-1)
