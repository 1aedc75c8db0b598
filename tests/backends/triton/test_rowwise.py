"""The Triton kernels of rowwise normalizers: results, statistics and gradients against the reference.

What float32 may lose is measured: by ``blocked`` in float32, and by what the rounding of scores alone does to the
reference, which near a threshold is more than the rounding of results.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper import nn
from attemper.backends.contract import Problem, Upstream
from attemper.backends.triton.rowwise import launch
from attemper.call.normalizer import Normalization
from attemper.statistics import ROWWISE_BASE, ROWWISE_ONE_PASS

pytestmark = [pytest.mark.each, pytest.mark.usefixtures("poisoned_empty")]

UNIT = 2.0**-24
NAMES = (*ROWWISE_ONE_PASS, "mean_distance")
WHOLE = ("visible_keys", "support_size")
PER_HEAD = {"entmax": (1.2, 1.9), "entmax near 1": (1 + 1e-5, 1.0), "sigmoid": (-1.0, 0.5)}
NORMALIZERS: dict[str, Any] = {
    "sparsemax": "sparsemax", "entmax15": "entmax15", "entmax": None, "entmax near 1": None, "sigmoid": None,
    "topk": nn.TopK(4), "threshold": nn.Threshold(0.06),
}  # fmt: skip


def call_of(
    heads: int = 2, groups: int = 1, rows: int = 7, keys: int = 13, size: int = 5, **more: Any
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows * keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    call = {"query": 2 * normal(1, heads, rows, size), "key": normal(1, groups, keys, size)}
    return call | {"value": normal(1, groups, keys, 3), "enable_gqa": groups != heads, **more}


def computed(
    call: dict[str, Any], chosen: str, names: tuple[str, ...], backend: str, dtype: torch.dtype,
    function: Any = attemper.attention, gradients: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Output, statistics, and the gradient of every floating tensor, with numbers drawn once from above."""
    leaves = {
        name: value.detach()
        .to(dtype if name != "attn_mask" or dtype == torch.float64 else value.dtype)
        .requires_grad_(gradients)
        if isinstance(value, Tensor) and value.dtype.is_floating_point
        else value
        for name, value in call.items()
    }
    number = leaves.pop("number", None)
    normalizer = (
        NORMALIZERS.get(chosen, chosen) if number is None else Normalization(chosen.split()[0], per_head=number)
    )
    if "rows" in leaves:
        leaves["generator"] = torch.Generator().manual_seed(3)
    result = function(**leaves, normalizer=normalizer, stats=names, backend=backend)
    stats = getattr(result, "stats", result)
    results = {name: stats[name] for name in names}
    if hasattr(result, "output"):
        results["output"] = result.output
    if not gradients:
        return results
    generator = torch.Generator().manual_seed(1)
    above = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        for name, value in results.items()
        if value.requires_grad
    }
    wanted = {name: value for name, value in leaves.items() if isinstance(value, Tensor) and value.requires_grad}
    if number is not None:
        wanted["number"] = number
    grads = torch.autograd.grad(
        [results[name] for name in above], list(wanted.values()), list(above.values()),
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    return {name: value.detach() for name, value in results.items()} | {
        f"d{name}": gradient for name, gradient in zip(wanted, grads, strict=True)
    }


def with_number(call: dict[str, Any], chosen: str) -> dict[str, Any]:
    return call | ({"number": torch.tensor(PER_HEAD[chosen])} if chosen in PER_HEAD else {})


def assert_agrees(
    call: dict[str, Any], chosen: str, names: tuple[str, ...] = NAMES, function: Any = attemper.attention,
    gradients: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    """Every result within twice the error of blocked, twice what scores of some four roundings cause in the reference,
    and 8 roundings of its own."""
    call = with_number(call, chosen)
    how = {"chosen": chosen, "names": names, "function": function, "gradients": gradients}
    truth = computed(call, backend="reference", dtype=torch.float64, **how)
    blocked = computed(call, backend="blocked", dtype=torch.float32, **how)
    moved = []
    for _ in range(4):
        noise = 1 + 4 * UNIT * (2 * torch.rand(call["query"].shape, dtype=torch.float64) - 1)
        given = call | {"query": call["query"].double() * noise}
        moved.append(computed(given, backend="reference", dtype=torch.float64, **how))
    got = computed(call, backend="triton", dtype=torch.float32, **how)
    for name, value in got.items():
        want = truth[name].double()
        if name in WHOLE:
            assert torch.equal(value, truth[name]), name
            continue
        infinite = torch.isinf(want)
        assert torch.equal(torch.isinf(value) & (value < 0), infinite), name
        assert torch.isfinite(value[~infinite]).all(), name
        error, yardstick, *rounding = (
            (other.double() - want)[~infinite].abs().max()
            for other in (value, blocked[name], *(one[name] for one in moved))
        )
        budget = 2 * yardstick + 2 * max(rounding) + 8 * UNIT * want[~infinite].abs().max()
        assert error <= budget, f"{name}: error {error:.2e}, budget {budget:.2e}"
    return got


BOTTOM_RIGHT = {"is_causal": True, "causal_alignment": "bottom-right"}


def features() -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    some = torch.rand(1, 2, 7, 13) < 0.7
    some[:, :, 2] = False
    bias = torch.randn(1, 2, 7, 13)
    bias[..., 3::5] = -torch.inf
    bias[..., 4] = -1e4
    padding = (torch.arange(13) < 9)[None, None, None]
    return {
        "plain": {},
        "causal": BOTTOM_RIGHT,
        "bool mask with empty rows": {"attn_mask": some},
        "bias, softcap, temperature": {"attn_mask": bias, "softcap": 9.0, "temperature": torch.rand(1, 2, 7) + 0.5},
        "window, padding, first tokens": {
            "window_size": (4, 3), "attn_mask": padding, "is_causal": True, "first_tokens": 2
        },
        "more rows than keys": {"rows": 9, "keys": 6, "is_causal": True},
        "empty rows by alignment": {"rows": 9, "keys": 6, **BOTTOM_RIGHT},
        "one query": {"rows": 1, "keys": 29},
    }  # fmt: skip


FEATURES = features()


MORE = pytest.mark.long("more cases in Triton's interpreter")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("chosen", NORMALIZERS)
@pytest.mark.quick("topk-window", "entmax-bias")
def test_every_normalizer_agrees_with_the_reference(chosen: str, feature: str, tiled):
    tiled(4, 8)
    assert_agrees(call_of(**FEATURES[feature]), chosen)


@pytest.mark.parametrize("chosen", NORMALIZERS)
@pytest.mark.quick("entmax15", "sigmoid")
def test_output_alone_agrees(chosen: str, tiled):
    tiled(8, 4)
    assert_agrees(call_of(**BOTTOM_RIGHT), chosen, names=())


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WHOLE])
@pytest.mark.parametrize("chosen", ["entmax15", "sigmoid"])
@pytest.mark.quick("sigmoid-entropy", "sigmoid-max_weight", "sigmoid-mean_distance")
def test_a_statistic_alone_agrees_without_values(chosen: str, name: str, tiled):
    tiled(8, 8)
    call = call_of(**BOTTOM_RIGHT)
    del call["value"]
    # A mass that is always 1 has no gradient but 0.
    assert_agrees(call, chosen, (name,), attemper.attention_statistics)


@pytest.mark.parametrize("chosen", ["sparsemax", "entmax", "topk"])
@pytest.mark.parametrize("gradients", [False, True], ids=["gathered", "picked"])
@pytest.mark.quick("gathered-topk")
def test_sampled_rows_agree(gradients: bool, chosen: str, tiled):
    tiled(4, 8)
    call = call_of(rows=23, keys=19, is_causal=True) | {"rows": 5}
    del call["value"]
    assert_agrees(call, chosen, NAMES, attemper.attention_statistics, gradients)


@pytest.mark.slow("takes seconds in Triton's interpreter")
@pytest.mark.parametrize("chosen", ["entmax15", "threshold", "sigmoid"])
@pytest.mark.quick("entmax15")
def test_packed_documents_agree(chosen: str, tiled):
    tiled(4, 4)
    call = {
        "query": 2 * torch.randn(17, 2, 5), "key": torch.randn(15, 1, 5), "value": torch.randn(15, 1, 3),
        "cu_seqlens_q": torch.tensor([0, 4, 9, 9, 17]), "cu_seqlens_k": torch.tensor([0, 6, 6, 8, 15]),
        "enable_gqa": True, **BOTTOM_RIGHT,
    }  # fmt: skip
    assert_agrees(call, chosen, ("entropy", "logit_variance", "first_token_mass"), attemper.varlen_attention)


@pytest.mark.parametrize("shape", [(1, 1, 9), (2, 1, 1), (1, 4, 1), (2, 4, 9)], ids=str)
@MORE
def test_the_gradient_of_a_bias_is_summed_over_what_it_was_broadcast_over(shape: tuple[int, ...], tiled):
    tiled(4, 8)
    call = call_of(heads=4, groups=2, rows=9, keys=11, is_causal=True)
    call |= {name: call[name].expand(2, -1, -1, -1) * torch.tensor([1.0, 0.6])[:, None, None, None] for name in ("query", "key")}  # fmt: skip
    call |= {"value": call["value"].expand(2, -1, -1, -1), "attn_mask": torch.randn(*shape, 11)}
    assert_agrees(call, "entmax15", ("entropy", "max_weight"))


def differentiated(call: dict[str, Any], normalizer: Any, backend: str) -> tuple[Any, tuple[Tensor, ...]]:
    """Output and statistics, and the gradients of sum output^2 for query, key and value."""
    leaves = {name: call[name].detach().requires_grad_() for name in ("query", "key", "value")}
    options = {"normalizer": normalizer, "stats": ("entropy", "support_size", "mean_logit"), "backend": backend}
    result = attemper.attention(**call | leaves, **options)
    output = result.output.float() if backend == "triton" else result.output
    return result, torch.autograd.grad(output.square().sum(), list(leaves.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("chosen", ["sparsemax", "entmax", "topk", "sigmoid"])
@pytest.mark.turns(2)
def test_half_precision_agrees_but_for_the_rounding_of_weights_and_results(chosen: str, dtype: torch.dtype, tiled):
    tiled(8, 8)
    number = {"entmax": torch.tensor([1.2, 1.7]), "sigmoid": torch.tensor([-1.0, 0.5])}.get(chosen)
    normalizer = NORMALIZERS.get(chosen, chosen) if number is None else Normalization(chosen, per_head=number)
    call = call_of(**BOTTOM_RIGHT)
    tensors = {name: call[name].to(dtype) for name in ("query", "key", "value")}
    got, grads = differentiated(call | tensors, normalizer, "triton")
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    want, right = differentiated(call | exact, normalizer, "reference")
    assert got.output.dtype == dtype
    # Weights and results are rounded to the type.
    unit = torch.finfo(dtype).eps / 2
    assert (got.output.double() - want.output).abs().max() <= 2 * unit * want.output.abs().max().clamp(min=3)
    assert torch.equal(got.stats.support_size, want.stats.support_size)
    for name in ("entropy", "mean_logit"):
        error = (got.stats[name].double() - want.stats[name]).abs().max()
        assert error <= 2e-6 * want.stats[name].abs().max().clamp(min=1), name
    for gradient, truth in zip(grads, right, strict=True):
        assert gradient.dtype == dtype
        assert (gradient.double() - truth).abs().max() <= 8 * unit * truth.abs().max()


@pytest.mark.parametrize("chosen", ["sparsemax", "topk"])
def test_blocks_without_support_are_not_multiplied_with_values_nor_visited_in_the_backward_pass(chosen: str):
    """One key of each row stands out by more than 1; what has no weight is never read, and NaN there shows it."""
    query, key = torch.ones(1, 1, 8, 1), torch.zeros(1, 1, 40, 1)
    key[0, 0, 13] = 3.0
    value = torch.full((1, 1, 40, 2), torch.nan)
    value[:, :, 8:16] = 1.5
    problem = Problem(
        query, key, value, None, torch.ones(1, 1, 1), columns=ROWWISE_BASE, normalizer=chosen, number=1.0, tile_rows=4,
        tile_keys=8,
    )  # fmt: skip
    output, state, _ = launch.forward(problem)
    assert (output == 1.5).all()
    upstream = Upstream(torch.ones_like(output), torch.zeros_like(state), state.new_empty(0))
    call = launch._Backward(problem, state, upstream)
    call.of_rows(True, True, False)
    assert call.marks[:, :5].tolist() == [[0, 1, 0, 0, 0]] * 2
    _, value_grad = call.of_keys(True, True)
    assert value_grad is not None
    assert value_grad[0, 0, :, 0].nonzero().tolist() == [[13]]
    assert value_grad[0, 0, 13, 0] == 8.0
