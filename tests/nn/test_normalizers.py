"""Normalizers as modules, on scores and inside attention layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper import nn
from attemper.errors import InputError

pytestmark = pytest.mark.each

MODULES: tuple[Any, ...] = (
    nn.Softmax(), nn.SoftmaxPlusOne(), nn.Sparsemax(), nn.Entmax15(), nn.TopK(3), nn.Threshold(0.1), nn.Entmax(1.3),
    nn.Entmax(1.3, learned=True, num_heads=4), nn.Sigmoid(-1.0), nn.Sigmoid(-1.0, learned=True, num_heads=4),
    nn.Sink(4), nn.Sink(), nn.ScalableSoftmax(0.7), nn.ScalableSoftmax(learned=True, num_heads=4),
)  # fmt: skip
by_module = {"argnames": "module", "argvalues": MODULES, "ids": str}


@pytest.mark.parametrize(**by_module)
@pytest.mark.turns(2)
def test_on_scores_and_inside_attention_it_is_one_normalizer(module: nn.Normalizer):
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True, normalizer=module), torch.randn(2, 7, 32)
    _, weights = layer(x, x, x, is_causal=True, average_attn_weights=False)
    q, k, _ = layer._project(x, x, x)
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    assert isinstance(weights, Tensor)
    assert torch.allclose(module(scores), weights, atol=1e-6)


@pytest.mark.parametrize("module", [module for module in MODULES if list(module.parameters())], ids=str)
def test_what_is_learned_gets_its_gradient_through_attention_as_through_scores(module: nn.Normalizer):
    query, key, value = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    module = module.double()
    parameters = list(module.parameters())
    output, _ = attemper.attention(query, key, value, normalizer=module)
    above = torch.randn_like(output)
    one = torch.autograd.grad((output * above).sum(), parameters)
    two = torch.autograd.grad(((module(query @ key.transpose(-1, -2) / 8**0.5) @ value) * above).sum(), parameters)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one, two, strict=True))
    assert all(gradient.abs().min() > 0 for gradient in one)
    module.float()


@pytest.mark.parametrize("dim", [-1, -2, 1])
def test_weights_are_found_along_dim(dim: int):
    scores = torch.randn(3, 5, 7)
    for make in (nn.Softmax, nn.Sparsemax, nn.Entmax15, nn.SoftmaxPlusOne, nn.Sigmoid):
        want = make()(scores.transpose(dim, -1)).transpose(dim, -1)
        assert torch.allclose(make(dim=dim)(scores), want)


@pytest.mark.parametrize("dim", [-2, 2, -4, 0])
def test_a_value_per_head_stands_at_the_heads_whatever_dim_is(dim: int):
    scores, alphas = torch.randn(2, 3, 4, 5), torch.tensor([1.2, 1.5, 1.9])
    found = nn.Entmax(alphas, dim=dim)(scores)
    for head, alpha in enumerate(alphas.tolist()):
        axis = 0 if dim in (0, -4) else 1  # of [batch, queries, keys]
        assert torch.allclose(found[:, head], nn.Entmax(alpha, dim=axis)(scores[:, head]), atol=1e-6)


def test_a_value_per_head_needs_heads():
    with pytest.raises(InputError, match=r"Sink has 4 heads: scores must be \[..., 4, queries, keys\], got \[5, 6\]"):
        nn.Sink(4)(torch.randn(5, 6))
    with pytest.raises(InputError, match="weights cannot be found along the heads"):
        nn.Sink(4, dim=-3)(torch.randn(4, 5, 6))


def test_an_alpha_that_overshoots_stays_within_its_bounds_and_comes_back():
    module = nn.Entmax(1.5, learned=True)
    assert module.log_excess is not None
    for raw, want in ((-50.0, 1.001), (50.0, 10.0)):
        with torch.no_grad():
            module.log_excess.fill_(raw)
        assert isinstance(module.alpha, Tensor)
        assert module.alpha.item() == pytest.approx(want)
        scores = torch.randn(4, 6)
        module(scores).square().sum().backward()
        assert torch.isfinite(module.log_excess.grad).all()  # pyright: ignore[reportArgumentType]
        module.zero_grad()


def test_cross_attention_attends_by_its_map_and_learns_it():
    layer = nn.CrossAttention(16, 12, 2, normalizer=nn.Entmax(1.4, learned=True), stats=("support_size", "mass"))
    output, stats = layer(torch.randn(2, 5, 16), torch.randn(2, 9, 12))
    assert stats is not None
    assert (stats.support_size < 9).any()
    output.sum().backward()
    assert "normalizer.log_excess" in dict(layer.named_parameters())


def test_a_watch_sees_layers_of_ours_and_calls_of_attention():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(16, 2, batch_first=True, temperature=0.5, normalizer="sparsemax")

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x, x, x, is_causal=True, need_weights=False)[0]
            heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
            return attemper.attention(heads, heads, heads, is_causal=True, softcap=3.0).output

    model, x = Model(), torch.randn(2, 9, 16)
    with attemper.watch(model) as watch:
        model(x)
    root, layer = sorted(watch.table().sites, key=lambda site: site.name)
    assert (layer.name, layer.heads[0].mass) == ("layer", pytest.approx(1))
    stats = nn.MultiheadAttention(16, 2, batch_first=True, temperature=0.5, normalizer="sparsemax", stats="all")
    stats.load_state_dict(model.layer.state_dict())
    _, want = stats(x, x, x, is_causal=True)
    assert isinstance(want, attemper.types.AttentionStats)
    assert layer.heads[0].entropy_nats == pytest.approx(want.per_head()["entropy"].mean[0].item(), abs=1e-6)
    assert root.heads[0].entropy_nats is not None


def test_a_learned_alpha_keeps_its_digits_in_half_precision():
    module = nn.Entmax(1.003, learned=True).to(torch.bfloat16)
    assert isinstance(module.alpha, Tensor)
    assert module.alpha.dtype == torch.float32
    assert module.alpha.item() == pytest.approx(1.003, abs=5e-5)
    assert nn.Entmax(1.001, learned=True).log_excess is not None


def test_a_number_per_head_may_be_fixed():
    query, key, value = (torch.randn(1, 2, 5, 8) for _ in range(3))
    for module, alone in (
        (nn.Entmax(torch.tensor([1.2, 1.7])), nn.Entmax), (nn.Sigmoid(torch.tensor([-1.0, 0.5])), nn.Sigmoid),
        (nn.ScalableSoftmax(torch.tensor([0.5, 2.0])), nn.ScalableSoftmax),
    ):  # fmt: skip
        assert not list(module.parameters())
        assert "fixed" in module.state_dict()
        output, _ = attemper.attention(query, key, value, normalizer=module)
        for head, number in enumerate(module.state_dict()["fixed"].tolist()):
            one = [tensor[:, head : head + 1] for tensor in (query, key, value)]
            want, _ = attemper.attention(one[0], one[1], one[2], normalizer=alone(number))
            assert torch.allclose(output[:, head : head + 1], want, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sigmoid(float("nan")),
            r"Sigmoid\(bias=...\) must be a finite number or a tensor \[heads\], got nan",
        ),
        (lambda: nn.ScalableSoftmax(float("inf")), "must be a finite number"),
        (lambda: nn.Sink(initial=float("nan")), "must be a finite number"),
        (lambda: nn.Entmax(True), "must be a finite number of at least 1"),
        (lambda: nn.Entmax("a"), "must be a finite number of at least 1"),  # pyright: ignore[reportArgumentType]
        (lambda: nn.Entmax(1.5, num_heads=3), r"num_heads=3\) needs learned=True"),
        (lambda: nn.Entmax(torch.tensor([1.5, 0.5])), "must be a finite number of at least 1"),
        (lambda: nn.Sigmoid(torch.zeros(2, 2)), r"a floating tensor \[heads\] of finite numbers"),
    ],
)
def test_numbers_are_checked_when_a_module_is_made(make: Any, message: str):
    with pytest.raises(InputError, match=message):
        make()
