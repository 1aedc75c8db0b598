"""Attention held against PyTorch's own: the output, and entropy by a trick that needs no statistics at all.

Where scores are scale q.k and a mask, ``H = lse - scale q.(P K)``: stock attention with V := K gives P K, and its
backward pass with dO := -scale g q gives the gradient of sum g H with respect to q and k.
"""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.support.calls import attended, skip_without

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.arange(40).view(5, 8) % 3 > 0},
    "scale": {"scale": 0.8},
    "grouped heads": {"enable_gqa": True},
}


def tensors(what: str) -> list[torch.Tensor]:
    groups = 2 if what == "grouped heads" else 4
    shapes = ((2, 4, 5, 6), (2, groups, 8, 6), (2, groups, 8, 3))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.turns(2)
def test_the_output_and_its_gradients_are_those_of_pytorch(what: str, backend: str):
    skip_without(backend, "float64")
    leaves = tensors(what)
    ours = attended(backend, *leaves, **OPTIONS[what]).output
    stock = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], **OPTIONS[what])
    torch.testing.assert_close(ours, stock, rtol=1e-12, atol=1e-13)
    above = torch.randn(ours.shape, dtype=torch.float64)
    for one, two in zip(*(torch.autograd.grad(result, leaves, above) for result in (ours, stock)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)
