"""Functions on scores, and linear attention, in forward mode and mapped: held against central differences and loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import attemper.functional as F
from attemper.functional.linear_state import FeatureMap
from tests.test_transforms import EXACT, assert_near, differences, duals, plain_gradient, tangent_of

# PyTorch's own, when it loads its rules for forward mode.
pytestmark = [
    pytest.mark.each,
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]

One = Callable[[Tensor], Tensor]
MAPS: dict[str, One] = {
    "softmax": lambda x: F.softmax(x, temperature=0.7), "softmax_plus_one": F.softmax_plus_one,
    "softmax_with_sink": lambda x: F.softmax_with_sink(x, 0.3), "scalable_softmax": F.scalable_softmax,
    "sigmoid": F.sigmoid, "topk": lambda x: F.topk_softmax(x, 3), "threshold": lambda x: F.threshold_softmax(x, 0.1),
    "sparsemax": F.sparsemax, "entmax15": F.entmax15, "entmax": lambda x: F.entmax(x, 1.3, temperature=0.8),
}  # fmt: skip
MEASURES: dict[str, One] = {
    "entropy": F.entropy, "logit_variance": F.logit_variance, "entropy_slope": lambda x: F.entropy_slope(x, 1.2),
    "softmax_jacobian": F.softmax_jacobian, "entropy_of": lambda x: F.entropy_of(F.softmax(x)),
    "effective_tokens": lambda x: F.effective_tokens(F.softmax(x)), "gini": lambda x: F.gini(F.softmax(x)),
    "max_weight": lambda x: F.max_weight(F.softmax(x)),
    "statistics": lambda x: torch.stack([part for part in F.statistics(x) if part.is_floating_point()]),
    "entropy_target": lambda x: F.entropy_target(F.entropy(x), 1.0),
    "z_loss": lambda x: F.z_loss(F.statistics(x).lse),
}  # fmt: skip
FUNCTIONS = MAPS | MEASURES


def scores(rows: int = 3) -> Tensor:
    found = torch.randn(rows, 6, dtype=torch.float64)
    found[0, 1] = -math.inf
    return found


def direction() -> Tensor:
    way = torch.randn(3, 6, dtype=torch.float64)
    way[0, 1] = 0.0
    return way


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.turns(3)
def test_tangents_are_differences(name: str):
    def function(x: Tensor) -> tuple[Tensor]:
        return (FUNCTIONS[name](x),)

    x, way = scores(), direction()
    (tangent,) = torch.func.jvp(function, (x,), (way,))[1]
    assert_near([tangent], differences(function, (x,), (way,)), EXACT)
    assert torch.equal(duals(function, (x,), (way,))[0], tangent)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.quick("sparsemax", "entmax]", "entropy]", "statistics", "z_loss")
def test_hessians_are_those_of_plain_autograd(name: str):
    def total(x: Tensor) -> Tensor:
        return FUNCTIONS[name](x).sin().sum()

    x = scores(2)
    want = torch.autograd.functional.hessian(total, x)
    for found in (
        torch.func.hessian(total)(x),
        torch.func.jacfwd(torch.func.jacfwd(total))(x),
        torch.func.jacrev(torch.func.jacfwd(total))(x),
        torch.func.jacrev(torch.func.jacrev(total))(x),
    ):
        assert_near([found], [want], EXACT)


@pytest.mark.parametrize("name", [name for name in MAPS if name != "sparsemax"])
@pytest.mark.turns(2)
def test_the_tangent_of_a_map_is_on_the_graph(name: str):
    x, way = scores().requires_grad_(), direction()
    _, plain = torch.autograd.functional.jvp(MAPS[name], x, way, create_graph=True)
    (want,) = torch.autograd.grad(cast(Tensor, plain).sin().sum(), x)
    with forward_ad.dual_level():
        tangent = tangent_of(MAPS[name](forward_ad.make_dual(x, way)))
        (found,) = torch.autograd.grad(tangent.sin().sum(), x)
    assert_near([found], [want], EXACT)


@pytest.mark.parametrize("alpha", [1.0, 1.4, 2.0, 3.0])
def test_alpha_has_a_tangent(alpha: float):
    x, given, way = scores(), torch.tensor(alpha, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    tangent = torch.func.jvp(lambda each: F.entmax(x, each), (given,), (way,))[1]
    gradient = torch.func.jacrev(lambda each: F.entmax(x, each))(given)
    assert_near([tangent], [gradient], 1e-12)
    assert tangent.any()


LINEAR = ["elu", "relu", "exp", torch.nn.functional.softplus]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", LINEAR)
def test_linear_attention_has_tangents_and_gradients_per_sample(feature_map: FeatureMap, causal: bool):
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        first = F.linear_attention(x, x.sin(), x.cos(), feature_map=feature_map, is_causal=causal)
        again = F.linear_attention(x, x, x, feature_map=feature_map, is_causal=causal, state=first.state)
        return first.output, again.output

    def loss(x: Tensor) -> Tensor:
        return sum(part.square().sum() for part in call(x))  # pyright: ignore[reportReturnType]

    x, way = torch.randn(2, 1, 2, 70, 3, dtype=torch.float64)
    assert_near(torch.func.jvp(call, (x,), (way,))[1], differences(call, (x,), (way,)), 1e-7)
    given = torch.stack((x, way))
    loops = [plain_gradient(loss, (each,))[0] for each in given]
    assert_near(torch.func.vmap(torch.func.grad(loss))(given), loops, 1e-12)
