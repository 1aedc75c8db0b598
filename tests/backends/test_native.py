"""The native kernels against the float64 oracle, case by case, and what only they promise: threads, forks, layouts."""

import ctypes
import math
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper import nn
from attemper.backends import native
from attemper.backends.contract import Problem
from attemper.backends.native import library, repeated_call
from attemper.backends.native import rows as native_rows
from attemper.backends.native.arguments import Arguments
from attemper.backends.table import BACKENDS
from attemper.call import known_requests
from attemper.errors import BackendError
from attemper.statistics import state_columns
from tests.support import agreement, cases
from tests.support.calls import attended

pytestmark = [
    pytest.mark.usefixtures("poisoned_empty"),
    pytest.mark.skipif(
        any(backend.name == "native" and backend.missing for backend in BACKENDS),
        reason="native is not built (where a compiler is, test_native_build.py fails)",
    ),
]

TAKEN = [
    case for case in (*cases.CASES, *cases.RAGGED) if case.dtype != torch.float64 and max(case.size, case.width) <= 256
]
# Few rows go to the decode kernel; the same table with many goes to the tiles.
TALL = [replace(case, name=f"tall: {case.name}", rows=case.rows + 30) for case in TAKEN if case.keys < 100]


def _padding(case: cases.Case, *, holes: bool = False) -> Tensor:
    """[B, 1, 1, K]: the second batch is shorter at both ends; with holes, every third key is hidden in both."""
    places = torch.arange(case.keys)
    mask = torch.stack([places >= 0, (places >= 20) & (places < case.keys - 7)])[:, None, None]
    return mask & (places % 3 != 1) if holes else mask


LONG = (
    cases.Case("blocks and chunks", batch=1, heads=2, groups=1, rows=430, keys=700, size=40, width=24),
    cases.Case("blocks, ascending", batch=1, heads=2, groups=2, rows=70, keys=600, ascending=True, spread=8.0),
    # Own keys are the first ones, far before the highest scores.
    cases.Case("blocks, ascending window", batch=1, heads=2, groups=2, rows=70, keys=600, ascending=True, spread=8.0,
               options={"window_size": (-1, 540)}),
    cases.Case("blocks, causal", batch=1, heads=2, groups=2, rows=600, keys=600, options={"is_causal": True}),
    cases.Case("blocks, window", batch=1, heads=1, groups=1, rows=300, keys=900, options={"window_size": (40, 300)}),
    cases.Case("blocks, window, padding", batch=2, heads=2, groups=2, rows=60, keys=300,
               options={"window_size": (10, 290)}, make=lambda case: {"attn_mask": _padding(case)}),
    cases.Case("blocks, bias", batch=1, heads=2, groups=2, rows=45, keys=600,
               make=lambda case: {"attn_mask": torch.randn(1, 1, case.rows, case.keys)}),
    cases.Case("blocks, softcap", batch=1, heads=2, groups=2, rows=45, keys=300, spread=8.0, options={"softcap": 5.0}),
    cases.Case("blocks, padding with holes", batch=2, heads=2, groups=2, rows=45, keys=300,
               options={"first_tokens": 4}, make=lambda case: {"attn_mask": _padding(case, holes=True)}),
    cases.Case("blocks, windows of two heads", batch=1, heads=2, groups=1, rows=70, keys=290,
               options={"window_size": (5, 0), "causal_alignment": "bottom-right"}),
    cases.Case("splits", batch=1, heads=4, groups=2, rows=1, keys=2500, ascending=True),
    cases.Case("splits, padding", batch=2, heads=4, groups=4, rows=3, keys=1100,
               make=lambda case: {"attn_mask": (torch.arange(case.keys) < 1050)[None, None, None]}),
    cases.Case("blocks, bfloat16", batch=1, heads=2, groups=1, rows=45, keys=600, size=40, width=24, ascending=True,
               dtype=torch.bfloat16),
    cases.Case("blocks, causal, bfloat16", batch=1, heads=2, groups=2, rows=290, keys=290, dtype=torch.bfloat16,
               options={"is_causal": True}),
)  # fmt: skip


# A default run meets the few rows of most cases in tests/functional/test_attention.py.
LARGER = {case.name for place, case in enumerate((*TALL, *TAKEN)) if place % 20} | {
    "blocks and chunks",
    "blocks, causal",
    "blocks, causal, bfloat16",
    "blocks, window",
    "blocks, ascending",
    "blocks, ascending window",
    "blocks, window, padding",
    "blocks, bias",
    "blocks, softcap",
    "blocks, windows of two heads",
}
FULL = pytest.mark.slow("the full size of what runs smaller by default")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=FULL if case.name in LARGER else []) for case in (*TAKEN, *TALL, *LONG)],
)
@pytest.mark.turns(2)
def test_native_agrees_with_the_oracle(case: cases.Case):
    agreement.assert_agreement(replace(case, names=cases.MERGED), "native")


def libraries() -> dict[str, ctypes.CDLL]:
    """The libraries that are built and that this processor can run, by instruction set."""
    folder, found = Path(native.__file__).parent, {}
    for name in library.builds(torch.backends.cpu.get_cpu_capability()):
        path = folder / f"attemper_native_{name}.so"
        if path.exists():
            loaded = library.declare_types(ctypes.CDLL(str(path)))
            if loaded.attemper_usable():
                found[name] = loaded
    return found


LIBRARIES = libraries()


@pytest.fixture(params=LIBRARIES)
def each_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go to the library of one instruction set, also those that were made before on another."""
    loaded: ctypes.CDLL = LIBRARIES[request.param]
    monkeypatch.setattr(known_requests, "KNOWN", known_requests.KnownRequests())
    for user in (library, repeated_call, native_rows):
        monkeypatch.setattr(user, "library", lambda: loaded)


OTHERS = ("plain", "tall: plain", "tall: bfloat16", "tall: float16", "tall: softcap", "blocks, bfloat16", "splits")


@pytest.mark.parametrize(
    "case", [case for case in (*TAKEN, *TALL, *LONG) if case.name in OTHERS], ids=lambda case: case.name
)
@pytest.mark.usefixtures("each_library")
@pytest.mark.each
@pytest.mark.turns(2)
def test_every_instruction_set_agrees_with_the_oracle(case: cases.Case):
    test_native_agrees_with_the_oracle(case)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.usefixtures("each_library")
def test_an_output_of_sixteen_bits_is_rounded_to_the_nearest(rows: int):
    """The mean of 1 and twice the number after 1 lies two thirds of the way to it."""
    query, key = torch.zeros(1, 1, rows, 16, dtype=torch.bfloat16), torch.zeros(1, 1, 3, 16, dtype=torch.bfloat16)
    value = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-7]).view(1, 1, 3, 1).expand(1, 1, 3, 16).to(torch.bfloat16)
    assert (attended("native", query, key, value).output == 1 + 2**-7).all()


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.usefixtures("each_library")
def test_exponentials_have_every_digit_of_float32(rows: int):
    """Scores 0 and x < 0: lse = log(1 + exp(x)), within two roundings."""
    scores = -torch.linspace(0.01, 6, rows * 64).view(64, 1, rows, 1)
    key = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(64, 1, 2, 1)
    lse = attended("native", scores, key, key, scale=1.0).stats["lse"]
    torch.testing.assert_close(lse.double(), scores[..., 0].double().exp().log1p(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("size", [16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("first", "second"), [((30.0, -30.0), (30.0, -30.0)), ((200.0, 200.0), (0.0, 0.0)), ((9.0, -9.0), (3.0, 8.0))]
)
@pytest.mark.usefixtures("each_library")
@pytest.mark.each
def test_weights_too_small_for_a_float_are_0_however_they_are_found(
    first: tuple[float, float], second: tuple[float, float], dtype: torch.dtype, size: int
):
    """Two blocks of keys whose scores take turns. What is 87 nats below the highest has the weight 0; where lengths of
    queries and keys show that nothing is, nothing is compared. A mask that hides nothing has every score compared.
    Half of the rows have twice the scores, at half the temperature of the others.
    """
    scores = torch.tensor([*first * 128, *second * 128])
    query = torch.full((1, 1, 40, size), 2.0, dtype=dtype)
    key = (scores / 32).view(1, 1, 512, 1).expand(1, 1, 512, size).to(dtype)
    value = (scores / 64).view(1, 1, 512, 1).expand(1, 1, 512, size).to(dtype)
    options = {"scale": 16 / size, "temperature": torch.where(torch.arange(40) % 2 == 1, 0.5, 1.0)[None, None]}
    got = attended("native", query, key, value, **options)
    compared = attended("native", query, key, value, torch.ones(1, 1, 40, 512, dtype=torch.bool), **options)
    assert torch.equal(got.output, compared.output)
    assert all(torch.equal(got.stats[name], compared.stats[name]) for name in got.stats)
    for row, exact in enumerate((scores.double(), 2 * scores.double())):
        weights = exact.softmax(0)
        want, entropy = (weights * value[0, 0, :, 0]).sum(), -torch.xlogy(weights, weights).sum()
        output, entropies = got.output[0, 0, row::2].double(), got.stats.entropy[0, 0, row::2].double()
        torch.testing.assert_close(output, want.expand_as(output), rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(entropies, entropy.expand_as(entropies), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("first", "second"), [((47.0, -47.0), (47.0, -47.0)), ((94.0, 94.0), (0.0, 0.0))])
@pytest.mark.usefixtures("each_library")
@pytest.mark.each
def test_no_weight_is_a_denormal_number(first: tuple[float, float], second: tuple[float, float], dtype: torch.dtype):
    """94 nats below the highest: 2e-41, which values of 1e38 would show."""
    scores = torch.tensor([*first * 128, *second * 128])
    query = torch.ones(1, 1, 40, 16, dtype=dtype)
    key = (scores / 16).view(1, 1, 512, 1).expand(1, 1, 512, 16).to(dtype)
    value = torch.where(scores == scores.max(), 1.0, 1e38).view(1, 1, 512, 1).expand(1, 1, 512, 16).to(dtype)
    output = attended("native", query, key, value, scale=1.0).output
    assert torch.equal(output, torch.ones(1, 1, 40, 16, dtype=dtype))


@pytest.mark.parametrize("place", [5, 242])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("each_library")
@pytest.mark.each
def test_a_hidden_key_that_is_not_a_number_makes_no_far_key_near(dtype: torch.dtype, place: int):
    """NaN tells no length. Rows that do not see it are as without it; one of their keys is 94 above the rest, whose
    values would show a weight of 2e-41.
    """
    query, key = torch.ones(1, 1, 512, 16, dtype=dtype), (0.01 * torch.randn(1, 1, 512, 16)).to(dtype)
    value = torch.full((1, 1, 512, 16), 1e38, dtype=dtype)
    key[..., 250, :], value[..., 250, :] = 94 / 16, 1
    spoiled = key.clone()
    spoiled[..., place, :] = torch.nan
    want, got = (attended("native", query, k, value, scale=1.0, window_size=(100, -1)) for k in (key, spoiled))
    blind = torch.arange(512) > place + 100
    assert torch.equal(got.output[:, :, blind], want.output[:, :, blind])
    assert all(torch.equal(got.stats[name][..., blind], want.stats[name][..., blind]) for name in got.stats)


@pytest.mark.parametrize("rows", [3, 40])
def test_a_row_that_is_nearly_one_hot_keeps_the_digits_of_its_entropy(rows: int):
    """199 keys are 18 below the first: H = log(1 + x) + 18 x / (1 + x), x = 199 exp(-18) = 3e-6."""
    key = torch.full((1, 1, 200, 1), -18.0)
    key[..., 0, :] = 0
    entropy = attended("native", torch.ones(1, 1, rows, 1), key, key, scale=1.0).stats["entropy"]
    rest = torch.tensor(199 * math.exp(-18), dtype=torch.float64)
    want = (rest.log1p() + 18 * rest / (1 + rest)).expand(1, 1, rows)
    torch.testing.assert_close(entropy.double(), want, rtol=2e-6, atol=0)


def everything(
    threads: int, rows: int, *, biases: int = 3, dtype: torch.dtype = torch.float32, normalizer: Any = "softmax"
) -> list[Tensor]:
    """Output, statistics and gradients of one call, on so many threads; ``biases``: heads of the bias."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    leaves = [torch.randn(2, 3, n, 32).to(dtype).requires_grad_() for n in (rows, 700, 700)]
    bias = torch.randn(1, biases, rows, 700, requires_grad=True)
    temperature = (torch.rand(3, 1) + 0.5).requires_grad_()
    sink = torch.randn(3, requires_grad=True) if normalizer == "softmax" else None
    leaves += [bias, temperature, *([] if sink is None else [sink])]
    options = {"temperature": temperature, "sink_logits": sink, "normalizer": normalizer}
    result = attended("native", *leaves[:3], bias, **options)
    (result.output.square().sum() + result.stats.entropy.sum() + result.stats.max_logit.sum()).backward()
    grads = [leaf.grad for leaf in leaves]
    assert None not in grads
    return [result.output.detach(), *(result.stats[name].detach() for name in result.stats), *grads]  # pyright: ignore


HALF: dict[str, Any] = {"dtype": torch.bfloat16}
ROWWISE = ("sparsemax", "entmax15", nn.Entmax(1.3), nn.TopK(3), nn.Threshold(0.1))


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (500, {}), (2, {}), (500, {"biases": 1}), (500, HALF), (2, HALF), (150, {"normalizer": "sigmoid"}),
        (150, HALF | {"normalizer": "sigmoid"}), (150, HALF | {"normalizer": "entmax15"}),
        *((150, {"normalizer": normalizer}) for normalizer in ROWWISE),
    ],
)  # fmt: skip
@pytest.mark.quick("500-options3", "2-options4", "150-options5", "150-options7")
def test_results_are_bitwise_equal_over_threads_and_repeats(rows: int, options: dict):
    before = torch.get_num_threads()
    try:
        want = everything(1, rows, **options)
        for threads in (1, 2, 4, 2, 4):
            got = everything(threads, rows, **options)
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), threads
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
    query = torch.ones(1, 4, 300, 16)
    problem = Problem(query=query, key=query, value=query, mask=None, multiplier=torch.full((1, 1, 1), 0.25))
    return sum(native.forward(problem)[1][1].flatten().tolist())


def _attended_sum() -> float:
    """After fork, GNU OpenMP waits in its first parallel region for threads that are gone: with several threads no
    operator of PyTorch returns, with one thread all do, and the pool of the native kernels starts anew."""
    query = torch.ones(1, 4, 300, 16)
    result = attended("native", query, query, query)
    return float(sum(result.stats.entropy.flatten().tolist()) + sum(result.output.flatten().tolist()))


def _in_child(queue, threads: int | None, compute: Callable[[], float]) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    queue.put(compute())


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize(("compute", "threads"), [(_kernel_sum, None), (_attended_sum, 1)])
def test_a_forked_process_computes_too(compute: Callable[[], float], threads: int | None):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(1000, 1000).add(1)  # OpenMP's threads exist
        want = compute()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_in_child, args=(queue, threads, compute), daemon=True)
        child.start()
        assert queue.get(timeout=60) == want
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("normalizer", "rows", "temperature", "dtype"),
    [
        *product(["softmax"], [3, 40], [1e-30, 1e-10, 1e-5], [torch.float32, torch.bfloat16]),
        *product(ROWWISE, [40], [1e-30, 1e-5], [torch.float32]),
    ],
)
@pytest.mark.turns(3)
def test_weights_in_backward_are_those_of_forward_however_large_scores_are(
    normalizer: Any, rows: int, temperature: float, dtype: torch.dtype
):
    """At 1e5 and beyond, two orders of adding up a score give two scores, and exp of their difference is no weight."""
    query, key, value = (torch.randn(1, 2, n, 8).to(dtype).requires_grad_() for n in (rows, 9, 9))
    divisor = torch.full((2, 1), temperature, requires_grad=True)
    output = attended("native", query, key, value, temperature=divisor, normalizer=normalizer).output
    grads = torch.autograd.grad(output.sum(), (value, divisor, query))
    winners = (query.double() @ key.double().mT).argmax(-1)
    want = torch.nn.functional.one_hot(winners, 9).sum(2).to(dtype)[..., None].expand_as(value)
    torch.testing.assert_close(grads[0], want, rtol=0, atol=0 if normalizer == "softmax" else 1e-6)
    assert torch.equal(grads[1], torch.zeros(2, 1))
    if normalizer != "softmax":
        assert torch.equal(grads[2], torch.zeros_like(query))


@pytest.mark.parametrize("product", [5e37, 2e38])
def test_scores_that_overflow_only_with_their_bias_are_told(product: float):
    """Two rows of a bias of 3e38, one of them with products to which it must not be added."""
    query = torch.zeros(1, 1, 40, 1)
    query[..., 3, 0] = product
    bias = torch.zeros(40, 50)
    bias[3], bias[4] = 3e38, 3e38
    output, stats = attended("native", query, torch.ones(1, 1, 50, 1), torch.ones(1, 1, 50, 8), bias, scale=1.0)
    over = torch.arange(40) == 3
    assert torch.equal(stats.nonfinite[0, 0], over)
    assert output[0, 0, over].isnan().all()
    assert all(stats[name][0, 0, over].isnan().all() for name in stats if name not in ("visible_keys", "support_size"))
    assert torch.equal(stats.max_logit[0, 0, 4], bias[4, 0])
    torch.testing.assert_close(output[0, 0, ~over], torch.ones(39, 8), rtol=0, atol=1e-6)


BAD = {
    "NaN in a query": lambda query, key, bias: query[:, :, 2].fill_(torch.nan),
    "NaN in a bias": lambda query, key, bias: bias[2, 5].fill_(torch.nan),
    "inf in a bias": lambda query, key, bias: bias[2, 5].fill_(torch.inf),
    "a product of inf": lambda query, key, bias: (query[:, :, 2].fill_(1e25), key[:, :, 5].fill_(1e25)),
    "a product of -inf": lambda query, key, bias: (query[:, :, 2].fill_(1e25), key[:, :, 5].fill_(-1e25)),
}


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("how", BAD)
@pytest.mark.turns(3)
def test_a_score_that_is_not_finite_spoils_its_row_alone(how: str, rows: int, masked: bool):
    """Of few rows every score is looked at, of many those of which one may be bad."""
    query, key, value = (torch.randn(1, 2, n, 16) for n in (rows, 64, 64))
    bias = torch.zeros(rows, 64)
    BAD[how](query, key, bias)
    output, stats = attended("native", query, key, value, bias if masked or "bias" in how else None)
    bad = torch.arange(rows) == 2
    assert torch.equal(stats.nonfinite, bad.expand(1, 2, rows))
    assert output[:, :, ~bad].isfinite().all()
    for name in stats:
        if name in ("visible_keys", "support_size"):
            assert (stats[name] == 64).all()
        else:
            assert torch.equal(stats[name].isfinite(), ~bad.expand(1, 2, rows)), name
            assert stats[name][:, :, bad].isnan().all(), name


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_what_stands_at_a_hidden_key_reaches_nothing(rows: int, number: float):
    """No result, and no gradient of keys and values: forward looks at every score, backward at those of bad rows."""
    tensors = [torch.randn(1, 2, n, 16) for n in (rows, 50, 50)]
    hidden = torch.tensor([5, 40, 45, 49])
    mask = torch.ones(50, dtype=torch.bool).index_fill_(0, hidden, False)
    spoilt = tensors[1].clone().index_fill_(2, hidden, number)
    found = []
    for key in (tensors[1], spoilt):
        leaves = [tensor.clone().requires_grad_() for tensor in (tensors[0], key, tensors[2])]
        output, stats = attended("native", *leaves, mask)
        loss = output.square().sum() + stats.entropy.sum()
        found.append([output, *(stats[name] for name in stats), *torch.autograd.grad(loss, leaves[1:])])
    for got, want in zip(found[1], found[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [3, 45])
def test_any_keys_may_be_first_tokens_or_in_a_span(rows: int):
    """Marked key by key, other ones in each batch, about the ends of blocks and of parts, and outside of windows."""
    query, key = torch.randn(2, 1, rows, 16), torch.randn(2, 1, 1100, 16)
    first = torch.stack([torch.arange(1100) % 7 == 2, torch.arange(1100) // 8 % 32 == 31])
    positions = torch.arange(rows) * 1099 // (rows - 1)
    problem = Problem(
        query=query,
        key=key,
        value=None,
        mask=None,
        multiplier=torch.full((1, 1, 1), 0.25),
        columns=state_columns(("first_token_mass", "self_weight", "span_mass")),
        first_keys=first,
        span_keys=~first,
        positions=positions,
        left=100,
    )
    hidden = torch.arange(1100) < positions[:, None] - 100
    weights = (query.double() @ key.double().mT / 4).masked_fill(hidden, -torch.inf).softmax(-1)
    own = torch.arange(1100) == positions[:, None]
    for column, marks in enumerate((first[:, None, None], own, ~first[:, None, None]), 3):
        want = (weights * marks).sum(-1)
        torch.testing.assert_close(native.forward(problem)[1][column].double(), want, rtol=0, atol=2e-6)


def test_no_entropy_is_above_the_logarithm_of_its_count():
    """Not by a rounding of it: that of equal scores is the largest float that is not above log n."""
    query = torch.zeros(1, 1, 1500, 8)
    stats = attended("native", query, query, query, is_causal=True).stats
    exact = stats.visible_keys.double().log()
    assert (stats.entropy.double() <= exact).all()
    torch.testing.assert_close(stats.entropy.double(), exact, rtol=2.0**-23, atol=0)
    assert torch.equal(stats.normalized_entropy[..., 0], torch.zeros(1, 1))
    torch.testing.assert_close(stats.normalized_entropy[..., 1:], torch.ones(1, 1, 1499), rtol=0, atol=1.2e-7)


LAYOUTS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "strided last dim": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "expanded": lambda t: t[:, :1].expand_as(t),
    "offset": lambda t: torch.cat((t, t), -1)[..., t.shape[-1] :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.turns(3)
def test_any_strides_equal_the_contiguous_copy(layout: str, rows: int, dtype: torch.dtype):
    tensors = [LAYOUTS[layout](torch.randn(2, 3, n, 32).to(dtype)) for n in (rows, 50, 50)]
    one, two = (attended("native", *given) for given in (tensors, [t.contiguous() for t in tensors]))
    assert torch.equal(one.output, two.output)
    assert all(torch.equal(one.stats[name], two.stats[name]) for name in one.stats)


MASKS = {
    "key padding": torch.arange(50) < 41,
    "bool per head": torch.rand(3, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.7,
    "bias per query": torch.linspace(-2, 2, 40)[:, None],
    "half precision bias": torch.linspace(-2, 2, 40 * 50).view(40, 50).half(),
    "every second column": torch.linspace(-2, 2, 40 * 100).view(40, 100)[:, ::2],
}


@pytest.mark.parametrize("mask", MASKS)
def test_tensors_are_read_where_they_lie(mask: str, monkeypatch: pytest.MonkeyPatch):
    seen, run = [], native.run

    def noted(name: str, call: bytes) -> None:
        seen.append(Arguments.from_buffer_copy(call))
        run(name, call)

    monkeypatch.setattr(native, "run", noted)
    tensors = {
        "query": torch.randn(2, 40, 3, 32).transpose(1, 2),
        "key": torch.randn(2, 1, 50, 64)[..., ::2],
        "value": torch.randn(2, 1, 1, 24).expand(2, 1, 50, 24),
        "mask": MASKS[mask],
    }
    attended("native", *tensors.values(), enable_gqa=True)
    (call,) = seen
    for name, tensor in tensors.items():
        view = getattr(call, name)
        assert view.data == tensor.data_ptr(), name
        sizes = [1] * (4 - tensor.dim()) + list(tensor.shape)
        steps = [0] * (4 - tensor.dim()) + list(tensor.stride())
        for size, want, got in zip(sizes, steps, view.stride, strict=True):
            if size > 1:
                assert got == want, name
            elif name == "mask":  # which stands for all places there; of the others there is one
                assert got == 0


MEMORY = """
import torch
from attemper import attention


def status(word):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(word)) / 1024


def extra_mib(rows, keys):
    query = torch.randn(1, rows, 8, 64, dtype=torch.bfloat16).transpose(1, 2)
    key, value = (torch.randn(1, keys, 8, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    bias = torch.randn(1, 1, rows, keys)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    attention(query, key, value, bias, stats="all", backend="native")
    return status("VmHWM") - before


torch.set_num_threads(1)
extra_mib(64, 256), extra_mib(1, 256)
print(extra_mib(64, 16384), extra_mib(1, 65536))
"""


@pytest.mark.slow("takes many seconds")
def test_a_call_needs_a_few_mib_beyond_its_tensors():
    # A float32 copy of the keys would be 32 and 128 MiB, the bias of every head 32 and 2.
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    many, one = map(float, run.stdout.split())
    assert -1 < many < 6, f"{many} MiB"
    assert -1 < one < 6, f"{one} MiB"


@pytest.mark.parametrize("content", [b"not a library", None], ids=["broken", "none for this processor"])
def test_a_library_that_does_not_serve_this_process_is_told_and_not_raised(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if content is not None:
        for name in ("avx512", "avx2", "portable"):
            (tmp_path / f"attemper_native_{name}.so").write_bytes(content)
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    reason = library.why_unusable()
    assert reason is not None
    assert ("cannot be loaded" if content else "has no library for a processor") in reason
    with pytest.raises(BackendError, match="backend='native' cannot serve this call"):
        library.library()
