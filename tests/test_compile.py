"""``torch.compile(fullgraph=True)``: one graph, the numbers of eager forward and backward, no recompilation."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import attemper
from attemper import InputError
from attemper.nn.bounds import bounded_exponential
from tests.support.calls import PRESENT, attended, known, packed, skip_without

AFTER_THE_REFERENCE = [
    pytest.param(name, marks=pytest.mark.slow("takes many seconds") if name == "reference" else [])
    for name in PRESENT
    if name != "triton"
]
"""Its graphs are the longest, and every call of ``CALLS`` makes one."""


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def leaves(*names: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "query": (2, 4, 6, 8), "key": (2, 4, 9, 8), "value": (2, 4, 9, 5), "sink_logits": (4,), "attn_mask": (4, 6, 9),
        "temperature": (4, 1),
    }  # fmt: skip
    tensors = {name: torch.randn(shapes[name]) for name in ("query", "key", "value", *names)}
    if "temperature" in tensors:
        tensors["temperature"] = tensors["temperature"].abs() + 0.5
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def documents() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(7, 2, 4).requires_grad_() for name in ("query", "key", "value")}


OFFSETS = torch.tensor([0, 3, 3, 7])
NAMES = ("entropy", "logit_variance", "max_weight", "effective_tokens")


def dense(backend: str, names: tuple[str, ...] = NAMES, **options: Any) -> Callable[..., list[Tensor]]:
    def call(**tensors: Tensor) -> list[Tensor]:
        output, stats = attended(backend, **tensors, stats=names, **options)
        return [output, *(stats[name] for name in names)]

    return call


def varlen(backend: str) -> Callable[..., list[Tensor]]:
    def call(**tensors: Tensor) -> list[Tensor]:
        output, stats = packed(backend, **tensors, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, is_causal=True)
        return [output, *(stats[name] for name in NAMES)]

    return call


def alone(backend: str) -> Callable[..., list[Tensor]]:
    def call(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        stats = attemper.attention_statistics(query, key, is_causal=True, backend=backend)
        return [stats[name] for name in NAMES] + [value.sum()]

    return call


CALLS = {
    "attention": (dense, leaves, ()),
    "causal, softcap": (lambda backend: dense(backend, is_causal=True, softcap=5.0), leaves, ()),
    "bias, sink, temperature": (dense, leaves, ("attn_mask", "sink_logits", "temperature")),
    "gini and key_mass": (lambda backend: dense(backend, ("gini", "key_mass")), leaves, ()),
    "varlen_attention": (varlen, documents, ()),
    "attention_statistics": (alone, leaves, ()),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.quick("blocked-bias")
def test_a_compiled_call_is_one_graph_with_the_results_and_gradients_of_eager(name: str, backend: str):
    if "gini" in name:
        skip_without(backend, "second_pass")
    make, tensors, more = CALLS[name]
    function = make(backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    runs = []
    for call in (function, compiled):
        arguments = tensors(*more)
        results = call(**arguments)
        torch.autograd.backward(results, [torch.linspace(-1, 1, r.numel()).view(r.shape) for r in results])
        runs.append([*results, *(tensor.grad for tensor in arguments.values())])
    assert counter.frame_count == 1
    for eager, other in zip(*runs, strict=True):
        assert other is not None
        torch.testing.assert_close(other, eager, rtol=1e-6, atol=1e-6)
    compiled(**tensors(*more))
    assert counter.frame_count == 1, "new data of the same shape was compiled again"


@pytest.mark.slow("compiles for seconds")
@pytest.mark.parametrize("backend", AFTER_THE_REFERENCE)
@pytest.mark.parametrize("merged", [False, True], ids=["stats object", "merge"])
@pytest.mark.quick("object-native")
def test_a_compiled_function_may_return_the_result_itself(merged: bool, backend: str):
    def call(query: Tensor, key: Tensor, value: Tensor) -> attemper.types.AttentionOutput:
        one = attemper.attention(query, key[:, :, :4], value[:, :, :4], stats="all", backend=backend)
        if not merged:
            return one
        return one.merge(attemper.attention(query, key[:, :, 4:], value[:, :, 4:], stats="all", backend=backend))

    arguments = leaves()
    eager, compiled = call(**arguments), torch.compile(call, backend="aot_eager", fullgraph=True)(**arguments)
    assert isinstance(compiled, attemper.types.AttentionOutput)
    torch.testing.assert_close(compiled.output, eager.output)
    stats, want = known(compiled.stats), known(eager.stats)
    for name in want:
        torch.testing.assert_close(stats[name], want[name], msg=name)
    for name, summary in want.per_head().items():
        torch.testing.assert_close(stats.per_head()[name].mean, summary.mean, msg=name)


@pytest.mark.quick("blocked")
def test_compiled_dropout_draws_anew_at_every_call(backend: str):
    skip_without(backend, "dropout")
    compiled = torch.compile(
        lambda q: attemper.attention(q, q, q, dropout_p=0.5, backend=backend).output,
        backend="aot_eager",
        fullgraph=True,
    )
    query = torch.randn(1, 2, 8, 4)
    assert not torch.equal(compiled(query), compiled(query))


@pytest.mark.slow("compiles for seconds")
@pytest.mark.parametrize("backend", AFTER_THE_REFERENCE)
@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.quick("automatic-native")
def test_lengths_may_vary_without_a_graph_for_each(dynamic: bool | None, backend: str):
    counter, function = CompileCounterWithBackend("aot_eager"), dense(backend, ("entropy",), is_causal=True)
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic)
    for length in (5, 6, 9, 12):
        query = torch.randn(1, 2, length, 4)
        results = [call(query=query, key=query, value=query) for call in (compiled, function)]
        for one, two in zip(*results, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)
    assert counter.frame_count <= 2


def test_a_mistake_is_told_under_compile_too():
    compiled = torch.compile(lambda q: attemper.attention(q, q, q, temperature=-1.0), backend="aot_eager")
    with pytest.raises((InputError, TorchRuntimeError), match="must be above 0"):
        compiled(torch.randn(1, 1, 2, 4))


def derivatives(backend: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Tangents of attention, of a normalizer, and of a bounded parameter."""

    def loss(x: Tensor) -> Tensor:
        output, stats = attended(backend, x, x.sin(), x, stats=("entropy",))
        return output.sin().sum() + stats.entropy.sum()

    def tangent(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.func.jvp(function, (x,), (x.cos(),))[1]

    return {
        "tangent": tangent(loss),
        "tangent of entmax15": tangent(attemper.functional.entmax15),
        "tangent of a bounded parameter": tangent(lambda x: bounded_exponential(x, 0.1, 10.0)),
    }


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("name", derivatives("blocked"))
@pytest.mark.quick("entmax15")
def test_derivatives_of_torch_func_inside_a_compiled_function_are_those_of_eager_code(name: str):
    x = torch.randn(1, 2, 5, 4)
    function = derivatives("blocked")[name]
    found = torch.compile(function, backend="aot_eager")(x)
    torch.testing.assert_close(found, function(x), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize(
    ("backend", "name", "refused"),
    [("auto", "tangent", False), ("blocked", "tangent", True), ("auto", "tangent of entmax15", True)],
)
@pytest.mark.quick("entmax15")
def test_one_graph_with_a_derivative_is_the_reference_s_and_refused_to_others(backend: str, name: str, refused: bool):
    x, function = torch.randn(1, 2, 5, 4), derivatives(backend)[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    if refused:
        with pytest.raises(Unsupported, match="BackendError"):
            compiled(x)
    else:
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow("takes many seconds")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # PyTorch's own
def test_what_was_compiled_keeps_its_derivatives_under_transforms():
    x, way = torch.randn(2, 1, 2, 5, 4)
    torch.compiler.reset()

    def call(x: Tensor) -> Tensor:
        return attemper.attention(x, x, x, backend="blocked").output

    compiled = torch.compile(call, backend="aot_eager")
    torch.testing.assert_close(compiled(x), call(x))
    torch.testing.assert_close(torch.func.jvp(compiled, (x,), (way,))[1], torch.func.jvp(call, (x,), (way,))[1])
    torch.testing.assert_close(torch.func.jacrev(compiled)(x), torch.func.jacrev(call)(x))
    with forward_ad.dual_level():
        parts = [forward_ad.unpack_dual(each(forward_ad.make_dual(x, way))) for each in (compiled, call)]
        torch.testing.assert_close(parts[0].tangent, parts[1].tangent)
