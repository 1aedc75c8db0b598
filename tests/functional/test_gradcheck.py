"""Every differentiable statistic against finite differences in float64, for every differentiable argument."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from tests.support.calls import skip_without

SMOOTH = (
    "lse", "entropy", "normalized_entropy", "effective_tokens", "max_weight", "max_logit", "mean_logit",
    "logit_variance", "mass", "first_token_mass", "entropy_with_sink", "mean_distance", "score_variance",
    "self_weight", "span_mass",
)  # fmt: skip
WHOLE_ROWS = ("gini", "key_mass")
LARGER = pytest.mark.slow("the full size of what runs smaller by default")
ARGUMENTS = ("query", "key", "value", "temperature", "sink_logits", "bias")


Check = Callable[..., bool]


@pytest.fixture
def gradients_agree(full_size: bool) -> Check:
    """PyTorch's gradcheck: along random directions by default, with ``--all`` of every entry."""
    return partial(torch.autograd.gradcheck, fast_mode=not full_size)


def leaves(keys: int, groups: int = 1) -> dict[str, Tensor]:
    shapes = {
        "query": (1, 2, 2, 2),
        "key": (1, groups, keys, 2),
        "value": (1, groups, keys, 1),
        "sink_logits": (2,),
        "bias": (2, 2, keys),
    }
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    tensors["temperature"] = torch.rand(1, 2, 2, dtype=torch.float64) + 0.5
    return {name: tensors[name].requires_grad_() for name in ARGUMENTS}


def function(names: tuple[str, ...], backend: str, hidden: Tensor | None, **options: Any):
    """The call as a function of its six tensors alone; infinite results of empty rows are left out."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, temperature: Tensor, sink: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        mask = bias if hidden is None else bias.masked_fill(hidden, -torch.inf)
        options.setdefault("spans", [(0, 0)])
        options.setdefault("causal_alignment", "bottom-right")
        output, stats = attemper.attention(
            query, key, value, mask, temperature=temperature, sink_logits=sink, stats=names, backend=backend,
            enable_gqa=key.shape[1] != query.shape[1], **options,
        )  # fmt: skip
        assert stats is not None
        return output, *(stats[name].nan_to_num(neginf=0.0) for name in names)

    return call


@pytest.mark.parametrize("names", [SMOOTH, WHOLE_ROWS], ids=["summed over blocks", "of whole rows"])
@pytest.mark.parametrize("keys", [1, 2, 3, 5, *(pytest.param(n, marks=LARGER) for n in (4, 6, 7, 8, 9))])
def test_gradients_of_blocked_pass_gradcheck(keys: int, names: tuple[str, ...], tiled, gradients_agree: Check):
    tiled(1, 2, 4)
    tensors = leaves(keys)
    hidden = torch.rand(2, 2, keys) < 0.3
    hidden[0, 1] = True
    assert gradients_agree(function(names, "blocked", hidden), tuple(tensors.values()))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 1.5}, {"is_causal": True}, {"is_causal": True, "causal_alignment": "bottom-right"},
        {"window_size": (1, 1)}, {"scale": -0.7, "first_tokens": 2},
    ],
    ids=["softcap", "causal", "bottom-right", "window", "negative scale"],
)  # fmt: skip
@pytest.mark.quick("reference-softcap", "native", "blocked-bottom-right", "blocked-negative", "blocked-softcap")
def test_gradients_with_options_pass_gradcheck(options: dict[str, Any], backend: str, tiled, gradients_agree: Check):
    skip_without(backend, "float64")
    tiled(1, 2, 4)
    tensors = leaves(4, groups=2)
    assert gradients_agree(function(SMOOTH + WHOLE_ROWS, backend, None, **options), tuple(tensors.values()))


@pytest.mark.parametrize("keys", [1, 4])
def test_gradients_of_the_reference_pass_gradcheck(keys: int, gradients_agree: Check):
    hidden = torch.rand(2, 2, keys) < 0.3
    assert gradients_agree(function(SMOOTH + WHOLE_ROWS, "reference", hidden), tuple(leaves(keys).values()))


@pytest.mark.quick("blocked", "native")
def test_gradients_of_packed_documents_pass_gradcheck(backend: str, gradients_agree: Check):
    skip_without(backend, "float64")
    query, key, value = (torch.randn(5, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    temperature = (torch.rand(1, 2, 5, dtype=torch.float64) + 0.5).requires_grad_()
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 5])

    def call(query: Tensor, key: Tensor, value: Tensor, temperature: Tensor, sink: Tensor) -> tuple[Tensor, ...]:
        output, stats = attemper.varlen_attention(
            query, key, value, offsets, offsets, is_causal=True, temperature=temperature, sink_logits=sink,
            stats=SMOOTH + WHOLE_ROWS, spans=[(1, 3)], backend=backend,
        )  # fmt: skip
        assert stats is not None
        return output, *(stats[name] for name in SMOOTH + WHOLE_ROWS)

    assert gradients_agree(call, (query, key, value, temperature, sink))


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
