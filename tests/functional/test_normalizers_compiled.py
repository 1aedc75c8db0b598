"""The normalizers as PyTorch sees them: operators, compiled graphs, transforms of functions, other devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from attemper import functional as F
from attemper.call import row_operator
from tests.functional.test_normalizers import NORMALIZERS

pytestmark = [pytest.mark.each, pytest.mark.turns(3)]

GIVEN = {
    "sparsemax": (0.0, None),
    "entmax15": (0.0, None),
    "entmax": (0.0, [1.0, 1.3, 2.5]),
    "topk": (2.0, None),
    "threshold": (0.2, None),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("normalizer", GIVEN)
@pytest.mark.quick("sparsemax-torch.float64")
def test_the_operator_passes_opcheck(normalizer: str, dtype: torch.dtype):
    number, alpha = GIVEN[normalizer]
    scores = torch.randn(2, 3, 5, dtype=dtype)
    scores[0, 0, 1] = -math.inf
    scores[1, 1] = -math.inf
    each = None if alpha is None else torch.tensor(alpha, dtype=dtype).expand(2, 3).clone().requires_grad_()
    arguments = (scores.requires_grad_(), each, normalizer, number)
    result = torch.library.opcheck(torch.ops.attemper.row_weights.default, arguments)
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("normalizer", GIVEN)
def test_the_gradients_operator_has_a_true_schema_and_fake(normalizer: str):
    number, alpha = GIVEN[normalizer]
    each = None if alpha is None else torch.tensor(alpha).expand(2, 3)
    weights = row_operator.row_weights(torch.randn(2, 3, 5), normalizer, number, each)
    # Not contiguous: from a transposed result.
    grad = torch.randn(2, 5, 3).mT
    result = torch.library.opcheck(
        torch.ops.attemper.row_gradient.default,
        (weights, grad, each, normalizer, number),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.slow("takes many seconds")
@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.quick("scalable 0.4")
def test_a_compiled_graph_is_whole_and_has_the_numbers_of_eager(name: str):
    scores = torch.randn(2, 3, 7).masked_fill(torch.rand(2, 3, 7) < 0.2, -math.inf).requires_grad_()
    above = torch.randn(2, 3, 7)
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(NORMALIZERS[name].call, fullgraph=True, backend=counter)
    for options in ({}, {"dim": 1, "temperature": 0.5}):
        results = []
        for call in (NORMALIZERS[name].call, function):
            weights = call(scores, **options)
            results.append((weights, *torch.autograd.grad(weights, scores, above)))
        torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)
    assert counter.frame_count == 2


def test_a_compiled_graph_holds_a_search_as_one_node():
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(F.entmax15, fullgraph=True, backend=backend)(torch.randn(3, 4))
    assert called == ["attemper.row_weights"]


@pytest.mark.parametrize("what", ["alpha", "temperature", "sink", "bias", "s"])
@pytest.mark.slow("a compiler takes seconds")
def test_what_is_learned_compiles_with_its_gradient(what: str):
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "alpha": F.entmax,
        "temperature": lambda scores, T: F.sparsemax(scores, temperature=T),
        "sink": F.softmax_with_sink,
        "bias": F.sigmoid,
        "s": F.scalable_softmax,
    }
    scores, learned = torch.randn(2, 3, 7), torch.tensor([[1.2], [1.7]], requires_grad=True)
    above = torch.randn(2, 3, 7)
    want, got = (
        torch.autograd.grad(call(scores, learned), learned, above)[0]
        for call in (calls[what], torch.compile(calls[what], fullgraph=True, backend="aot_eager"))
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_transforms_of_functions_give_what_loops_do(name: str):
    call = NORMALIZERS[name].call
    scores = torch.randn(4, 3, 5, dtype=torch.float64)
    scores[0, 0, 1] = -math.inf
    together = torch.func.vmap(call)(scores)
    torch.testing.assert_close(together, torch.stack([call(each) for each in scores]), rtol=1e-14, atol=0)
    across = torch.func.vmap(call, in_dims=2, out_dims=2)(scores)
    torch.testing.assert_close(across, call(scores.movedim(2, 0)).movedim(0, 2), rtol=1e-14, atol=0)

    def loss(row: Tensor) -> Tensor:
        return (call(row) * torch.arange(5.0)).square().sum()

    rows = scores[1]
    leaf = rows.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(loss(row) for row in leaf), leaf)  # pyright: ignore
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(rows), want)
    jacobian = torch.func.jacrev(call)(rows[0])
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(call, rows[0]))


@pytest.mark.parametrize("what", ["first", "second"])
def test_alpha_is_mapped_and_differentiated_by_transforms(what: str):
    scores, alphas = torch.randn(5, dtype=torch.float64), torch.tensor([1.0, 1.4, 2.0, 3.0], dtype=torch.float64)

    def total(alpha: Tensor) -> Tensor:
        return F.entmax(scores, alpha).square().sum()

    gradient = torch.func.grad(total)
    function = gradient if what == "first" else torch.func.grad(gradient)
    got = torch.func.vmap(function)(alphas)
    leaf = alphas.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(total(a) for a in leaf), leaf, create_graph=True)  # pyright: ignore
    if what == "second":
        (want,) = torch.autograd.grad(want.sum(), leaf)
    torch.testing.assert_close(got, want.detach())


@pytest.mark.parametrize("name", NORMALIZERS)
def test_autocast_strides_and_devices_change_nothing_and_inputs_stay_as_they_are(name: str):
    call, scores = NORMALIZERS[name].call, torch.randn(6, 8)
    wide, kept = scores.double(), scores.clone()
    with torch.autocast("cpu", torch.bfloat16):
        got = call(scores)
    assert torch.equal(got, call(scores))
    for view in (wide[:, ::2], wide.mT, wide[:1].expand(4, 8)):
        torch.testing.assert_close(call(view), call(view.contiguous()), rtol=1e-14, atol=1e-15)
    assert torch.equal(scores, kept)
    assert torch.equal(wide, kept.double())
    without_numbers = call(torch.empty(2, 3, 5, device="meta", dtype=torch.bfloat16), dim=1)
    assert (without_numbers.shape, without_numbers.dtype) == ((2, 3, 5), torch.bfloat16)
