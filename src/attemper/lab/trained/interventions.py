"""What training experiments do against sharp attention: nothing, what papers propose, and a line of the product each.

Each is a function ``(model, total_steps) -> Control``; what it needs is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from attemper.checks import one_of
from attemper.lab.model import ByteConfig, ByteModel

THRESHOLD = 100.0
"""Of the largest logit: MuonClip's, and where the alarm is raised."""

BAND = (0.25, 0.75)
"""Of normalised entropy, for what holds it: a model that trains well has means of 0.3 to 0.6."""
RELATIVE_RATE = 0.1
"""Of queries and keys at the first step under "QuacK": its authors try 0.01 to 10. Of 0.1 and 1, what ended lower."""
BRANCHES = ("learning rate / 3", "QKClip from there")
"""How a plain run goes on from its first alarm, beside unchanged."""


@dataclass(frozen=True)
class Control:
    """What an intervention does in a loop; by default nothing."""

    attach: Callable[[Tensor], Tensor] = lambda loss: loss
    """The loss [] before its backward pass -> what to train on."""
    step: Callable[[], object] = lambda: None
    """After each step of the optimizer."""
    close: Callable[[], object] = lambda: None


def _plain(model: ByteModel, total_steps: int) -> Control:
    return Control()


def _quack(model: ByteModel, total_steps: int) -> Control:
    from attemper.lab.trained.proposals import QueryKeyRates

    rates = QueryKeyRates(model, RELATIVE_RATE)
    return Control(attach=rates.remember, step=rates.step)


def _output_gate(model: ByteModel, total_steps: int) -> Control:
    from attemper.lab.trained.proposals import add_gates

    add_gates(model)
    return Control()


def _softmax_plus_one(model: ByteModel, total_steps: int) -> Control:
    """A sink of logit 0: a row may give its weight to no key."""
    from attemper.control.temper import temper

    return Control(close=temper(model, normalizer="softmax_plus_one").remove)


def _qk_clip(model: ByteModel, total_steps: int) -> Control:
    from attemper.control.qk_clip import QKClip

    clip = QKClip(model, threshold=THRESHOLD)
    return Control(step=clip.step, close=clip.remove)


def _sigma_reparam(model: ByteModel, total_steps: int) -> Control:
    from attemper.control.sigma_reparam import sigma_reparam_

    handle = sigma_reparam_(model)
    return Control(close=handle.remove)


def _entropy_target(model: ByteModel, total_steps: int) -> Control:
    """Rows within the band cost nothing."""
    from attemper.control.penalties import EntropyTarget
    from attemper.control.regularize import regularize

    low, high = BAND
    target = EntropyTarget((low + high) / 2, coef=1.0, tolerance=(high - low) / 2, unit="normalized")
    penalty = regularize(model, target)

    def step() -> None:
        penalty.step()

    return Control(attach=penalty.attach, step=step, close=penalty.remove)


def _thermostat(model: ByteModel, total_steps: int) -> Control:
    from attemper.control.thermostat import Thermostat

    thermostat = Thermostat(model, target_entropy=BAND, unit="normalized", per="head")
    return Control(step=thermostat.step, close=thermostat.remove)


INTERVENTIONS: dict[str, Callable[[ByteModel, int], Control]] = {
    "plain": _plain,
    "QK-norm": _plain,
    "QuacK": _quack,
    "output gate": _output_gate,
    "softmax-plus-one": _softmax_plus_one,
    "QKClip": _qk_clip,
    "sigma_reparam_": _sigma_reparam,
    "Thermostat": _thermostat,
    "EntropyTarget": _entropy_target,
}
"""Name -> what it does. "QK-norm" acts through the model's configuration, see :func:`configure`."""
PLAIN, BASELINE = "plain", "QK-norm"
PROPOSED = ("QuacK", "output gate", "softmax-plus-one")
"""By papers, beside the baseline: arXiv 2511.21377, arXiv 2505.06708, and a one in the softmax's denominator."""
OURS = tuple(name for name in INTERVENTIONS if name not in (PLAIN, BASELINE, *PROPOSED))
"""What attemper does to a model that exists."""


def configure(config: ByteConfig, name: str) -> ByteConfig:
    """The model's sizes under the intervention ``name``.

    Raises:
        InputError: no intervention has this name.
    """
    one_of("intervention", name, INTERVENTIONS)
    return replace(config, qk_norm=True) if name == BASELINE else config
