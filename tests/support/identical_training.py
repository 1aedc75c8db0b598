"""Training with and without a watch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import attemper

STEPS, FEW_STEPS = 50, 8
"""With ``--all`` and for one model of each library, and by default for the others."""

Made = Callable[[], tuple[nn.Module, Callable[[Any], Tensor]]]
"""A new model, and the loss of its forward pass; called under the same seed twice."""


def trained(made: Made, watched: bool, steps: int, **options: Any) -> list[Tensor]:
    """Every loss, the parameters and buffers afterwards, and the state of the random numbers."""
    torch.manual_seed(7)
    model, loss_of = made()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = attemper.watch(model, **{"every": 2, "rows": 3, **options}) if watched else None
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
        if watch is not None:
            watch.step()
    if watch is not None:
        assert (watch.sampled, watch.failures) == (steps // 2, 0)
        assert watch.table().sites
        watch.close()
    return [*found, *(part.detach() for part in model.state_dict().values()), torch.get_rng_state()]


def assert_identical_training(made: Made, steps: int = STEPS, **options: Any) -> None:
    """Losses, parameters and random numbers are those of the unwatched model, and training went on."""
    plain, watched = trained(made, False, steps), trained(made, True, steps, **options)
    assert len(plain) == len(watched)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert torch.isfinite(plain[steps - 1])
    assert not torch.equal(plain[0], plain[steps - 1])
