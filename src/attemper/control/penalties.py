"""The penalties of ``attemper.regularize``: terms of a loss, row by row, with their derivatives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from attemper.call.result import AttentionStats
from attemper.checks import one_of
from attemper.errors import InputError

Alpha = float | Callable[[int, int], float]
"""A number, or a schedule ``(step, total_steps) -> number``, such as those of ``attemper.schedules``."""


class Penalty(ABC):
    """A term of a loss: the mean over sites of :meth:`value`, times ``coef``."""

    stats: tuple[str, ...] = ("entropy",)

    def __init__(self, coef: float = 0.01) -> None:
        if isinstance(coef, bool) or not isinstance(coef, (int, float)) or not math.isfinite(coef):
            raise InputError(f"{type(self).__name__}(coef=...) must be a finite number, got {coef!r}.")
        self.coef = float(coef)

    @abstractmethod
    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(statistic, what each row adds, its derivative by the statistic, which rows count), each [B, H, Q]."""

    def value(self, sums: Tensor, counts: Tensor) -> Tensor:
        """The penalty of a site, from what its rows add per head [H] and how many rows count."""
        return sums.sum() / counts.sum().clamp(min=1)

    def weights(self, sums: Tensor, counts: Tensor) -> Tensor:
        """[H]: the derivative of the site's penalty by what a row of each head adds."""
        return (1 / counts.sum().clamp(min=1)).expand(counts.shape)

    def goal(self, step: int) -> float:
        """The target of the rows in this step; 0 for a penalty without one."""
        del step
        return 0.0


class EntropyTarget(Penalty):
    r"""Penalty that pulls entropies to a target.

    .. math:: coef \cdot \operatorname{mean} \max(|H - \alpha| - tolerance, 0)^2

    Args:
        alpha: the target in nats, or a schedule ``(step, total_steps) -> nats``.
        coef: what a square nat is worth.
        tolerance: nats around the target that cost nothing.
        unit: "nats"; or "normalized" for H / log n with n the keys that a row sees, alpha from 0 to 1: for causal
            models, whose early rows cannot reach a target in nats. Rows that see one key do not count then.
        total_steps: of the training, for a schedule; ``penalty.step()`` goes on by one.

    Raises:
        InputError: a number is not finite, alpha or the tolerance is negative, or a schedule comes without its total.
    """

    def __init__(
        self,
        alpha: Alpha,
        coef: float = 0.01,
        *,
        tolerance: float = 0.0,
        unit: str = "nats",
        total_steps: int | None = None,
    ) -> None:
        super().__init__(coef)
        one_of("EntropyTarget(unit=...)", unit, ("nats", "normalized"))
        if not tolerance >= 0:
            raise InputError(f"EntropyTarget(tolerance=...) must be at least 0, got {tolerance!r}.")
        if callable(alpha) and (not isinstance(total_steps, int) or total_steps < 1):
            raise InputError("EntropyTarget(alpha=schedule) needs total_steps=, the optimizer steps of the training.")
        self.alpha, self.tolerance, self.unit, self.total_steps = alpha, float(tolerance), unit, total_steps
        self.stats = ("entropy",) if unit == "nats" else ("entropy", "visible_keys")
        self.goal(0)

    def goal(self, step: int) -> float:
        alpha = self.alpha(step, self.total_steps or 1) if callable(self.alpha) else self.alpha
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < math.inf:
            raise InputError(f"EntropyTarget(alpha=...) must be at least 0 and finite, got {alpha!r} at step {step}.")
        return float(alpha)

    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        entropy, valid = stats["entropy"], stats.valid
        per = torch.ones_like(entropy)
        if self.unit == "normalized":
            visible = stats["visible_keys"]
            valid = valid & (visible > 1)
            per = 1 / torch.where(visible > 1, visible, 2).to(entropy.dtype).log()
        away = entropy.detach() * per - goal.to(entropy.dtype)
        excess = (away.abs() - self.tolerance).clamp(min=0)
        return entropy, excess.square(), 2 * excess * away.sign() * per, valid


class EntropyBonus(Penalty):
    """Penalty that rewards entropy, ``-coef * mean H``. It prevents collapse; a negative ``coef`` sharpens."""

    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        entropy = stats["entropy"]
        return entropy, -entropy.detach(), -torch.ones_like(entropy), stats.valid


class EntropyDiversity(Penalty):
    r"""Penalty that makes a layer's heads differ: ``-coef`` times the variance of their mean entropies.

    .. math:: -coef \cdot \frac{1}{H} \sum_h (\bar H_h - \bar H)^2
    """

    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        entropy = stats["entropy"]
        return entropy, entropy.detach(), torch.ones_like(entropy), stats.valid

    def value(self, sums: Tensor, counts: Tensor) -> Tensor:
        away, heads = self._away(sums, counts)
        return -away.square().sum() / heads

    def weights(self, sums: Tensor, counts: Tensor) -> Tensor:
        away, heads = self._away(sums, counts)
        return -2 * away / heads / counts.clamp(min=1)

    def _away(self, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Each head's mean from the mean of all; 0 for a head without rows."""
        has = counts > 0
        heads = has.sum().clamp(min=1)
        means = torch.where(has, sums / counts.clamp(min=1), 0.0)
        return torch.where(has, means - means.sum() / heads, 0.0), heads


class ZLoss(Penalty):
    """Penalty that keeps logits from drifting: ``coef * mean lse^2``. lse is the log of the sum of exponentials of a
    row's scores."""

    stats = ("lse",)

    def __init__(self, coef: float = 1e-4) -> None:
        super().__init__(coef)

    def rows(self, stats: AttentionStats, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        lse, valid = stats["lse"], stats.valid
        shown = torch.where(valid, lse.detach(), 0.0)
        return lse, shown.square(), 2 * shown, valid
