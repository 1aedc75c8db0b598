"""Attention held at an entropy while it learns: the smallest case, in PyTorch.

Four queries look at six keys with three heads, and a classifier is trained on what they see. Beside its loss stands
(H - alpha)^2 for the entropy H of each row: alpha near 0 makes attention one-hot, log 6 uniform. After 1,000 steps the
rows are where they were told to be. The last line follows a schedule.

    python examples/entropy_target.py
    python examples/entropy_target.py 0.2 1.0 schedule
"""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper import schedules
from attemper.functional import entropy_target

STEPS = 1000
ALPHAS = ("0.05", "0.2", "1.0", f"{math.log(6) - 0.05:.6f}", "schedule")
"""log 6 is the entropy of six equal weights."""


def target(alpha: str) -> schedules.Schedule:
    """A number for all steps; or from nearly uniform to sharp in a straight line, which then holds."""
    if alpha == "schedule":
        return schedules.piecewise([(0.0, math.log(6) - 0.05), (0.7, 0.2)])
    return schedules.constant(float(alpha))


class Model(nn.Module):
    """Attention, and two probabilities from what it brings together."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = attemper.nn.CrossAttention(16, num_heads=3, head_dim=16, stats=("entropy",))
        self.classify = nn.Linear(4 * 16, 2)

    def forward(self, query: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, attemper.types.AttentionStats]:
        output, stats = self.attention(query, context)
        assert stats is not None
        return self.classify((output + query).flatten(1)), stats


def trained(alpha: str) -> tuple[float, float, float]:
    """(mean |H - alpha|, mean H, loss of the classifier) after training."""
    torch.manual_seed(0)
    query, context, labels = torch.rand(1, 4, 16), torch.rand(1, 6, 16), torch.tensor([[0.0, 1.0]])
    model, schedule = Model(), target(alpha)
    # The second moment must forget the first, steep steps: with 0.999 it remembers them to the end, steps stay small,
    # and rows near alpha = 0.05 stay about 0.015 nats away, some far more.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.99))
    for step in range(STEPS):
        logits, stats = model(query, context)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        (loss + entropy_target(stats, schedule(step, STEPS))).backward()
        optimizer.step()
    with torch.no_grad():
        logits, stats = model(query, context)
    away = (stats.entropy - schedule(STEPS, STEPS)).abs().mean()
    return away.item(), stats.entropy.mean().item(), F.binary_cross_entropy_with_logits(logits, labels).item()


def main() -> None:
    for alpha in sys.argv[1:] or ALPHAS:
        away, entropy, loss = trained(alpha)
        print(f"alpha {alpha}: mean |H - alpha| {away:.4f}, mean H {entropy:.4f}, loss {loss:.4f}")


if __name__ == "__main__":
    main()
