"""sigma_reparam_: spectral norms of every layout, what training does to them, and what must not change."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import attemper
from attemper import InputError, sigma_reparam_
from attemper.control.query_key_weights import LinearWeight, linear_weights
from attemper.control.sigma_reparam import SpectralScale
from attemper.types import SigmaReparam
from tests.control.models import BUILD, built
from tests.monitor.tiny_models import TINY

TIED = ("gpt2", "bloom", "gemma2")
"""Their output layers are their embeddings."""


def first_output(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output[0]


def scales(model: nn.Module) -> list[SpectralScale]:
    return [module for module in model.modules() if isinstance(module, SpectralScale)]


def matrix_of(weight: LinearWeight) -> torch.Tensor:
    tensor = weight.tensor.detach().double()
    return tensor if weight.dim == 0 else tensor.t()


def norms(weight: LinearWeight) -> torch.Tensor:
    """The spectral norm of each part, by SVD in float64."""
    matrix = matrix_of(weight)
    return torch.stack([torch.linalg.matrix_norm(matrix[weight.block_of == b], 2) for b in range(weight.blocks)])


def moved(handle: SigmaReparam, model: nn.Module, seed: int = 0) -> None:
    """Every parameter another way, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


@pytest.mark.parametrize("which", ["qk", "attention", "all"])
@pytest.mark.parametrize("name", BUILD)
@pytest.mark.quick("gpt2", "llama-qk", "bert-all", "MultiheadAttention-attention", "deepseek_v3-qk")
@pytest.mark.turns(2)
def test_every_layout_starts_as_it_was_and_comes_back_to_the_bit(name: str, which: str):
    model, batch = built(name)
    if name in TIED and which == "all":
        with pytest.raises(InputError, match=r"weight is tied: the same parameter is .* Choose which='attention'"):
            sigma_reparam_(model, which=which)
        assert not scales(model)
        return
    before, weights = first_output(model, batch), copy.deepcopy(model.state_dict())
    handle = sigma_reparam_(model, which=which)
    assert len(scales(model)) == len(handle.names) > 0
    for training in (False, True):  # the model's own dropout stays off
        for scale in scales(model):
            scale.train(training)
        assert torch.equal(first_output(model, batch), before)
    handle.remove()
    handle.remove()
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    assert not model._forward_pre_hooks
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(weights[key], now) for key, now in model.state_dict().items())


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.quick("gpt2", "llama", "bloom", "bert", "MultiheadAttention")
@pytest.mark.turns(2)
def test_each_part_has_the_norm_gamma_by_svd(name: str):
    model, batch = built(name)
    weights = linear_weights(model, "qk", None)
    before = [norms(weight) for weight in weights]
    rest = [matrix_of(weight)[weight.block_of == weight.blocks] for weight in weights]
    sigma_reparam_(model, which="qk", gamma=1.0)
    for weight, old, left in zip(weights, before, rest, strict=True):
        assert weight.blocks in (1, 2)
        # From below: power iteration has not met the largest singular value to the last digit.
        torch.testing.assert_close(norms(weight), torch.ones_like(old), rtol=5e-3, atol=0)
        assert torch.equal(matrix_of(weight)[weight.block_of == weight.blocks], left)
    first_output(model, batch).sum().backward()
    assert all(torch.isfinite(scale.gamma.grad).all() for scale in scales(model) if scale.gamma.grad is not None)
    assert any(scale.gamma.grad is not None for scale in scales(model))


def test_all_linear_layers_and_those_of_attention():
    model, _ = built("bert")
    every = {w.name for w in linear_weights(model, "all", None)}
    assert every == {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    attention = {w.name for w in linear_weights(model, "attention", None)}
    assert attention == {name for name in every if ".attention." in name}
    assert "encoder.layer.0.attention.output.dense.weight" in attention
    pair = {w.name for w in linear_weights(model, "qk", None)}
    assert pair == {name for name in every if ".self.query." in name or ".self.key." in name}
    one = sigma_reparam_(model, which="qk", sites=["encoder.layer.1"])
    assert one.names == tuple(f"encoder.layer.1.attention.self.{n}.weight" for n in ("query", "key"))
    packed = linear_weights(built("nn.MultiheadAttention")[0], "all", None)
    assert [(w.name, w.blocks) for w in packed] == [("attention.in_proj_weight", 3), ("attention.out_proj.weight", 1)]
    assert [w.blocks for w in linear_weights(built("gpt-neox")[0], "attention", None)] == [3, 1] * 2


def test_the_gradient_is_that_of_the_formula():
    torch.manual_seed(1)
    layer = nn.Linear(7, 5, bias=False).double()
    weight = layer.weight.detach().clone()
    sigma_reparam_(layer, gamma=0.7)
    (scale,) = scales(layer)
    x, up = torch.randn(3, 7).double(), torch.randn(3, 5).double()
    (layer(x) * up).sum().backward()
    # dL/dW with u and v constant: gamma / sigma (G - <G, W> u v^T / sigma), G = up^T x
    u, v = scale.u, scale.v
    sigma = (u.t() @ weight @ v.t()).item()
    outer = up.t() @ x
    wanted = 0.7 / sigma * (outer - (outer * weight).sum() * (u @ v) / sigma)
    torch.testing.assert_close(layer.parametrizations.weight.original.grad, wanted, rtol=1e-12, atol=1e-12)  # type: ignore
    torch.testing.assert_close(scale.gamma.grad, ((outer * weight).sum() / sigma)[None], rtol=1e-12, atol=1e-12)
    # At the singular vectors it is the derivative of the exact norm, too.
    exact = weight.clone().requires_grad_()
    ((x @ (0.7 * exact / torch.linalg.matrix_norm(exact, 2)).t()) * up).sum().backward()
    torch.testing.assert_close(exact.grad, wanted, rtol=1e-3, atol=1e-3)


def test_power_iteration_follows_the_weights_one_step_for_each_change():
    model, batch = built("nn.MultiheadAttention")
    handle = sigma_reparam_(model, which="qk", gamma=1.0)
    (scale,) = scales(model)
    moved(handle, model)
    start = scale.u.clone()
    model.eval()
    first_output(model, batch)
    assert torch.equal(scale.u, start)
    model.train()
    first_output(model, batch)
    first = scale.u.clone()
    assert not torch.equal(first, start)
    first_output(model, batch)
    with torch.no_grad():
        first_output(model, batch)
    assert torch.equal(scale.u, first)
    for _ in range(60):
        with torch.no_grad():  # the same weights, a new version of them
            model.attention.parametrizations.in_proj_weight.original.add_(0.0)  # type: ignore
        first_output(model, batch)
    weight = linear_weights(model, "qk", None)[0]
    gain = scale.gamma.detach().double()
    torch.testing.assert_close(norms(weight), gain, rtol=1e-3, atol=0)


class Deep(nn.Module):
    """Blocks of attention under a kind of checkpointing."""

    def __init__(self, kind: str = "none") -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.kind == "none" else checkpoint(layer, x, use_reentrant=self.kind == "reentrant")  # type: ignore
        return x


def trained(model: Deep, steps: int = 3, forward: Any = None) -> dict[str, torch.Tensor]:
    """The state after some steps, each of two passes before one backward pass."""
    forward = model if forward is None else forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        inputs = [torch.randn(2, 6, 16, generator=generator).double().requires_grad_() for _ in range(2)]
        sum(forward(x).square().sum() * 0.01 for x in inputs).backward()  # type: ignore
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def touched(model: nn.Module) -> None:
    """A new version of each weight, with the same values."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.0)


def made(kind: str = "none") -> Deep:
    torch.manual_seed(0)
    model = Deep(kind).double()
    sigma_reparam_(model)
    return model


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_checkpointing_changes_nothing(kind: str):
    plain, other = trained(made()), trained(made(kind))
    assert plain.keys() == other.keys()
    for name in plain:
        torch.testing.assert_close(other[name], plain[name], rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", ["none", "non-reentrant"])
@pytest.mark.slow("takes many seconds")
def test_compiled_it_is_one_graph_with_the_same_steps(kind: str):
    one = partial(_one_pass, steps=3)
    plain = one(made())
    model = made(kind)
    other = one(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    for name in plain:
        torch.testing.assert_close(other[name], plain[name], rtol=1e-10, atol=1e-11, msg=name)


def _one_pass(model: Deep, forward: Any = None, steps: int = 3) -> dict[str, torch.Tensor]:
    forward = model if forward is None else forward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(5)
    touched(model)  # eager code takes the weights as it found them as seen; compiled code takes a step there, too
    for _ in range(steps):
        forward(torch.randn(2, 6, 16, generator=generator).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_copies_and_checkpoints_go_on_with_the_same_numbers():
    model = made()
    trained(model)
    copied, loaded = copy.deepcopy(model), made()
    loaded.load_state_dict(model.state_dict())
    x = torch.randn(2, 6, 16).double()
    assert any(name.endswith("parametrizations.in_proj_weight.0.u") for name in model.state_dict())
    for other in (copied, loaded):
        assert torch.equal(other.eval()(x), model.eval()(x))
    expected = trained(model.train())
    for other in (copied, loaded):
        found = trained(other.train())
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert copied.layers[0] is not model.layers[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_half_precision_weights_keep_their_norms_in_float32(dtype: torch.dtype):
    torch.manual_seed(0)
    model = Deep()
    sigma_reparam_(model)
    layer = model.layers[0].linear1
    with torch.autocast("cpu", dtype):
        assert layer.weight.dtype == torch.float32  # type: ignore
        inside = layer.weight.detach().clone()  # type: ignore
        model(torch.randn(2, 6, 16)).float().sum().backward()
    assert torch.equal(inside, layer.weight)  # type: ignore
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    torch.manual_seed(0)
    half = Deep().to(dtype)
    before = copy.deepcopy(half.state_dict())
    handle = sigma_reparam_(half)
    assert half.layers[0].linear1.weight.dtype == dtype  # type: ignore
    handle.remove()
    assert all(torch.equal(before[name], now) for name, now in half.state_dict().items())


def test_under_data_parallel_training_processes_agree_with_a_single_one(tmp_path: Any):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain, model = made(), made()
        touched(plain)  # wrapping writes the main process's weights into all
        plain = trained(plain)
        found = trained(model, forward=nn.parallel.DistributedDataParallel(model))
    finally:
        dist.destroy_process_group()
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-11, atol=1e-12, msg=name)


def refused(model: nn.Module, message: str, **options: Any) -> None:
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(InputError, match=message):
        sigma_reparam_(model, **options)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


def test_mistakes_are_told_and_nothing_is_changed():
    model = TINY["llama"].build()
    refused(model, r"sigma_reparam_\(which=...\) must be one of 'all', 'attention', 'qk'; got 'v'", which="v")
    refused(model, r"gamma=...\) must be finite and above 0, got 0.0. The paper starts at 1", gamma=0.0)
    refused(model, "matches no module", sites=["nothing"])
    refused(nn.Sequential(nn.Linear(2, 2)), "finds no attention whose query and key", which="qk")
    compiled: Any = torch.compile(Deep(), backend="eager")
    refused(compiled, "is a OptimizedModule around the model: apply it to the model first")
    handle = sigma_reparam_(model, which="qk")
    refused(model, r"q_proj.weight is parametrised already. Remove that first")
    handle.remove()
    zero = nn.Linear(3, 3)
    nn.init.zeros_(zero.weight)
    refused(zero, r"weight has a spectral norm of \[0.0\]; it must be finite and above 0")
    refused(nn.Linear(3, 3, device="meta"), "must be floating and have values, got torch.float32 on meta")
    refused(nn.Sequential(nn.LazyLinear(3)), "0.weight has no values yet: call the model once")
    refused(_weight_hook(), "is not a parameter but Tensor")

    class OwnAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 24)

    refused(OwnAttention(), "OwnAttention: the layout of its query and key projections is not known", which="attention")
    assert sigma_reparam_(OwnAttention()).names == ("mix.weight",)
    refused(built("gpt2")[0], "lm_head.weight is tied: the same parameter is lm_head.weight and transformer.wte")


def _weight_hook() -> nn.Module:
    """A weight that something else computes before each pass, as torch's older weight_norm does."""
    layer = nn.Linear(3, 3)
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight  # type: ignore
    return layer


def test_qk_clip_refuses_weights_that_are_computed():
    model, batch = built("llama")
    sigma_reparam_(model, which="qk")
    with attemper.QKClip(model, 1e-6) as clip:
        model(**batch)
        with pytest.raises(InputError, match=r"the weights of model\.layers\.0\.self_attn are parametrised"):
            clip.step()
