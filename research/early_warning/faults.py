"""What goes wrong in a run on purpose: kinds of faults, each with sizes from harmless to hurting.

A fault is a kind, a size and a step. ``KINDS`` is the one list of them: what a kind does to a run stands in its record
and nowhere else. Kind, size and step never depend on what a detector looks at.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

from attemper.lab.trained.training import Run
from research.early_warning.attention import Arithmetic

BETWEEN_RESUMES = 5
"""Steps between two resumes that lose the state of the optimizer."""
RAMP = 150
"""Steps over which a rate that rises gradually comes to its size."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one run."""

    kind: str
    size: float
    """What it counts is said in ``KINDS``."""
    step: int
    """Where it begins: no step before it differs from the healthy run's."""
    head: int = 0
    """Of all heads of the model, the one that is hit, for kinds that hit one."""


@dataclass(frozen=True)
class Effect:
    """What a fault does, step by step; by default nothing."""

    run: Callable[[Run], Run] = lambda run: run
    """What the run follows from."""
    rate: Callable[[int], float] = lambda step: 1.0
    """The learning rate is multiplied by it at a step."""
    source: Callable[[int], int] = lambda step: step
    """The step whose bytes are drawn at a step."""
    batch: Callable[[Tensor, int], Tensor] = lambda ids, step: ids
    """Bytes [B, N + 1] -> what is trained on at a step."""
    act: Callable[[nn.Module, torch.optim.Optimizer, int], None] = lambda model, optimizer, step: None
    """Before a step, on the model and its optimizer."""
    arithmetic: Callable[[int], Arithmetic] = lambda step: Arithmetic()
    """How attention computes at a step."""


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault: its sizes, and its effect."""

    says: str
    unit: str
    """Of its size."""
    size: Callable[[Random, Run], float]
    """Draws a size."""
    effect: Callable[[Fault, Run], Effect]
    at_start: bool = False
    """Whether it begins with the first step."""
    stays: bool = False
    """Whether held-out loss is measured with it: where the arithmetic belongs to the model that comes out."""


def draw(kind: str, run: Run, number: int = 0) -> Fault:
    """The fault of a kind in a run, with size, step and head drawn by the run's configuration and seed."""
    told = KINDS[kind]
    config = run.config
    random = Random(f"{kind}/{number}/{run.seed}/{run.rate:g}/{run.warmup:g}/{config}")
    step = 0 if told.at_start else random.randrange(round(0.1 * run.steps), round(0.7 * run.steps))
    return Fault(kind, told.size(random, run), step, random.randrange(config.layers * config.heads))


def _log_uniform(low: float, high: float) -> Callable[[Random, Run], float]:
    return lambda random, run: float(f"{low * (high / low) ** random.random():.3g}")


def _count(high: int) -> Callable[[Random, Run], float]:
    """From 1 to ``high``, small ones more often."""
    return lambda random, run: float(math.floor((high + 1) ** random.random()))


def _rate(fault: Fault, run: Run) -> Effect:
    return Effect(rate=lambda step: fault.size if step >= fault.step else 1.0)


def _ramp(fault: Fault, run: Run) -> Effect:
    return Effect(rate=lambda step: fault.size ** min(1.0, max(0, step - fault.step) / RAMP))


def _warmup(fault: Fault, run: Run) -> Effect:
    return Effect(run=lambda run: run.change(warmup=0.0))


def _precision(fault: Fault, run: Run) -> Effect:
    rounded = Arithmetic(bits=round(fault.size))
    return Effect(arithmetic=lambda step: rounded if step >= fault.step else Arithmetic())


def _scale(fault: Fault, run: Run) -> Effect:
    scaled = Arithmetic(factor=fault.size)
    return Effect(arithmetic=lambda step: scaled if step >= fault.step else Arithmetic())


def _leak(fault: Fault, run: Run) -> Effect:
    """Heads ``head``, ``head`` + 1, ... of the model see the next key."""
    heads = run.config.layers * run.config.heads
    leaking = Arithmetic(leaks=frozenset((fault.head + place) % heads for place in range(round(fault.size))))
    return Effect(arithmetic=lambda step: leaking if step >= fault.step else Arithmetic())


def _lasts(fault: Fault, step: int) -> bool:
    return fault.step <= step < fault.step + fault.size


def _repeat(fault: Fault, run: Run) -> Effect:
    return Effect(source=lambda step: fault.step if _lasts(fault, step) else step)


def _shuffle(fault: Fault, run: Run) -> Effect:
    """The bytes of each window in another order."""

    def batch(ids: Tensor, step: int) -> Tensor:
        if not _lasts(fault, step):
            return ids
        keys = torch.rand(ids.shape, generator=torch.Generator().manual_seed(run.seed * 2**32 + step))
        return ids.gather(1, keys.argsort(1))

    return Effect(batch=batch)


def _one_token(fault: Fault, run: Run) -> Effect:
    """Nothing but the first byte of the batch."""
    return Effect(batch=lambda ids, step: ids[:1, :1].expand_as(ids) if _lasts(fault, step) else ids)


def _padding(fault: Fault, run: Run) -> Effect:
    """Zeros take the place of the first bytes of each window, and are attended and predicted like text."""

    def batch(ids: Tensor, step: int) -> Tensor:
        if step < fault.step:
            return ids
        padded = ids.clone()
        padded[:, : round(fault.size * run.config.context)] = 0
        return padded

    return Effect(batch=batch)


def _head(fault: Fault, run: Run) -> Effect:
    """Query and key weights of one head are multiplied by the size."""

    @torch.no_grad()
    def act(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == fault.step:
            layer, head = divmod(fault.head, run.config.heads)
            size = run.config.width // run.config.heads
            attention = model.get_submodule(f"blocks.{layer}.attention")
            for name in ("q_proj", "k_proj"):
                attention.get_parameter(f"{name}.weight")[head * size : (head + 1) * size] *= fault.size

    return Effect(act=act)


def _optimizer(fault: Fault, run: Run) -> Effect:
    """Moments and their count of steps begin anew, at each of so many resumes."""

    def act(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        resume, rest = divmod(step - fault.step, BETWEEN_RESUMES)
        if rest == 0 and 0 <= resume < fault.size:
            optimizer.state.clear()

    return Effect(act=act)


KINDS: dict[str, FaultKind] = {
    "rate": FaultKind("learning rate too high", "times", _log_uniform(2, 32), _rate, at_start=True),
    "jump": FaultKind("learning rate jumps", "times", _log_uniform(3, 100), _rate),
    "warmup": FaultKind("warm-up left out", "", lambda random, run: 1.0, _warmup, at_start=True),
    "precision": FaultKind(
        "scores rounded", "bits of mantissa", lambda random, run: random.choice((7.0, 3.0, 2.0, 1.0)), _precision,
        stays=True,
    ),
    "scale": FaultKind("scale forgotten", "times", _log_uniform(1.5, 16), _scale, stays=True),
    "leak": FaultKind(
        "heads see the next key", "heads",
        lambda random, run: _count(run.config.layers * run.config.heads)(random, run), _leak,
    ),
    "padding": FaultKind("padding attended", "of each window", _log_uniform(0.1, 0.9), _padding),
    "repeated": FaultKind("one batch repeated", "steps", _count(200), _repeat),
    "shuffled": FaultKind("bytes shuffled", "steps", _count(200), _shuffle),
    "one token": FaultKind("one-token batches", "steps", _count(200), _one_token),
    "head": FaultKind("one head blown up", "times", _log_uniform(2, 64), _head),
    "optimizer": FaultKind("optimizer state lost", "times", _count(60), _optimizer),
}  # fmt: skip
"""Name -> kind, of those that the grid has."""
EVERY_KIND = KINDS | {"ramp": FaultKind("learning rate rises gradually", "times", _log_uniform(3, 100), _ramp)}
