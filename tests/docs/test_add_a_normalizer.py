"""Adding a normalizer, done: attention divided by no sum, w = max(s, 0), as one entry that blocked computes at once.

The compiled kernels do not know it: "auto" leaves them, and whoever names one is told.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import attemper
from attemper import nn
from attemper.backends.normalizers import CODES, NORMALIZERS
from attemper.backends.normalizers.simplex import Normalizer
from attemper.backends.table import COMPILED_NORMALIZERS
from attemper.call.row_operator import row_weights
from tests.support.fixtures import NATIVE

BACKENDS = Path(attemper.__file__).parent / "backends"


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


@pytest.mark.parametrize(
    ("backend", "dtype"), [("blocked", torch.float64), ("auto", torch.float64), ("auto", torch.float32)], ids=str
)
@pytest.mark.parametrize("normalizer", ["relu", Relu()], ids=["by name", "as a module"])
def test_one_entry_gives_output_statistics_and_gradients(
    normalizer: str | nn.Normalizer, backend: str, dtype: torch.dtype
):
    query, key, value = (torch.randn(2, 3, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3))
    call = {"normalizer": normalizer, "is_causal": True, "temperature": 0.7, "stats": "all", "backend": backend}
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


@pytest.mark.skipif(not NATIVE, reason="the native kernels are not built here")
def test_kernels_that_do_not_know_it_refuse_it_by_name():
    x = torch.randn(1, 1, 2, 4)
    with pytest.raises(attemper.BackendError, match=r"it has no normalizer 'relu'\. Use backend='blocked'"):
        attemper.attention(x, x, x, normalizer="relu", backend="native")


def test_rows_of_scores_are_not_handed_to_kernels_that_do_not_know_it():
    scores = torch.randn(3, 5, requires_grad=True)
    weights = row_weights(scores, "relu")
    assert torch.equal(weights, scores.clamp(min=0))
    (gradient,) = torch.autograd.grad(weights.sum(), scores)
    assert torch.equal(gradient, (scores > 0).float())


def test_the_names_of_compiled_normalizers_are_those_of_the_kernels_in_their_order():
    source = (BACKENDS / "native" / "source" / "solve.h").read_text("utf-8")
    enum = re.search(r"enum Normalizer : int64_t \{(.*?), NORMALIZERS \}", source, re.DOTALL)
    assert enum is not None
    assert tuple(name.strip().lower() for name in enum[1].split(",")) == COMPILED_NORMALIZERS
    gpu = (BACKENDS / "triton" / "rowwise" / "normalizers.py").read_text("utf-8")
    constants = re.search(r"^(\w+(?:, \w+)+) = \(tl\.constexpr.* in range\((\d+), (\d+)\)\)", gpu, re.MULTILINE)
    assert constants is not None
    codes = zip(map(str.lower, constants[1].split(", ")), range(int(constants[2]), int(constants[3])), strict=True)
    assert dict(codes) == {name: code for name, code in CODES.items() if name != "softmax"}
    named = re.findall(r'^    "(\w+)": (\w+)\.value,', gpu, re.MULTILINE)
    assert [name for name, _ in named] == [constant.lower() for _, constant in named] == list(CODES)[1:]
