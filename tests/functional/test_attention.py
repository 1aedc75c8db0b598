"""``attemper.attention`` against the oracle, every feature on every backend, and against PyTorch's own attention;
``dense_weights``; and gradients that no oracle tells: of dropout, of sampled rows, of ties.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attemper
from attemper import functional as F
from tests.support import agreement, cases
from tests.support.calls import DTYPES, attended, skip_without
from tests.support.fixtures import BACKENDS

pytestmark = pytest.mark.each


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for name, case in product(BACKENDS, cases.CASES)
        if str(case.dtype).removeprefix("torch.") in DTYPES[name]
    ],
)
@pytest.mark.usefixtures("poisoned_empty")
def test_results_and_gradients_are_those_of_the_oracle(backend: str, case: cases.Case):
    agreement.assert_agreement(case, backend)


# --- PyTorch's own ---

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


# --- dense weights ---


@pytest.mark.parametrize(**cases.by_name)
@pytest.mark.turns(3)
def test_dense_weights_reproduce_output_and_statistics(case: cases.Case):
    call = cases.tensors(case)
    names = tuple(
        name for name in case.names if name not in ("gini", "lse", "max_logit", "mean_logit", "logit_variance")
    )
    output, stats = attemper.attention(**call, stats=names, backend="blocked")
    assert stats is not None
    weights = attemper.functional.dense_weights(**call)
    assert weights.shape == (case.batch, case.heads, case.rows, case.keys)
    assert weights.dtype == case.dtype
    # A weight is rounded to its type: 2^-9 relative in bfloat16, and as much again in what is made of it.
    loose = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-8, torch.float32: 1e-5, torch.float64: 1e-10}[case.dtype]

    def close(one: torch.Tensor, two: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(
            one.double(), two.double(), rtol=loose, atol=loose, msg=lambda text: f"{what}: {text}"
        )

    wide = weights.double()
    value = call["value"].repeat_interleave(case.heads // case.groups, 1).double()
    close(wide @ value, output, "output")
    close(wide.sum(-1), stats.mass, "mass")
    close(F.entropy_of(wide), stats.entropy, "entropy")
    close(F.effective_tokens(wide), stats.effective_tokens, "effective tokens")
    close(F.max_weight(wide), stats.max_weight, "max weight")
    plain = wide / wide.sum(-1, keepdim=True).clamp(min=1e-300)
    close(plain.sum(-2), stats.key_mass, "key mass")
    assert (wide >= 0).all()
    assert (wide.sum(-1)[stats.empty] == 0).all()
    assert ((wide > 0).sum(-1) <= stats.visible_keys).all()


def test_dense_weights_are_before_dropout_and_take_no_part_in_what_is_reported():
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    plain = attemper.functional.dense_weights(query, key)
    assert torch.equal(
        attemper.functional.dense_weights(query, key, dropout_p=0.5, stats="all", backend="blocked"), plain
    )
    torch.testing.assert_close(plain, torch.softmax(query @ key.mT / 2, -1))


@pytest.mark.parametrize("normalizer", ["sparsemax", "entmax15"])
def test_equal_keys_share_the_weight_to_the_last_digit(normalizer: str):
    for keys in (3, 7, 41):
        query, key = torch.ones(1, 1, 1, 2, dtype=torch.float64), torch.ones(1, 1, keys, 2, dtype=torch.float64)
        weights = attemper.functional.dense_weights(query, key, normalizer=normalizer)
        torch.testing.assert_close(weights, torch.full_like(weights, 1 / keys), rtol=4 * 2.0**-52, atol=0)


# --- gradients that no oracle tells ---

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
