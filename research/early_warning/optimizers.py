"""Other ways to train a run: optimizers and schedules of the learning rate that the grid of the benchmark has not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.lab.trained.training import Run, adamw

MOMENTUM = 0.95
"""Of ``Orthogonal``."""
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration, of which five steps bring singular values near 1."""
ITERATIONS = 5
BESIDE = 0.15
"""``Orthogonal`` trains what is no hidden matrix by AdamW, at this share of the rate."""
SIGN_BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class OtherRun(Run):
    """A run with an optimizer and a schedule of its own."""

    optimizer: str = "AdamW"
    """A name of ``OPTIMIZERS``."""
    schedule: str = "cosine"
    """A name of ``SCHEDULES``."""

    def learning_rate(self, step: int) -> float:
        """At ``step``, from 0: up to the peak, then by the schedule."""
        warmup = round(self.warmup * self.steps)
        if step < warmup:
            return self.rate * (step + 1) / warmup
        return self.rate * SCHEDULES[self.schedule]((step - warmup) / max(1, self.steps - warmup))


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
    "constant, then down": lambda done: min(1.0, (1 - done) / 0.2),
    "inverse root": lambda done: (1 + 10 * done) ** -0.5,
}
"""Name -> share of the peak rate, by the share of the steps behind the warm-up that are done."""


class Orthogonal(torch.optim.Optimizer):
    r"""As Muon: each hidden matrix moves along its Nesterov momentum with all singular values brought near 1.

    .. math:: W \leftarrow W - \eta \max(1, \text{rows}/\text{columns})^{1/2}\, UV^T, \quad \beta M + G = U S V^T

    Matrices of one shape are orthogonalised together. Embeddings and gains are trained by AdamW.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """

    def __init__(self, model: nn.Module, run: Run) -> None:
        hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
        known = {id(p) for p in hidden}
        self._others = [p for p in model.parameters() if id(p) not in known]
        self._beside = torch.optim.AdamW(self._others, lr=run.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        super().__init__(hidden, {"lr": run.rate, "weight_decay": run.decay / run.rate})

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._beside.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        self._beside.param_groups[0]["lr"] = BESIDE * group["lr"]
        self._beside.step()
        shapes: dict[torch.Size, list[Tensor]] = {}
        for weight in group["params"]:
            shapes.setdefault(weight.shape, []).append(weight)
        for (rows, columns), weights in shapes.items():
            gradient = torch.stack([w.grad for w in weights if w.grad is not None])
            state = self.state[weights[0]]
            state["momentum"] = MOMENTUM * state.get("momentum", 0.0) + gradient
            change = orthogonalized(gradient + MOMENTUM * state["momentum"]) * max(1.0, rows / columns) ** 0.5
            for weight, part in zip(weights, change, strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(part, alpha=group["lr"])


def orthogonalized(matrices: Tensor) -> Tensor:
    """[..., n, m] with singular values near 1, by five steps of a Newton-Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-1, -2) if tall else matrices
    x = x / (x.norm(dim=(-1, -2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.transpose(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.transpose(-1, -2) if tall else x


class Signed(torch.optim.Optimizer):
    """Lion: each weight moves by the rate, along the sign of an average of its gradients. Source: Chen et al. 2023."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__(model.parameters(), {"lr": run.rate, "weight_decay": run.decay / run.rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        near, far = SIGN_BETAS
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(average.lerp(weight.grad, 1 - near).sign_(), alpha=group["lr"])
                average.lerp_(weight.grad, 1 - far)


def _sgd(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=run.rate, momentum=0.9, nesterov=True, fused=True)


def _adam(model: nn.Module, run: Run, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=run.rate, weight_decay=run.decay / run.rate, fused=True, **options)


def _nadam(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    decay = run.decay / run.rate
    return torch.optim.NAdam(model.parameters(), lr=run.rate, weight_decay=decay, decoupled_weight_decay=True)


OPTIMIZERS: dict[str, Callable[[nn.Module, Run], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "AdamW, long memory": lambda model, run: _adam(model, run, betas=(0.9, 0.999)),
    "AMSGrad": lambda model, run: _adam(model, run, betas=(0.9, 0.95), amsgrad=True),
    "NAdam": _nadam,
    "SGD": _sgd,
    "Lion": Signed,
    "Muon": Orthogonal,
}
"""Name -> what makes it for a model and a run."""
