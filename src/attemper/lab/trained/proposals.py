"""What papers propose against sharp attention, written for the models of the lab: no part of what attemper offers."""

from __future__ import annotations

from torch import Tensor, nn

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
