"""Gradients that no oracle tells: of dropout, of sampled rows, of ties; what was not asked for has none."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import attemper
from tests.support.calls import skip_without

pytestmark = pytest.mark.each


Check = Callable[..., bool]


@pytest.fixture
def gradients_agree(full_size: bool) -> Check:
    """PyTorch's gradcheck: along random directions by default, with ``--all`` of every entry."""
    return partial(torch.autograd.gradcheck, fast_mode=not full_size)


def test_gradients_of_sampled_rows_pass_gradcheck(backend: str, gradients_agree: Check):
    skip_without(backend, "float64")
    query, key = (torch.randn(1, 1, 7, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def call(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        stats = attemper.attention_statistics(
            query, key, is_causal=True, rows=3, generator=torch.Generator().manual_seed(0),
            stats=("entropy", "mean_distance"),
            backend=backend,
        )  # fmt: skip
        return stats.entropy, stats.mean_distance

    assert gradients_agree(call, (query, key))


def test_the_gradient_of_dropout_uses_the_weights_that_were_dropped(backend: str, tiled, gradients_agree: Check):
    skip_without(backend, "float64")
    tiled(2, 3, 40)
    query, key, value = (torch.randn(1, 2, n, 2, dtype=torch.float64, requires_grad=True) for n in (4, 7, 7))
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(query: Tensor, key: Tensor, value: Tensor, sink: Tensor) -> Tensor:
        torch.manual_seed(11)
        return attemper.attention(query, key, value, dropout_p=0.5, sink_logits=sink, backend=backend).output

    dense = attemper.attention(query, key, value, sink_logits=sink, backend=backend).output
    assert not torch.allclose(call(query, key, value, sink), dense)
    assert gradients_agree(call, (query, key, value, sink))


def test_the_gradient_of_dropout_over_packed_documents_uses_the_weights_that_were_dropped(
    backend: str, gradients_agree: Check
):
    skip_without(backend, "float64")
    query, key, value = (torch.randn(6, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 2, 6])

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        torch.manual_seed(11)
        return attemper.varlen_attention(query, key, value, offsets, offsets, dropout_p=0.5, backend=backend).output

    assert gradients_agree(call, (query, key, value))


def test_ties_for_the_maximum_send_its_gradient_to_the_lowest_key(backend: str, tiled):
    tiled(1, 2, 4)
    bias = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]], requires_grad=True)
    query, key = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 5, 1)
    stats = attemper.attention(query, key, key, bias, stats=("max_logit",), backend=backend).stats
    assert stats is not None
    (grad,) = torch.autograd.grad(stats.max_logit.sum(), bias)
    assert grad.tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]


def test_what_was_not_asked_for_is_kept_without_a_gradient(backend: str):
    query = torch.randn(1, 1, 2, 4, requires_grad=True)
    stats = attemper.attention(query, query, query, stats=("entropy",), backend=backend).stats
    assert stats is not None
    assert stats.entropy.requires_grad
    assert not stats.lse.requires_grad
    assert not stats.max_logit.requires_grad
