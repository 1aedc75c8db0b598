"""The operators as PyTorch sees them: schemas, fakes and registrations by opcheck, gradients where needed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attemper import _ops
from attemper._ops import Arguments
from attemper.functional.names import state_fields

ALL_FIELDS = state_fields(("logit_variance", "effective_tokens", "first_token_mass", "mean_distance"))


def arguments(**changes: Any) -> Arguments:
    query, key, value = (torch.randn(2, 4, n, 4, requires_grad=True) for n in (3, 5, 5))
    base = Arguments(
        query=query, key=key, value=value, mask=None, multiplier=torch.full((1, 1, 1), 0.5), fields=ALL_FIELDS
    )
    return Arguments(**(vars(base) | changes))


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
    "key_mass": lambda: {"key_mass": True, "fields": "mzn"},
    "gini": lambda: {"fields": "mzng"},
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_operator_passes_opcheck(variant: str):
    result = torch.library.opcheck(torch.ops.attemper.attention.default, arguments(**VARIANTS[variant]()).values())
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_backward_operator_has_a_true_schema_and_fake(variant: str):
    call = arguments(**VARIANTS[variant]())
    with torch.no_grad():
        output, state, key_mass = _ops.attention(call)
    needs = [tensor is not None and tensor.dtype.is_floating_point for tensor in call.differentiable]
    above = [torch.randn_like(t) for t in (output, state, key_mass)]
    detached = [value.detach() if isinstance(value, Tensor) else value for value in call.values()]
    result = torch.library.opcheck(
        torch.ops.attemper.attention_backward.default, (*detached, output, state, *above, needs),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_come_in_the_shape_and_type_of_their_tensors_and_only_where_needed(variant: str):
    call = arguments(**VARIANTS[variant]())
    output, state, key_mass = _ops.attention(call)
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
    output, state, key_mass = _ops.attention(Arguments(**alone))
    (output.sum() + state.masked_fill(~torch.isfinite(state), 0.0).sum() + key_mass.sum()).backward()
    assert call.key.grad is not None
    assert torch.equal(key.grad, call.key.grad)


def test_meta_tensors_give_shapes_beyond_two_to_the_31_elements():
    query = torch.empty(1, 2, 2**20, 2**12, device="meta", dtype=torch.float16)
    output, state, key_mass = _ops.attention(
        Arguments(query, query, query, None, torch.empty(1, 1, 1, device="meta"), fields="mzna", key_mass=True)
    )
    assert output.shape == query.shape
    assert output.numel() > 2**31
    assert (state.shape, state.dtype) == ((4, 1, 2, 2**20), torch.float32)
    assert key_mass.shape == (1, 2, 2**20)
