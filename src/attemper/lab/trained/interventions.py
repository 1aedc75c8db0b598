"""What training experiments do against sharp attention: nothing, what papers propose, and a line of the product each.

Each is a function ``(model, total_steps) -> Control``; what it needs is imported when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from attemper.checks import one_of
from attemper.lab.model import Attention, ByteConfig, ByteModel


class QueryKeyRates:
    r"""Learning rates of query and key weights that fall as the other's weights grow, for each head by itself.

    .. math:: \eta_Q = \tau \eta \frac{\|W_K^{(0)}\|}{\|W_K\|}, \quad \eta_K = \tau \eta \frac{\|W_Q^{(0)}\|}{\|W_Q\|}

    with Frobenius norms, those of the first step on top: the change of a score by one step is bounded, however large
    the weights are. A step of AdamW is proportional to its learning rate, weight decay included, so the change that the
    optimizer made is multiplied instead.

    Source: Anson and Aitchison 2025 (arXiv 2511.21377), algorithm 1, "QuacK".
    """

    def __init__(self, model: nn.Module, relative_rate: float) -> None:
        self._rate = relative_rate
        layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
        self._pairs = [(_heads(layer, "q_proj"), _heads(layer, "k_proj")) for layer in layers]
        self._first = [(_norms(query), _norms(key)) for query, key in self._pairs]
        self._before: list[tuple[Tensor, Tensor]] = []

    def remember(self, loss: Tensor) -> Tensor:
        """Keeps the weights before a step of the optimizer; ``loss`` as it is."""
        self._before = [(query.clone(), key.clone()) for query, key in self._pairs]
        return loss

    def step(self) -> None:
        """After the optimizer's step: its change of each head's weights, as with the learning rate of its own."""
        for pair, before, first in zip(self._pairs, self._before, self._first, strict=True):
            for own, other in ((0, 1), (1, 0)):
                share = self._rate * first[other] / _norms(before[other])
                pair[own].sub_(before[own]).mul_(share).add_(before[own])


def _heads(layer: Attention, name: str) -> Tensor:
    """The weight of a projection by heads, [H, D, width]: the same memory, without a graph."""
    return layer.get_parameter(f"{name}.weight").detach().unflatten(0, (layer.heads, -1))


def _norms(weights: Tensor) -> Tensor:
    """[H, D, width] -> [H, 1, 1]."""
    return weights.square().sum((1, 2), keepdim=True).sqrt()


class GatedAttention(Attention):
    r"""Attention whose mixed values pass a gate of their own, by the layer's input: :math:`\sigma(x W_g) \odot y`.

    One gate for each dimension of each head, before the output projection. It adds width x width weights a layer.

    Source: Qiu et al. 2025 (arXiv 2505.06708), the elementwise gate at position G1.
    """

    def __init__(self, config: ByteConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.width, config.width, bias=False)
        nn.init.normal_(self.gate_proj.weight, std=config.width**-0.5)
        self._gate: Tensor | None = None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        self._gate = self._split(self.gate_proj(x)).sigmoid()
        return super().forward(x, rotation)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gate, self._gate = self._gate, None
        assert gate is not None, "attend is called by forward"
        return gate * super().attend(query, key, value)


def add_gates(model: ByteModel) -> None:
    """Puts a :class:`GatedAttention` with the same weights, and new gates, in the place of each attention."""
    for block in model.blocks:
        gated = GatedAttention(model.config)
        gated.load_state_dict(block.get_submodule("attention").state_dict(), strict=False)
        block.add_module("attention", gated)


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
    rates = QueryKeyRates(model, RELATIVE_RATE)
    return Control(attach=rates.remember, step=rates.step)


def _output_gate(model: ByteModel, total_steps: int) -> Control:
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
    from attemper.control.regularize import EntropyTarget, regularize

    low, high = BAND
    target = EntropyTarget((low + high) / 2, coef=1.0, tolerance=(high - low) / 2, unit="normalized")
    penalty = regularize(model, target)
    return Control(attach=penalty.attach, step=penalty.step, close=penalty.remove)


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
    """The model's sizes under the intervention ``name``."""
    one_of("intervention", name, INTERVENTIONS)
    return replace(config, qk_norm=True) if name == BASELINE else config
