"""The module of linear attention holds options, and does what the function does."""

from __future__ import annotations

import pytest
import torch

from attemper import InputError, nn
from attemper.functional import linear_attention


@pytest.mark.parametrize("name", ["elu", "relu", "exp"])
def test_it_does_what_the_function_does(name: str):
    q = torch.randn(2, 4, 9, 3)
    k, v = torch.randn(2, 2, 2, 9, 3)
    mask = torch.rand(2, 9) < 0.7
    layer = nn.LinearAttention(name, is_causal=True, enable_gqa=True, chunk_size=4)
    got = layer(q, k, v, mask)
    want = linear_attention(q, k, v, feature_map=name, is_causal=True, mask=mask, enable_gqa=True, chunk_size=4)
    assert torch.equal(got.output, want.output)
    after = layer(q[:, :, :1], k[:, :, :1], v[:, :, :1], state=got.state)
    assert torch.isfinite(after.output).all()
    assert f"feature_map={name!r}, is_causal=True" in repr(layer)


def test_a_map_with_parameters_is_learned():
    learned = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Softplus())
    layer = nn.LinearAttention(learned)
    assert set(layer.state_dict()) == {"feature_map.0.weight", "feature_map.0.bias"}
    x = torch.randn(1, 2, 5, 3)
    found = layer(x, x, x)
    assert found.state.keys.shape == (1, 2, 6)
    found.output.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in learned.parameters())


def test_an_unknown_map_is_refused_when_it_is_made():
    with pytest.raises(InputError, match=r"LinearAttention\(feature_map=...\) must be one of 'elu', 'relu', 'exp'"):
        nn.LinearAttention("cosine")
