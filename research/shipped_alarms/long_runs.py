"""Long healthy runs, six at a time: one model whose weights have a dimension more, so that a step costs what one costs.

All weights of a run are one row of a matrix [R, P]; each run has its own bytes, rate and optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.lab.corpus import Corpus, drawn_windows
from attemper.lab.experiment import one_thread
from attemper.lab.model import ByteModel, rotary, rotate
from research.early_warning.attention import Moment
from research.early_warning.grid import Trial
from research.early_warning.measures import of_moment
from research.early_warning.optimizers import BESIDE, MOMENTUM, OtherRun, orthogonalized
from research.early_warning.trial import Array
from research.shipped_alarms.unseen import ALARMED

BETAS, EPS = (0.9, 0.95), 1e-8


class Together:
    """Several byte models of one size."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self.config, models = trials[0].run.config, []
        for trial in trials:
            torch.manual_seed(trial.run.seed)
            models.append(ByteModel(self.config))
        named = [dict(model.named_parameters()) for model in models]
        shapes = {name: weight.shape for name, weight in named[0].items()}
        self.flat = torch.stack([torch.cat([w.detach().flatten() for w in one.values()]) for one in named])
        self.places: dict[str, slice] = {}
        self.weights: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            start = sum(size.numel() for size in [shapes[one] for one in self.places])
            self.places[name] = slice(start, start + shape.numel())
            self.weights[name] = self.flat[:, self.places[name]].unflatten(1, shape).requires_grad_()
        self.rotation = rotary(self.config.context, self.config.width // self.config.heads, self.flat.device)
        self.hidden = torch.ones(self.config.context, self.config.context, dtype=torch.bool).triu(1)

    def gradient(self, loss: Tensor) -> Tensor:
        """[R, P] of a sum of losses."""
        return torch.cat([part.flatten(1) for part in torch.autograd.grad(loss, list(self.weights.values()))], 1)

    def losses(self, ids: Tensor, read: list[Moment] | None = None) -> Tensor:
        """[R] of bytes ``ids`` [R, B, N + 1]; ``read`` gets the [R B, H, N, N] of each layer."""
        runs, batch = ids.shape[:2]
        table = self.weights["embedding.weight"]
        x = table[torch.arange(runs)[:, None, None], ids[..., :-1]].flatten(1, 2)  # [R, B N, width]
        for layer in range(self.config.layers):
            at = f"blocks.{layer}."
            x = x + self._attention(at, self._norm(x, f"{at}attention_norm.weight"), batch, read)
            y = self._norm(x, f"{at}mlp_norm.weight")
            gate, up = (self._linear(y, f"{at}mlp.{name}_proj.weight") for name in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"{at}mlp.down_proj.weight")
        logits = self._norm(x, "norm.weight") @ table.transpose(1, 2)
        lost = F.cross_entropy(logits.flatten(0, 1), ids[..., 1:].flatten(), reduction="none")
        return lost.view(runs, -1).mean(1)

    def _attention(self, at: str, x: Tensor, batch: int, read: list[Moment] | None) -> Tensor:
        shape = (len(x), batch, self.config.context, self.config.heads, -1)
        query, key, value = (
            self._linear(x, f"{at}attention.{name}_proj.weight").view(shape).transpose(2, 3).flatten(0, 1)
            for name in ("q", "k", "v")
        )
        query, key = rotate(query, *self.rotation), rotate(key, *self.rotation)
        scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-1, -2)
        scores = scores.masked_fill(self.hidden, -math.inf)
        weights = scores.softmax(-1)
        mixed = weights @ value
        if read is not None:
            read.append(Moment(scores.detach(), weights.detach(), mixed.detach()))
        return self._linear(mixed.transpose(1, 2).reshape(x.shape), f"{at}attention.o_proj.weight")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-6) * self.weights[name][:, None]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name].transpose(1, 2)


class Optimizers:
    """AdamW for some runs, for others as ``Orthogonal``: a step of all of them."""

    def __init__(self, model: Together, trials: Sequence[Trial]) -> None:
        self._model, self._runs = model, [trial.run for trial in trials]
        self._steps = 0
        self._moments = torch.zeros_like(model.flat), torch.zeros_like(model.flat)
        self._signed = torch.tensor([isinstance(run, OtherRun) and run.optimizer == "Muon" for run in self._runs])
        hidden = {name: w for name, w in model.weights.items() if w.dim() == 3 and "embedding" not in name}
        self._groups: dict[torch.Size, list[str]] = {}
        for name, weight in hidden.items():
            self._groups.setdefault(weight.shape, []).append(name)
        self._momentum = torch.zeros_like(model.flat)
        matrix = torch.zeros(model.flat.shape[1])
        for name, weight in model.weights.items():
            matrix[model.places[name]] = float(weight.dim() == 3)
        self._decayed = matrix

    @torch.no_grad()
    def step(self, step: int, gradient: Tensor) -> Tensor:
        """One step of all; the norms of their gradients [R, P] before these are clipped, [R]."""
        model = self._model
        norms = gradient.norm(dim=1)
        gradient *= (torch.tensor([run.clip for run in self._runs]) / (norms + 1e-6)).clamp(max=1.0)[:, None]
        self._steps += 1
        rates = torch.tensor([run.learning_rate(step) for run in self._runs])[:, None]
        peaks = torch.tensor([run.rate for run in self._runs])[:, None]
        decays = torch.tensor([run.decay for run in self._runs])[:, None]
        first, second = self._moments
        first.lerp_(gradient, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        known = [1 - beta**self._steps for beta in BETAS]
        change = (first / known[0]) / ((second / known[1]).sqrt() + EPS)
        signed = self._signed
        change[signed] *= BESIDE
        if signed.any():
            self._momentum[signed] = MOMENTUM * self._momentum[signed] + gradient[signed]
            along = gradient[signed] + MOMENTUM * self._momentum[signed]
            for shape, names in self._groups.items():
                places = [model.places[name] for name in names]
                matrices = torch.stack([along[:, place].unflatten(1, shape[1:]) for place in places], 1)
                moved = orthogonalized(matrices) * max(1.0, shape[1] / shape[2]) ** 0.5
                for column, place in enumerate(places):
                    change[signed, place] = moved[:, column].flatten(1)
        model.flat.mul_(1 - decays * rates / peaks * self._decayed).sub_(rates * change)
        return norms


@one_thread()
def measure_together(trials: Sequence[Trial], corpus: Corpus) -> list[tuple[dict[str, Any], dict[str, Array]]]:
    """As ``measure_run`` of each: losses, gradient norms and what alarms look at, of every step."""
    model = Together(trials)
    optimizers = Optimizers(model, trials)
    run, config, many = trials[0].run, model.config, len(trials)
    losses, norms = np.empty((2, run.steps, many), np.float32)
    found = np.empty((run.steps, config.layers, len(ALARMED), many * config.heads), np.float32)
    for step in range(run.steps):
        ids = drawn_windows(corpus.training, many * run.batch, config.context + 1, seed=2**41 + step)
        moments: list[Moment] = []
        loss = model.losses(ids.view(many, run.batch, -1), moments)
        losses[step] = loss.detach().numpy()
        norms[step] = optimizers.step(step, model.gradient(loss.sum())).numpy()
        # Copied: a small tensor that is kept would hold memory between those of the next step.
        found[step] = [[one.tolist() for one in _by_run(moment, many).values()] for moment in moments]
    heads = found.reshape(*found.shape[:3], many, config.heads)
    signals = [
        {name: heads[:, :, place, number] for place, name in enumerate(ALARMED)}
        | {"loss": losses[:, number], "gradient_norm": norms[:, number]}
        for number in range(many)
    ]
    about = {"held_out": None, "diverged_at": None, "seconds": {}}
    return [(about, one) for one in signals]


def _by_run(moment: Moment, runs: int) -> dict[str, Tensor]:
    """Signals of heads, [R H] each: heads of all runs stand side by side."""
    scores, weights, mixed = (
        part.unflatten(0, (runs, -1)).transpose(0, 1).flatten(1, 2)
        for part in (moment.scores, moment.weights, moment.mixed)
    )
    return of_moment(Moment(scores, weights, mixed), ALARMED)
