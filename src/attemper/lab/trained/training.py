"""Small training runs of the byte-level model: what they follow from, and what is written down while they run.

The protocol is that of Wortsman et al. 2023 (arXiv 2309.14322) at a smaller size: AdamW with betas 0.9 and 0.95, a
weight decay that does not depend on the learning rate, a linear warm-up and half a cosine, gradients clipped at norm 1.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from attemper.lab.corpus import Corpus, drawn_windows
from attemper.lab.experiment import one_thread
from attemper.lab.model import ByteConfig, ByteModel
from attemper.lab.trained.interventions import BRANCHES, INTERVENTIONS, THRESHOLD, Control, configure
from attemper.lab.trained.summary import above, signs
from attemper.monitor.watch import Watch, watch

HELD_OUT_WINDOWS = 128


@dataclass(frozen=True)
class Run:
    """What one run follows from, beside the bytes and the versions of torch and Python."""

    intervention: str = "plain"
    rate: float = 3e-3
    """Learning rate at its peak."""
    seed: int = 0
    steps: int = 600
    batch: int = 8
    """Windows a step, each of the model's context."""
    warmup: float = 0.05
    """Share of the steps over which the rate rises to its peak."""
    decay: float = 1e-4
    """Share of each matrix taken off at a step at the peak rate, whatever that rate is."""
    clip: float = 1.0
    """Bound of the norm of the whole gradient; inf for none."""
    every: int = 10
    """Steps between two measurements of attention."""
    branch: bool = False
    """Whether to go on from the first alarm in other ways, too."""
    config: ByteConfig = field(default_factory=lambda: ByteConfig(width=64, context=64))

    def change(self, **values: Any) -> Self:
        """The same with some fields of other values."""
        return replace(self, **values)

    def learning_rate(self, step: int) -> float:
        """At ``step``, from 0: up to the peak, then down to 0."""
        warmup = round(self.warmup * self.steps)
        if step < warmup:
            return self.rate * (step + 1) / warmup
        return self.rate * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup))) / 2


@dataclass
class Curve:
    """What is written down at steps: the loss and the gradient of every one, attention of every ``every``-th."""

    losses: list[float] = field(default_factory=list)
    """Training loss, nats a byte."""
    gradient_norms: list[float] = field(default_factory=list)
    """Before clipping."""
    measured: list[int] = field(default_factory=list)
    """Steps at which attention was measured."""
    max_logits: list[float] = field(default_factory=list)
    entropies: list[list[float]] = field(default_factory=list)
    """Normalised entropy of each layer: a mean over its heads and rows."""


@dataclass
class State:
    """A model in training between two steps."""

    model: ByteModel
    optimizer: torch.optim.AdamW
    step: int
    curve: Curve
    slower: float = 1.0
    """What the learning rate is divided by."""


def adamw(model: nn.Module, run: Run) -> torch.optim.AdamW:
    """The optimizer; it decays matrices only. torch multiplies the decay by the rate, hence the division."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": run.decay / run.rate},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=run.rate, betas=(0.9, 0.95), fused=True)


@one_thread()
def trained(run: Run, corpus: Corpus) -> dict[str, Any]:
    """Trains one run to its end and returns its record: plain values, for JSON.

    ``{"held_out_at_start", "held_out", "diverged_at", "signs", "curve", "branches"}``. The generator starts anew at
    each step, from the seed and the step, so that all interventions see the same bytes, from the same first weights.
    """
    state, control = start(run)
    held_out = held_out_windows(run, corpus)
    first = held_out_loss(state.model, held_out)
    saved: list[State] = []
    advance(run, corpus, state, control, saved if run.branch else None)
    # Read while the intervention is in place: a temperature is part of the model.
    record = {"held_out_at_start": first, **result(state, held_out), "branches": {}}
    control.close()
    for name in BRANCHES if saved else ():
        record["branches"][name] = result(branch_off(run, corpus, saved[0], name), held_out)
    return record


def start(run: Run) -> tuple[State, Control]:
    """The model and optimizer of a run at step 0; the intervention may add parameters."""
    torch.manual_seed(run.seed)
    model = ByteModel(configure(run.config, run.intervention))
    control = INTERVENTIONS[run.intervention](model, run.steps)
    return State(model, adamw(model, run), 0, Curve()), control


def branch_off(run: Run, corpus: Corpus, saved: State, name: str) -> State:
    """The rest of a run from a saved state, in one of two other ways."""
    state = copy_of(saved, run)
    control = Control()
    if name == BRANCHES[0]:
        state.slower = 3.0
    else:
        control = INTERVENTIONS["QKClip"](state.model, run.steps)
    advance(run, corpus, state, control, None)
    control.close()
    return state


def advance(run: Run, corpus: Corpus, state: State, control: Control, saved: list[State] | None) -> None:
    """Trains to the last step, or until the loss is no number; the state at the first alarm is put into ``saved``."""
    first = state.step
    # Blocked, whatever is fastest here: digits that stay.
    stats = ("normalized_entropy", "max_logit")
    with watch(state.model, every=run.every, stats=stats, backend="blocked") as watching:
        while state.step < run.steps:
            if not one_step(run, corpus, state, control):
                return
            seen = (state.step - first) % run.every == 0
            if seen:
                read(state, watching)
            watching.step()
            state.step += 1
            if seen and saved is not None and not saved and above(state.curve.max_logits[-1], THRESHOLD):
                saved.append(copy_of(state, run))


def one_step(run: Run, corpus: Corpus, state: State, control: Control) -> bool:
    """One step of the optimizer; False, and nothing changed, if the loss is no number."""
    length = run.config.context + 1
    batch = drawn_windows(corpus.training, run.batch, length, run.seed * 2**32 + state.step + 1)
    loss = state.model.loss(batch)
    state.curve.losses.append(loss.item())
    if not math.isfinite(state.curve.losses[-1]):
        return False
    state.optimizer.zero_grad()
    control.attach(loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), run.clip)
    state.curve.gradient_norms.append(norm.item())
    for group in state.optimizer.param_groups:
        group["lr"] = run.learning_rate(state.step) / state.slower
    state.optimizer.step()
    control.step()
    return True


def read(state: State, watching: Watch) -> None:
    """Writes down what the watch saw at this step."""
    layers = [list(site.heads) for site in watching.table().sites]
    state.curve.measured.append(state.step)
    state.curve.max_logits.append(max(_number(head.max_logit) for heads in layers for head in heads))
    state.curve.entropies.append(
        [sum(_number(head.normalized_entropy) for head in heads) / len(heads) for heads in layers]
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def copy_of(state: State, run: Run) -> State:
    """The same state again, in memory: weights, moments, curve."""
    model = copy.deepcopy(state.model)
    optimizer = adamw(model, run)
    optimizer.load_state_dict(copy.deepcopy(state.optimizer.state_dict()))
    return State(model, optimizer, state.step, copy.deepcopy(state.curve), state.slower)


def held_out_windows(run: Run, corpus: Corpus) -> Tensor:
    """The same windows for every run of one context: [128, context + 1]."""
    return drawn_windows(corpus.held_out, HELD_OUT_WINDOWS, run.config.context + 1, seed=2**40)


class Learner(Protocol):
    """A model that knows its own loss."""

    training: bool

    def eval(self) -> object: ...
    def train(self, mode: bool = True) -> object: ...
    def loss(self, ids: Tensor, /) -> Tensor:
        """[] of a batch of rows."""
        ...


@torch.no_grad()
def held_out_loss(model: Learner, ids: Tensor) -> float | None:
    """Mean cross-entropy in nats a byte, in eval mode; None if it is no number."""
    training = model.training
    model.eval()
    losses = [model.loss(part).item() for part in ids.split(16)]
    model.train(training)
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else None


def result(state: State, held_out: Tensor) -> dict[str, Any]:
    """The record of a state at its end."""
    curve = state.curve
    diverged = state.step if curve.losses and not math.isfinite(curve.losses[-1]) else None
    return {
        "held_out": None if diverged is not None else held_out_loss(state.model, held_out),
        "diverged_at": diverged,
        "signs": signs(curve.__dict__),
        "curve": curve.__dict__,
    }
