"""The operators as PyTorch sees them: schemas, fakes and registrations by opcheck, gradients where needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attemper
import attemper.call.autograd  # registers the gradients
from attemper.backends.contract import Problem
from attemper.call import call_sums, operator
from attemper.statistics import ONE_PASS, SOFTMAX_BASE, Column, state_columns

ALL_COLUMNS = state_columns(("logit_variance", "effective_tokens", "first_token_mass", "mean_distance"))


def arguments(**changes: Any) -> Problem:
    query, key, value = (torch.randn(2, 4, n, 4, requires_grad=True) for n in (3, 5, 5))
    base = Problem(
        query=query, key=key, value=value, mask=None, multiplier=torch.full((1, 1, 1), 0.5), columns=ALL_COLUMNS
    )
    return Problem(**(vars(base) | changes))


def packed() -> dict[str, Any]:
    query, key, value = (torch.randn(1, 4, 6, 4, requires_grad=True) for _ in range(3))
    return {
        "query": query, "key": key, "value": value,
        "cu_seqlens_q": torch.tensor([0, 2, 2, 6]), "cu_seqlens_k": torch.tensor([0, 3, 4, 6]),
    }  # fmt: skip


VARIANTS = {
    "dense": dict,
    "no value": lambda: {"value": None},
    "bool mask": lambda: {"mask": torch.rand(2, 1, 3, 5) < 0.6},
    "bias": lambda: {"mask": torch.randn(1, 4, 3, 5, requires_grad=True)},
    "grouped heads": lambda: {
        "key": torch.randn(2, 2, 5, 4, requires_grad=True), "value": torch.randn(2, 2, 5, 3, requires_grad=True),
    },
    "temperature": lambda: {"multiplier": torch.rand(2, 4, 3, requires_grad=True)},
    "sink, softcap": lambda: {"sink": torch.randn(4, requires_grad=True), "softcap": 3.0},
    "causal": lambda: {"right": 0, "bottom_right": True},
    "dropout": lambda: {"dropout_p": 0.4, "seed": torch.tensor(7)},
    "first keys": lambda: {"first_keys": torch.tensor([[True, False, False, False, True]])},
    "sampled rows": lambda: {"positions": torch.tensor([0, 2, 4]), "right": 0},
    "packed": packed,
    "key_mass": lambda: {"key_mass": True, "columns": SOFTMAX_BASE},
    "gini": lambda: {"columns": state_columns(("gini",))},
    "maximum": lambda: {"maximum_gradient": True},
    "float64": lambda: {
        "query": torch.randn(2, 4, 3, 4, dtype=torch.float64, requires_grad=True),
        "key": torch.randn(2, 4, 5, 4, dtype=torch.float64, requires_grad=True),
        "value": torch.randn(2, 4, 5, 4, dtype=torch.float64, requires_grad=True),
        "multiplier": torch.full((1, 1, 1), 0.5, dtype=torch.float64),
    },
    "half": lambda: {
        name: torch.randn(2, 4, n, 4, dtype=torch.bfloat16, requires_grad=True)
        for name, n in (("query", 3), ("key", 5), ("value", 5))
    },
}  # fmt: skip


IN_GRAPHS = (
    "dense", "no value", "bias", "temperature", "sink, softcap", "causal", "packed", "key_mass", "gini",
)  # fmt: skip
"""Variants that test_compile.py calls in a compiled graph, with results and gradients of eager."""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.quick("dense", "bias", "dropout", "packed", "maximum")
@pytest.mark.turns(2)
def test_the_operator_passes_opcheck(variant: str, full_size: bool):
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if full_size or variant not in IN_GRAPHS:
        checks.append("test_aot_dispatch_dynamic")
    call = arguments(**VARIANTS[variant]()).values()
    result = torch.library.opcheck(torch.ops.attemper.attention.default, call, test_utils=checks)
    assert result == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.quick("bias", "grouped", "sink", "packed", "key_mass")
def test_the_backward_operator_has_a_true_schema_and_fake(variant: str):
    call = arguments(**VARIANTS[variant]())
    with torch.no_grad():
        output, state, key_mass = operator.attention(call)
    needs = [tensor is not None and tensor.dtype.is_floating_point for tensor in call.differentiable]
    above = [torch.randn_like(t) for t in (output, state, key_mass)]
    detached = [value.detach() if isinstance(value, Tensor) else value for value in call.values()]
    result = torch.library.opcheck(
        torch.ops.attemper.attention_backward.default, (*detached, output, state, *above, needs),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.turns(3)
def test_gradients_come_in_the_shape_and_type_of_their_tensors_and_only_where_needed(variant: str):
    call = arguments(**VARIANTS[variant]())
    output, state, key_mass = operator.attention(call)
    finite = state.masked_fill(~torch.isfinite(state), 0.0)
    (output.sum() + finite.sum() + key_mass.sum()).backward()
    for tensor in call.differentiable:
        if tensor is not None and tensor.requires_grad:
            assert tensor.grad is not None
            assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)
            assert torch.isfinite(tensor.grad).all()
    alone: dict[str, Any] = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in vars(call).items()
    }
    key = alone["key"].requires_grad_()
    output, state, key_mass = operator.attention(Problem(**alone))
    (output.sum() + state.masked_fill(~torch.isfinite(state), 0.0).sum() + key_mass.sum()).backward()
    assert call.key.grad is not None
    assert torch.equal(key.grad, call.key.grad)


class BackwardCalls(TorchDispatchMode):
    """The arguments of every call of the backward operator, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.attemper.attention_backward.default:
            names = (argument.name for argument in func._schema.arguments)
            self.calls.append(dict(zip(names, args, strict=False)))
        return func(*args, **(kwargs or {}))


def gradients(call: Problem, *results: int, zeros: bool = False) -> tuple[list[Tensor | None], dict[str, Any]]:
    """Gradients of these results of the operator (0: output, 1: state, 2: key_mass), of all with ``zeros`` elsewhere,
    and the call of the backward operator that made them.
    """
    seed = torch.Generator().manual_seed(3)
    found = operator.attention(call)
    above = [torch.randn(result.shape, generator=seed, dtype=result.dtype) for result in found]
    terms = [
        (torch.where(torch.isfinite(result), result, 0.0) * grad * (place in results)).sum()
        for place, (result, grad) in enumerate(zip(found, above, strict=True))
        if zeros or place in results
    ]
    leaves = [tensor for tensor in call.differentiable if tensor is not None and tensor.requires_grad]
    with BackwardCalls() as calls:
        grads = torch.autograd.grad(torch.stack([term.double() for term in terms]).sum(), leaves, allow_unused=True)
    (seen,) = calls.calls
    return list(grads), seen


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "no value"])
@pytest.mark.turns(3)
def test_statistics_without_a_gradient_have_no_part_in_the_backward_pass(variant: str):
    call = arguments(**VARIANTS[variant]())
    whole, _ = gradients(call, 0, zeros=True)
    alone, seen = gradients(call, 0)
    assert (tuple(seen["columns"]), seen["maximum_gradient"], seen["key_mass"]) == (SOFTMAX_BASE, False, False)
    assert seen["state"].shape == seen["grad_state"].shape == (3, *call.query.shape[:3])
    assert seen["grad_key_mass"].shape == (0,)
    for one, two in zip(alone, whole, strict=True):
        assert one is not None
        assert two is not None
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("results", "columns", "key_mass"),
    [
        ((0, 1), state_columns(("entropy",)), False),
        ((0, 2), SOFTMAX_BASE, True),
        ((1,), state_columns(("entropy",)), False),
    ],
)
def test_what_has_a_gradient_stays_in_the_backward_pass(
    results: tuple[int, ...], columns: tuple[Column, ...], key_mass: bool
):
    call = arguments(columns=state_columns(("entropy",)), key_mass=True, maximum_gradient=True)
    whole, full = gradients(call, *results, zeros=True)
    some, seen = gradients(call, *results)
    assert (tuple(full["columns"]), full["key_mass"], full["maximum_gradient"]) == (
        state_columns(("entropy",)),
        True,
        True,
    )
    assert (tuple(seen["columns"]), seen["key_mass"], seen["maximum_gradient"]) == (columns, key_mass, 1 in results)
    for one, two in zip(some, whole, strict=True):
        torch.testing.assert_close(
            one if one is not None else torch.zeros(()), two if two is not None else torch.zeros(())
        )


@pytest.mark.parametrize(
    "changes",
    [{"columns": state_columns(("gini",))}, {"columns": SOFTMAX_BASE, "key_mass": True}],
    ids=["gini", "key_mass"],
)
def test_dropout_is_the_same_in_both_passes_when_tiles_hold_whole_rows(changes: dict[str, Any]):
    """It is drawn tile by tile: a backward pass that cut tiles in another way would drop other weights."""
    call = arguments(dropout_p=0.5, seed=torch.tensor(7), tile_rows=2, tile_keys=2, tile_elements=16, **changes)
    (_, _, from_output, *_), seen = gradients(call, 0)
    assert (tuple(seen["columns"]), seen["key_mass"]) == (changes["columns"], changes.get("key_mass", False))
    assert from_output is not None
    output, *_ = operator.attention(call)
    # The output is linear in the values: their gradient times them is the output times what came from above.
    above = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    assert call.value is not None
    torch.testing.assert_close((from_output * call.value).sum(), (above * output).sum())


def test_a_call_of_a_user_who_differentiates_the_output_alone_carries_no_statistics():
    query, key, value = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    result = attemper.attention(query, key, value, stats="all", backend="blocked")
    assert result.stats is not None
    with BackwardCalls() as calls:
        result.output.sum().backward(retain_graph=True)
        (result.output.sum() + result.stats.entropy.sum()).backward()
    alone, both = calls.calls
    assert (tuple(alone["columns"]), alone["maximum_gradient"]) == (SOFTMAX_BASE, False)
    assert (tuple(both["columns"]), both["maximum_gradient"]) == (state_columns(ONE_PASS), True)


@pytest.mark.usefixtures("interpreted")
def test_triton_is_launched_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    entered: list[torch.device] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append(device)

    monkeypatch.setattr(torch.cuda, "device", current)
    with operator._current(torch.device("cuda", 1)):
        assert entered == [torch.device("cuda", 1)]
    with operator._current(torch.device("cpu")):
        pass
    assert entered == [torch.device("cuda", 1)] * 2
    monkeypatch.setattr(operator, "_current", current)
    call, flag = arguments(backend="triton", columns=state_columns(("entropy",))), torch.ones(1, dtype=torch.int32)
    for launch in (
        lambda: operator.attention(call),
        lambda: gradients(call, 0),
        lambda: operator.sampled_positions(torch.zeros(1, dtype=torch.float64), 2, 3, flag),
        lambda: call_sums.add(call, call_sums.empty_sums(4, torch.device("cpu")), flag),
    ):  # fmt: skip
        entered.clear()
        launch()
        assert entered
        assert set(entered) == {torch.device("cpu")}


def test_meta_tensors_give_shapes_beyond_two_to_the_31_elements():
    query = torch.empty(1, 2, 2**20, 2**12, device="meta", dtype=torch.float16)
    output, state, key_mass = operator.attention(
        Problem(
            query,
            query,
            query,
            None,
            torch.empty(1, 1, 1, device="meta"),
            columns=state_columns(("entropy",)),
            key_mass=True,
        )
    )
    assert output.shape == query.shape
    assert output.numel() > 2**31
    assert (state.shape, state.dtype) == ((4, 1, 2, 2**20), torch.float32)
    assert key_mass.shape == (1, 2, 2**20)
