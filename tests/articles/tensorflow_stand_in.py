"""The little of TensorFlow that document 002 uses, on torch: its lines run unchanged where TensorFlow is not installed.

Names, defaults and arithmetic are TensorFlow's: Glorot-uniform weights, Adam with a step of 0.001 and an epsilon of
1e-7, probabilities clipped at 1e-7, layer normalisation with an epsilon of 0.001, losses cleared at every call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Layer:
    """``build`` with the shapes of the first inputs, ``call``, weights and losses of the layers below."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._built = False

    def build(self, input_shape: Any) -> None:
        pass

    def call(self, inputs: Any) -> Any:
        raise NotImplementedError

    def add_weight(self, name: str, shape: list[int]) -> Tensor:
        """A weight from Keras's default initialiser: uniform, bounded by the fans of its last two dimensions."""
        field = math.prod(shape[:-2])
        fans = (shape[-2] if len(shape) > 1 else shape[-1]) * field + shape[-1] * field
        weight = torch.empty(shape).uniform_(-math.sqrt(6 / fans), math.sqrt(6 / fans)).requires_grad_()
        self._weights.append(weight)
        return weight

    def add_loss(self, loss: Tensor) -> None:
        self._losses.append(loss)

    def _layers(self) -> Iterator[Layer]:
        yield self
        for value in vars(self).values():
            if isinstance(value, Layer):
                yield from value._layers()

    @property
    def trainable_weights(self) -> list[Tensor]:
        return [weight for layer in self._layers() for weight in layer._weights]

    @property
    def losses(self) -> list[Tensor]:
        return [loss for layer in self._layers() for loss in layer._losses]

    def __call__(self, inputs: Any, training: bool = False) -> Any:
        if not self._built:
            self.build([list(x.shape) for x in inputs] if isinstance(inputs, tuple) else list(inputs.shape))
            self._built = True
        for layer in self._layers():
            layer._losses.clear()
        return self.call(inputs)


class LayerNormalization(Layer):
    def build(self, input_shape: list[int]) -> None:
        self.gamma, self.beta = (torch.full(input_shape[-1:], fill).requires_grad_() for fill in (1.0, 0.0))
        self._weights += [self.gamma, self.beta]

    def call(self, inputs: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(inputs, self.gamma.shape, self.gamma, self.beta, eps=1e-3)


class GradientTape:
    def __enter__(self) -> GradientTape:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def gradient(self, loss: Tensor, weights: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss.sum(), weights)


class Adam:
    def __init__(self) -> None:
        self._optimizer: torch.optim.Adam | None = None

    def apply_gradients(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        gradients, weights = zip(*pairs, strict=True)
        optimizer = self._optimizer or torch.optim.Adam(weights, lr=1e-3, eps=1e-7)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.step()
        self._optimizer = optimizer


def _binary_crossentropy(labels: Tensor, probabilities: Tensor) -> Tensor:
    p = probabilities.clamp(1e-7, 1 - 1e-7)
    return -(labels * p.log() + (1 - labels) * (1 - p).log()).mean(-1)


layers = SimpleNamespace(Layer=Layer, LayerNormalization=LayerNormalization)
tf = SimpleNamespace(
    einsum=torch.einsum,
    multiply=torch.multiply,
    constant=torch.tensor,
    reduce_mean=torch.mean,
    reduce_sum=lambda x, axis: x.sum(axis),
    random=SimpleNamespace(uniform=torch.rand),
    math=SimpleNamespace(
        sqrt=lambda x: torch.tensor(x).sqrt(), softmax=lambda x: x.softmax(-1), log=torch.log, sigmoid=torch.sigmoid
    ),
    GradientTape=GradientTape,
    keras=SimpleNamespace(
        Model=Layer,
        layers=layers,
        optimizers=SimpleNamespace(Adam=Adam),
        losses=SimpleNamespace(binary_crossentropy=_binary_crossentropy),
    ),
)
