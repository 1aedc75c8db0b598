"""Adding a normalizer, done: attention divided by no sum, w = max(s, 0), as one entry that blocked computes at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attemper
from attemper import nn
from attemper.backends.normalizers import NORMALIZERS
from attemper.backends.normalizers.simplex import Normalizer


def _weights(scores: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
    return scores.clamp(min=0)


def _gradient(weights: Tensor, grad: Tensor, number: float = 0.0, per_head: Tensor | None = None) -> Tensor:
    return grad * (weights > 0)


class Relu(nn.Normalizer):
    name, function = "relu", staticmethod(lambda scores, dim, temperature: (scores / temperature).clamp(min=0))


@pytest.fixture(autouse=True)
def relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file beside ``backends/normalizers/sigmoid.py`` and its row in ``NORMALIZERS`` say."""
    monkeypatch.setitem(NORMALIZERS, "relu", Normalizer(_weights, _gradient))


@pytest.mark.parametrize("normalizer", ["relu", Relu()], ids=["by name", "as a module"])
def test_one_entry_gives_output_statistics_and_gradients(normalizer: str | nn.Normalizer):
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    call = {"normalizer": normalizer, "is_causal": True, "temperature": 0.7, "stats": "all", "backend": "blocked"}
    output, stats = attemper.attention(query, key, value, **call)
    scores = (query @ key.mT / 2 / 0.7).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    weights = scores.clamp(min=0)
    torch.testing.assert_close(output, weights @ value)
    assert stats is not None
    torch.testing.assert_close(stats["mass"], weights.sum(-1).to(stats["mass"].dtype))
    torch.testing.assert_close(stats["support_size"].double(), (weights > 0).sum(-1).double())
    found = torch.autograd.grad(output.square().sum(), (query, key, value))
    wanted = torch.autograd.grad((weights @ value).square().sum(), (query, key, value))
    torch.testing.assert_close(found, wanted)


def test_its_name_stands_in_the_message_about_unknown_names():
    x = torch.randn(1, 1, 2, 2)
    with pytest.raises(attemper.InputError, match=r"must be one of 'softmax'.*'relu'.*Did you mean 'relu'"):
        attemper.attention(x, x, x, normalizer="rellu")
