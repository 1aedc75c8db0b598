"""Digits and numbers that the table of features does not ask for: nearly one-hot rows, scores at the end of float32, far
offsets, settled rows. ``tests/mutants/triton.py`` names what each of them notices."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import attemper
from attemper.backends import triton as kernels
from attemper.backends.contract import Problem
from attemper.backends.triton import tuning
from attemper.backends.triton.softmax.state import log_of
from attemper.statistics import ONE_PASS, state_columns
from attemper.types import AttentionStats
from tests.support.calls import attended, packed

pytestmark = [pytest.mark.each, pytest.mark.usefixtures("poisoned_empty")]

UNIT = 2.0**-24
CUTS = [1, 40]
"""Into how many parts the keys are split."""


def of_scores(scores: Tensor, names: tuple[str, ...] = ONE_PASS) -> AttentionStats:
    """Statistics of rows with exactly these scores [Q, K], brought in as a bias on products of 0."""
    query, key = (torch.zeros(1, 1, size, 1) for size in scores.shape)
    return attended("triton", query, key, key, scores, stats=names).stats


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch, tiled: Any) -> Any:
    """``cut(parts)``: blocks of 64 keys, that many parts of the keys."""

    def into(parts: int) -> None:
        tiled(0, 64)
        monkeypatch.setattr(tuning, "splits", lambda problem: parts)

    return into


@pytest.mark.quick("40")
@pytest.mark.parametrize("parts", CUTS)
def test_a_nearly_one_hot_row_keeps_its_digits_however_it_is_cut(parts: int, cut: Any):
    """Blocks that plain float32 loses one by one, and that matter together. (Inside a block sums are plain.)"""
    cut(parts)
    gaps = [(60, 22), (60, 11), (5, 24), (8, 24), (5, 26), (60, 22)]
    scores = torch.tensor([[-float(rest)] * 5120 for _, rest in gaps])
    scores[:, :64] = torch.tensor([[-float(first)] for first, _ in gaps])
    # One key of a block weighs as much as the others: spread inside it.
    scores[3, 64::64] += 4.0
    scores[:, 0] = 0.0
    scores[-1, -1] = 1.0
    stats = of_scores(scores)
    d = scores.double() - scores.double().amax(1, keepdim=True)
    total = d.exp().sum(1)
    p = d.exp() / total[:, None]
    mean = (p * d).sum(1)
    want = {
        "lse": scores.double().amax(1) + total.log(),
        "entropy": total.log() - mean,
        "logit_variance": (p * (d - mean[:, None]) ** 2).sum(1),
        "effective_tokens": 1 / (p * p).sum(1),
        "max_weight": 1 / total,
    }
    for name, value in want.items():
        error = (stats[name].double().flatten() / value - 1).abs()
        # Where the first block does not hide it, the rounding of a block's own sum is seen, and that of its terms.
        whole = name in ("effective_tokens", "max_weight")
        budget = torch.full((len(gaps),), 2.5e-7)
        budget[[0, 1]] = 2.5e-7 if whole else 2e-6
        budget[3] = 2.5e-7 if whole or name == "logit_variance" else 1e-6
        budget[5] = 2e-6 if name == "logit_variance" else 2.5e-7
        assert (error < budget).all(), f"{name}: {error.tolist()}"


@triton.jit
def logs(high, low, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, log_of(tl.load(high + place), tl.load(low + place)))


@pytest.mark.parametrize("largest", [1.5, 4.0, 1e6])
def test_the_logarithm_of_a_pair_is_right_to_six_tenths_of_the_last_digit(largest: float):
    high = 1 + (largest - 1) * torch.rand(8192)
    low = high * UNIT * (torch.rand(8192) - 0.5)
    out = torch.zeros(8192)
    cast(Any, logs)[(1,)](high, low, out, 8192)
    want = np.log(high.double().numpy() + low.double().numpy())
    units = np.abs(out.double().numpy() - want) / np.spacing(want.astype(np.float32)).astype(np.float64)
    assert units.max() <= 0.6


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("place", [0, 5, 11])
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("names", [("lse",), ("entropy",), ("entropy", "logit_variance")], ids=" ".join)
def test_a_visible_score_of_minus_infinity_spoils_its_row_whatever_is_asked_for(
    names: tuple[str, ...], masked: bool, place: int, parts: int, tiled: Any, monkeypatch: pytest.MonkeyPatch
):
    tiled(4, 4)
    monkeypatch.setattr(tuning, "splits", lambda problem: parts)
    mask = torch.ones(2, 12, dtype=torch.bool) if masked else None
    key = torch.zeros(1, 1, 12, 1)
    key[:, :, place] = -3e38
    for scale in (2.0, 1.0):  # beyond float32 by its scale, or as it leaves the product
        query = torch.tensor([2.0 / scale, 0.0]).reshape(1, 1, 2, 1)
        stats = attemper.attention_statistics(query, key, mask, scale=scale, stats=(*names, "lse"), backend="triton")
        assert stats.nonfinite.flatten().tolist() == [True, False]
        assert stats.valid.flatten().tolist() == [False, True]
        for name in stats:
            assert torch.isnan(stats[name].flatten()[0]), name
            assert torch.isfinite(stats[name].flatten()[1]), name


def test_scores_whose_squares_overflow_leave_every_statistic_and_gradient_finite(tiled: Any):
    tiled(4, 4)
    query, key = torch.tensor([[1e15], [1.0]])[None, None], torch.linspace(0, -1e15, 9).reshape(1, 1, 9, 1)
    leaves: list[Tensor] = [query.requires_grad_(), key.requires_grad_(), torch.randn(1, 1, 9, 2, requires_grad=True)]
    names = ("entropy", "logit_variance", "effective_tokens", "max_weight", "first_token_mass")
    output, stats = attended("triton", *leaves, scale=1.0, stats=names)
    want = {"entropy": 0.0, "logit_variance": 0.0, "effective_tokens": 1.0, "max_weight": 1.0, "first_token_mass": 1.0}
    for name, value in want.items():
        assert (stats[name] == value).all(), name
    results = [output, *(stats[name] for name in names)]
    for grad in torch.autograd.grad([result.sum() for result in results], leaves):
        assert torch.isfinite(grad).all()


def test_a_softcap_that_bends_little_keeps_the_digits_of_small_scores():
    size = torch.tensor([1e-4, -3e-3, 0.05, -0.7, 20.0])
    query, key = size.reshape(1, 1, 5, 1), torch.ones(1, 1, 1, 1)
    stats = attemper.attention_statistics(query, key, scale=1.0, softcap=50.0, stats=("max_logit",), backend="triton")
    want = 50 * torch.tanh(size.double() / 50)
    assert ((stats.max_logit.flatten().double() / want - 1).abs() < 4e-7).all()


def test_a_float64_bias_beyond_float32_leaves_its_key_visible():
    bias = torch.zeros(2, 5, dtype=torch.float64)
    bias[0, 2] = -1e300
    stats = of_scores(bias)
    assert stats.valid.all()
    assert stats.visible_keys.flatten().tolist() == [5, 5]
    torch.testing.assert_close(stats.entropy.flatten(), torch.tensor([4.0, 5.0]).log(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("block", [4, 8])
def test_rows_that_lie_gigabytes_apart_are_reached(block: int, tiled: Any, monkeypatch: pytest.MonkeyPatch):
    # Pages that nobody touches cost nothing: 2^31 + 2^12 halves of virtual memory, a few kilobytes of real memory.
    monkeypatch.undo()
    storage = torch.empty(2**31 + 2**12, dtype=torch.float16)
    tiled(4, block)
    # The last row's offset is 2^31: of the beginning of its block, or inside one.
    far = torch.as_strided(storage, (1, 1, 5, 3), (3, 3, 2**29, 1))
    far.copy_(torch.randn(1, 1, 5, 3))
    query, near = torch.randn(1, 1, 2, 3, dtype=torch.float16), far.contiguous()
    want, got = (attended("triton", query, key, key, stats=ONE_PASS) for key in (near, far))
    assert torch.equal(got.output, want.output)
    for name in ONE_PASS:
        assert torch.equal(got.stats[name], want.stats[name]), name


def test_first_tokens_of_every_document_count(tiled: Any):
    """Of documents whose rows share one block."""
    tiled(16, 4)
    rows, keys = torch.tensor([0, 3, 12, 16]), torch.tensor([0, 8, 17, 28])
    tensors = torch.randn(16, 1, 4), torch.randn(28, 1, 4), torch.randn(28, 1, 4)
    got, want = (
        packed(backend, *tensors, rows, keys, stats=("first_token_mass",), first_tokens=2).stats.first_token_mass
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_sampled_rows_of_documents_stand_at_their_own_places():
    lengths, stride = (4, 9, 6), 2
    starts = torch.tensor([0, 4, 13, 19])
    query, key = torch.randn(1, 2, 19, 4), torch.randn(1, 2, 19, 4)
    places = [torch.arange(0, length, stride) for length in lengths]
    chosen = torch.cat([place + start for place, start in zip(places, starts[:-1], strict=True)])
    begun = torch.tensor([0, *np.cumsum([len(place) for place in places]).tolist()])
    options: dict[str, Any] = {"right": 0, "columns": state_columns(ONE_PASS)}
    multiplier = torch.full((1, 1, 1), 0.5)
    options |= {"cu_seqlens_k": starts}
    _, every, _ = kernels.forward(Problem(query, key, None, None, multiplier, cu_seqlens_q=starts, **options))
    options |= {"cu_seqlens_q": begun, "positions": torch.cat(places)}
    some = Problem(query[:, :, chosen], key, None, None, multiplier, **options)
    torch.testing.assert_close(kernels.forward(some)[1], every[..., chosen], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("sink", [None, -1e30], ids=["", "sink without weight"])
def test_a_row_whose_weight_is_all_on_one_key_gives_a_tiny_temperature_no_noise_from_the_output(sink: float | None):
    query, key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    temperature = torch.tensor([[[1e-12]]], requires_grad=True)
    sinks = None if sink is None else torch.full((2,), sink)
    query.requires_grad_()
    output, stats = attended(
        "triton", query, key, value, temperature=temperature, sink_logits=sinks, stats=("entropy", "lse")
    )
    assert (stats.entropy == 0).all()
    results = [(output * torch.randn(output.shape)).sum(), stats.entropy.sum()]
    for grad in torch.autograd.grad(results, [query, temperature]):
        assert (grad == 0).all()


def test_a_sink_beside_a_settled_row_still_moves_its_score():
    """One visible key: all weight that the sink leaves is on it, and a higher score takes more from the sink."""
    grads = {}
    tensors = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4)
    for backend in ("reference", "triton"):
        query = tensors[0].clone().requires_grad_()
        output, _ = attended(backend, query, *tensors[1:], sink_logits=torch.zeros(2), stats=("entropy",))
        (grads[backend],) = torch.autograd.grad(output.square().sum(), query)
    assert (grads["reference"].abs() > 1e-4).any()
    torch.testing.assert_close(grads["triton"], grads["reference"], rtol=1e-5, atol=1e-6)


def test_an_empty_row_gives_the_sink_nothing_whatever_comes_from_above():
    query, key, value = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[2] = False
    grads = []
    for poison in (1.0, torch.inf, torch.nan):
        sinks = torch.zeros(2, requires_grad=True)
        output, _ = attended("triton", query, key, value, mask, sink_logits=sinks, stats=("lse",))
        above = torch.ones_like(output)
        above[:, :, 2] = poison
        grads.append(torch.autograd.grad(output, sinks, above)[0])
    assert (grads[0] != 0).all()
    assert all(torch.equal(grad, grads[0]) for grad in grads)
