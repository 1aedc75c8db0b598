"""The native kernels against the float64 oracle, case by case, and what only they promise: threads, forks, layouts."""

import multiprocessing
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attemper
from attemper._backends import BACKENDS
from attemper.errors import BackendError
from attemper.kernels.problem import Problem
from tests import agreement, cases
from tests.calls import attended

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    pytest.mark.skipif(
        any(backend.name == "native" and backend.missing for backend in BACKENDS),
        reason="native is not built: python scripts/build_native.py",
    ),
]

TAKEN = [
    case for case in (*cases.CASES, *cases.RAGGED) if case.dtype != torch.float64 and max(case.size, case.width) <= 256
]
LONG = (
    cases.Case("blocks and chunks", batch=1, heads=2, groups=1, rows=430, keys=700, size=40, width=24),
    cases.Case("blocks, ascending", batch=1, heads=2, groups=2, rows=70, keys=600, ascending=True, spread=8.0),
    cases.Case("blocks, causal", batch=1, heads=2, groups=2, rows=600, keys=600, options={"is_causal": True}),
    cases.Case("blocks, window", batch=1, heads=1, groups=1, rows=300, keys=900, options={"window_size": (40, 300)}),
    cases.Case("splits", batch=1, heads=4, groups=2, rows=1, keys=2500, ascending=True),
    cases.Case("splits, padding", batch=2, heads=4, groups=4, rows=3, keys=1100,
               make=lambda case: {"attn_mask": (torch.arange(case.keys) < 1050)[None, None, None]}),
)  # fmt: skip


@pytest.mark.parametrize("case", TAKEN + list(LONG), ids=[case.name for case in TAKEN + list(LONG)])
def test_native_agrees_with_the_oracle(case: cases.Case):
    agreement.assert_agreement(replace(case, names=cases.MERGED), "native")


def everything(threads: int, rows: int = 500) -> list[Tensor]:
    """Output, statistics and gradients of one call, on so many threads."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    leaves = [torch.randn(2, 3, n, 32, requires_grad=True) for n in (rows, 700, 700)]
    bias = torch.randn(1, 3, rows, 700, requires_grad=True)
    temperature = (torch.rand(3, 1) + 0.5).requires_grad_()
    sink = torch.randn(3, requires_grad=True)
    leaves += [bias, temperature, sink]
    result = attended("native", *leaves[:3], bias, temperature=temperature, sink_logits=sink)
    (result.output.square().sum() + result.stats.entropy.sum() + result.stats.max_logit.sum()).backward()
    grads = [leaf.grad for leaf in leaves]
    assert None not in grads
    return [result.output.detach(), *(result.stats[name].detach() for name in result.stats), *grads]  # pyright: ignore


@pytest.mark.parametrize("rows", [500, 2])
def test_results_are_bitwise_equal_over_threads_and_repeats(rows: int):
    before = torch.get_num_threads()
    try:
        want = everything(1, rows)
        for threads in (1, 2, 4, 2, 4):
            assert all(torch.equal(a, b) for a, b in zip(want, everything(threads, rows), strict=True)), threads
    finally:
        torch.set_num_threads(before)


def test_calls_from_several_threads_at_once_are_right():
    query = torch.randn(1, 4, 300, 16)
    want = attended("native", query, query, query)
    wrong = []

    def again() -> None:
        torch.set_num_threads(2)
        for _ in range(20):
            got = attended("native", query, query, query)
            if not torch.equal(got.output, want.output) or not torch.equal(got.stats.entropy, want.stats.entropy):
                wrong.append(got)

    callers = [threading.Thread(target=again) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def _kernel_sum() -> float:
    """By the kernel alone: torch's own operators may not return in a forked process that has several threads."""
    from attemper.kernels import native

    query = torch.ones(1, 4, 300, 16)
    problem = Problem(query=query, key=query, value=query, mask=None, multiplier=torch.full((1, 1, 1), 0.25))
    return sum(native.forward(problem)[1][1].flatten().tolist())


def _in_child(queue) -> None:
    queue.put(_kernel_sum())


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_computes_too():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        want = _kernel_sum()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_in_child, args=(queue,), daemon=True)
        child.start()
        assert queue.get(timeout=30) == want
    finally:
        torch.set_num_threads(before)


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "strided last dim": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "expanded": lambda t: t[:, :1].expand_as(t),
    "offset": lambda t: torch.cat((t, t), -1)[..., t.shape[-1] :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_strides_equal_the_contiguous_copy(layout: str, rows: int, dtype: torch.dtype):
    tensors = [LAYOUTS[layout](torch.randn(2, 3, n, 32).to(dtype)) for n in (rows, 50, 50)]
    one, two = (attended("native", *given) for given in (tensors, [t.contiguous() for t in tensors]))
    assert torch.equal(one.output, two.output)
    assert all(torch.equal(one.stats[name], two.stats[name]) for name in one.stats)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.5}, "no dropout"),
        ({"stats": ("gini",)}, "no second_pass"),
        ({"stats": ("key_mass",)}, "no second"),
    ],
)
def test_what_native_lacks_is_refused_by_name(options: dict, reason: str):
    query, wide = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 257)
    double = query.double()
    with pytest.raises(BackendError, match=reason):
        attemper.attention(query, query, query, backend="native", **options)
    with pytest.raises(BackendError, match="not float64"):
        attemper.attention(double, double, double, backend="native")
    with pytest.raises(BackendError, match="up to 256"):
        attemper.attention(wide, wide, wide, backend="native")
