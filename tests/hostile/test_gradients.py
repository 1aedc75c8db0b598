"""Hostile inputs, table "Gradients": infinities beside numbers, second derivatives, odd layouts, checkpointing."""

import gc
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attemper
from attemper import BackendError
from attemper import functional as F
from tests.support.calls import PRESENT, attended, had, skip_without

pytestmark = [pytest.mark.each, pytest.mark.hostile, pytest.mark.usefixtures("poisoned_empty")]

SMOOTH = (
    "lse", "entropy", "normalized_entropy", "effective_tokens", "max_weight", "max_logit", "mean_logit",
    "logit_variance", "mass", "first_token_mass", "entropy_with_sink", "mean_distance", "gini",
    "score_variance", "self_weight", "span_mass",
)  # fmt: skip

AT = {"spans": [(0, 0)], "window_size": (9, 9)}
"""What self_weight and span_mass want of one query."""
ROWS = {
    "[0, 0, -inf]": torch.tensor([0.0, 0.0, -math.inf]),
    "[100, 0, -200]": torch.tensor([100.0, 0.0, -200.0]),
    "[65504, -65504] in float16": torch.tensor([65504.0, -65504.0], dtype=torch.float16),
    "[1e4, 0, -1e4]": torch.tensor([1e4, 0.0, -1e4]),
    "[-inf, -inf]": torch.tensor([-math.inf, -math.inf]),
    "[1e38, -1e38]": torch.tensor([1e38, -1e38]),
}
BEYOND = ("[65504, -65504] in float16", "[1e38, -1e38]")


@pytest.mark.quick("reference", "blocked", "native")
@pytest.mark.parametrize("through", ["bias", "products"])
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.turns(2)
def test_gradients_of_every_statistic_of_extreme_rows_are_finite(row: str, through: str, backend: str):
    scores = ROWS[row]
    hidden = torch.isinf(scores)
    dtype = scores.dtype
    # The product of a query of 1 and a key is the score; what is hidden is hidden by a mask.
    as_bias = through == "bias"
    query = torch.full((1, 1, 1, 1), 0.0 if as_bias else 1.0, dtype=dtype, requires_grad=True)
    key = (torch.zeros_like(scores) if as_bias else scores.masked_fill(hidden, 0.0))[None, None, :, None].clone()
    bias = scores.clone() if as_bias else torch.zeros_like(scores).masked_fill(hidden, -math.inf)
    leaves = [query, key.requires_grad_(), bias.requires_grad_()]
    value = torch.randn(1, 1, len(scores), 2).to(dtype)
    for name in had(backend, SMOOTH):
        if name == "score_variance" and row in BEYOND:
            continue  # of scores s and -s it moves by 2 s^2, which is beyond their type
        output, stats = attended(backend, leaves[0], leaves[1], value, leaves[2], scale=1.0, stats=(name,), **AT)
        if name == "mass" and not stats.mass.requires_grad:
            continue  # without a sink it is a constant
        loss = stats[name].sum() + (output.float().sum() if name == "entropy" else 0)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        for grad, place in zip(grads, ("query", "key", "bias"), strict=True):
            assert grad is None or torch.isfinite(grad).all(), f"d{name}/d{place} = {grad}"
        if name == "entropy":
            assert grads[2] is not None
            assert torch.isfinite(stats.entropy).all()
            if row == "[0, 0, -inf]":
                torch.testing.assert_close(stats.entropy.item(), math.log(2), rtol=2e-7, atol=0)
                _, again = attended(backend, query, key, value, bias, scale=1.0, stats=(name,))
                (bias_grad,) = torch.autograd.grad(again.entropy.sum(), bias)
                assert bias_grad.abs().max() <= 1e-7


MEASURES = {
    "entropy": F.entropy, "logit_variance": F.logit_variance, "softmax": lambda s: F.softmax(s).square().sum(-1),
    "statistics": lambda s: sum(part for part in F.statistics(s) if part.requires_grad and not torch.isinf(part).any()),
    "softmax_jacobian": lambda s: F.softmax_jacobian(s).square().sum(),
    "entropy_of the softmax": lambda s: F.entropy_of(F.softmax(s)),
    "gini of the softmax": lambda s: F.gini(F.softmax(s)),
    "effective tokens of the softmax": lambda s: F.effective_tokens(F.softmax(s)),
    "max weight of the softmax": lambda s: F.max_weight(F.softmax(s)),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.turns(2)
def test_first_and_second_derivatives_of_measures_of_extreme_rows_are_finite(measure: str, row: str):
    scores = ROWS[row].clone().requires_grad_()
    (first,) = torch.autograd.grad(MEASURES[measure](scores).sum(), scores, create_graph=True)
    assert torch.isfinite(first).all(), f"first derivative {first}"
    if measure == "entropy" and row == "[0, 0, -inf]":
        assert torch.equal(first, torch.zeros(3))
    if first.requires_grad:
        (second,) = torch.autograd.grad(first.float().square().sum(), scores)
        assert torch.isfinite(second).all(), f"second derivative {second}"


def test_second_derivatives_are_right_on_the_reference(full_size: bool):
    key, value = (torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(4, 5) < 0.6
    mask[1] = False
    sink = torch.randn(2, dtype=torch.float64)

    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        output, stats = attemper.attention(
            query, key, value, mask, softcap=8.0, sink_logits=sink, backend="reference",
            stats=("entropy", "logit_variance", "mass"),
        )  # fmt: skip
        assert stats is not None
        return output, stats.entropy, stats.logit_variance, stats.mass

    leaves = [torch.randn(1, 2, 4, 3, dtype=torch.float64), key, value]
    assert torch.autograd.gradgradcheck(call, [leaf.requires_grad_() for leaf in leaves], fast_mode=not full_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_are_refused_by_blocked_and_the_message_names_a_backend_that_has_them(dtype: torch.dtype):
    # A warning and a wrong number would not do; warnings are errors here, but not of this class.
    query = torch.randn(1, 2, 3, 4, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(1, 2, 5, 4, dtype=dtype) for _ in range(2))
    output, stats = attemper.attention(query, key, value, is_causal=True, stats=("entropy",), backend="blocked")
    assert stats is not None
    with pytest.raises((BackendError, RuntimeError), match="reference"):
        torch.autograd.grad(stats.entropy.sum() + output.sum(), query, create_graph=True)[0].square().sum().backward()


UPSTREAM = {
    "expanded": lambda output: torch.ones(()).expand(output.shape),
    "transposed": lambda output: torch.randn(output.mT.shape).mT,
    "strided": lambda output: torch.randn(*output.shape[:-1], output.shape[-1] * 2)[..., ::2],
}


@pytest.mark.parametrize("how", UPSTREAM)
def test_an_upstream_gradient_of_any_layout_works(how: str, backend: str):
    leaves = [torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
    output, stats = attended(backend, *leaves, stats=("entropy",))
    above = UPSTREAM[how](output)
    spread = torch.ones(1).expand(stats.entropy.shape)
    got = torch.autograd.grad([output, stats.entropy], leaves, [above, spread], retain_graph=True)
    want = torch.autograd.grad(
        [output, stats.entropy], leaves, [above.contiguous().clone(), spread.contiguous().clone()]
    )
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpointing_gives_the_same_gradient(reentrant: bool, dropout_p: float, backend: str):
    if dropout_p:
        skip_without(backend, "dropout")
    leaves = [torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3)]

    def layer(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output, stats = attended(backend, query, key, value, None, dropout_p, True, stats=("entropy",))
        return output, stats.entropy

    grads = []
    for run in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=reentrant)):
        torch.manual_seed(5)
        output, entropy = run(*leaves)
        (output.square().sum() + entropy.square().sum()).backward()
        grads.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.quick("blocked")
def test_accumulated_gradients_add_up_and_nothing_stays_behind(backend: str, full_size: bool):
    leaves = [torch.randn(1, 2, 4, 4, requires_grad=True) for _ in range(3)]

    def step() -> None:
        output, stats = attended(backend, *leaves)
        (output.sum() + stats.entropy.sum()).backward()

    step()
    once = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    alive = []
    steps = {"blocked": 1000, "triton": 20}.get(backend, 200) if full_size else 15 if backend == "triton" else 60
    for number in range(steps):
        step()
        if number in (9, steps - 1):
            gc.collect()
            alive.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    # Fewer is right: what an earlier test left may go in the meantime.
    assert alive[1] <= alive[0], f"{alive[1] - alive[0]} tensors more after {steps} steps"
    for leaf, grad in zip(leaves, once, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, grad * steps, rtol=1e-4, atol=1e-4)


DDP = """
import os, sys
import torch
from torch import distributed
import attemper

class Layer(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.backend = backend
        self.project, self.unused = torch.nn.Linear(8, 24), torch.nn.Linear(2, 2)

    def forward(self, x):
        query, key, value = self.project(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        output, stats = attemper.attention(query, key, value, stats=("entropy",), backend=self.backend)
        return output, stats.entropy

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
for backend in sys.argv[1:]:
    layer, x, grads = Layer(backend), torch.randn(2, 5, 8), []
    for model in (layer, torch.nn.parallel.DistributedDataParallel(layer, find_unused_parameters=True)):
        layer.zero_grad()
        output, entropy = model(x)
        (output.sum() + entropy.sum()).backward()
        grads.append(layer.project.weight.grad.clone())
    print(backend, "equal" if torch.equal(*grads) and grads[0].abs().sum() > 0 else grads, flush=True)
os._exit(0)  # gloo's threads may outlive the session
"""


@pytest.mark.slow("trains in a process of its own")
def test_under_ddp_with_find_unused_parameters_the_gradient_is_the_same():
    # In a process of its own: the threads of a process group have been seen to keep pytest from ending.
    command = [sys.executable, "-c", DDP, *PRESENT]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.stdout.splitlines() == [f"{backend} equal" for backend in PRESENT], run.stdout + run.stderr
