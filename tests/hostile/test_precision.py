"""Hostile inputs, table "Precision": offsets, uniform and sharp rows, low precision inputs, settings of the process."""

import math
import threading
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attemper
from attemper import functional as F
from attemper.call.result import CallFacts
from attemper.statistics import state_columns
from attemper.types import AttentionStats
from tests.support import oracle
from tests.support.calls import attended, skip_without

pytestmark = [pytest.mark.each, pytest.mark.hostile, pytest.mark.usefixtures("poisoned_empty")]


def of_scores(scores: Tensor, backend: str) -> AttentionStats:
    """Statistics of rows with exactly these scores [Q, K], brought in as a bias on products of 0."""
    query, key = torch.zeros(1, 1, scores.shape[0], 2), torch.zeros(1, 1, scores.shape[1], 2)
    stats = attemper.attention(query, key, key, scores, stats="all", backend=backend).stats
    assert stats is not None
    return stats


def exact(scores: Tensor) -> dict[str, np.ndarray]:
    query, key = torch.zeros(1, 1, scores.shape[0], 2), torch.zeros(1, 1, scores.shape[1], 2)
    return oracle.forward(oracle.inputs(query, key, None, scores))


OFFSETS = [0.0, 1e2, 1e4, 1e5, -2e4, -1e5]


@pytest.mark.parametrize("block", [5, 2048])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.turns(2)
def test_an_offset_of_all_scores_costs_no_digits(offset: float, block: int, backend: str, tiled):
    tiled(4, block, 1 << 18)
    # The rounding of s + c is not ours: the oracle takes the rounded scores.
    scores = torch.randn(12, 40) * 2 + offset
    got, want = of_scores(scores, backend), exact(scores)
    error = np.abs(oracle.numbers(got.entropy) - want["entropy"]).max()
    assert error <= 2e-6, f"off by {error} nats"
    assert (got.logit_variance >= 0).all()
    relative = np.abs(oracle.numbers(got.logit_variance) / want["logit_variance"] - 1).max()
    assert relative <= 2e-6, f"the variance is off by {relative}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.quick("reference", "blocked", "native")
def test_uniform_rows_stay_between_zero_and_log_n(dtype: torch.dtype, backend: str):
    skip_without(backend, dtype)
    keys = 3000 if backend == "blocked" else 1000
    query = torch.zeros(1, 1, keys, 1, dtype=dtype)
    stats = attemper.attention_statistics(
        query, query, is_causal=True, stats=("entropy", "normalized_entropy"), backend=backend
    )
    n = np.arange(1, keys + 1)
    entropy, normalized = (stats[name].double().numpy().ravel() for name in ("entropy", "normalized_entropy"))
    bound = np.array([math.log(i) for i in n])
    assert (entropy >= 0).all()
    assert (entropy <= bound).all(), f"{int((entropy > bound).sum())} rows above log n"
    assert (normalized <= 1).all()
    # Rounded down to the type of the result: within one of its steps.
    step = np.spacing(bound.astype(np.float64 if dtype == torch.float64 else np.float32)).astype(np.float64)
    # The sum of n terms in float64, pairwise: log2(n) roundings and some six more.
    assert (bound - entropy <= step + 16 * 2.0**-53 * bound).all()
    assert np.abs(normalized[1:] - 1).max() <= 2.0**-22


@pytest.mark.slow("takes a second")
def test_uniform_scores_stay_between_zero_and_log_n_in_the_measures():
    above = [n for n in range(2, 3001) if F.entropy(torch.zeros(n)).double().item() > math.log(n)]
    assert not above, f"{len(above)} of 2999 rows above log n, first {above[:5]}"
    assert F.statistics(torch.zeros(7, 300)).normalized_entropy.max() <= 1


GAPS = [5.0, 10.0, 15.0, 20.0, 50.0, 1000.0]


@pytest.mark.parametrize("block", [1, 32, 2048])
@pytest.mark.parametrize("place", [0, 500, 1023])
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.turns(2)
def test_one_key_far_above_the_rest_leaves_a_small_true_entropy(
    gap: float, place: int, block: int, backend: str, tiled
):
    # Interpreted, a block costs milliseconds however few keys it has.
    tiled(1, max(block, 64) if backend == "triton" else block, 1 << 18)
    scores = torch.full((1, 1024), -gap)
    scores[0, place] = 0.0
    entropy = of_scores(scores, backend).entropy.double().item()
    want = oracle.precise_entropy(scores[0].tolist())
    assert entropy >= 0
    assert not math.copysign(1, entropy) < 0, "entropy is -0.0"
    if gap <= 20:
        assert abs(entropy / want - 1) <= 0.01, f"{entropy}, mpmath has {want}"
    assert abs(entropy - want) <= 1e-6


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.turns(2)
def test_one_score_far_above_the_rest_leaves_a_small_true_entropy_in_the_measures(gap: float):
    scores = torch.cat([torch.zeros(1), torch.full((1023,), -gap)])
    entropy, want = F.entropy(scores).double().item(), oracle.precise_entropy(scores.tolist())
    assert entropy >= 0
    assert not math.copysign(1, entropy) < 0, "entropy is -0.0"
    if gap <= 20:
        assert abs(entropy / want - 1) <= 0.01, f"{entropy}, mpmath has {want}"


def test_float16_products_do_not_overflow(backend: str):
    query = torch.full((1, 1, 3, 64), 40.0, dtype=torch.float16)
    output, stats = attemper.attention(query, query, query, stats="all", backend=backend)
    assert stats is not None
    assert (output == 40).all()
    assert (stats.max_logit == 12800).all()
    assert stats.valid.all()
    torch.testing.assert_close(stats.entropy, torch.full((1, 1, 3), math.log(3)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "from bfloat16"])
def test_means_over_many_rows_are_summed_in_float64(dtype: torch.dtype):
    values = (torch.rand(1, 1, 200_000) * 1e-3 + 7.0).to(dtype)
    if dtype == torch.bfloat16:
        values = (torch.rand(1, 1, 200_000) * 5).to(dtype)
    state = dict.fromkeys(state_columns(()), torch.ones(values.shape))
    lse = torch.zeros(values.shape)
    summary = AttentionStats({"lse": lse, "max_logit": lse, "entropy": values}, state, CallFacts()).per_head()[
        "entropy"
    ]
    exact_mean = math.fsum(values.flatten().tolist()) / 200_000
    exact_std = math.sqrt(math.fsum((x - exact_mean) ** 2 for x in values.flatten().tolist()) / 200_000)
    assert abs(summary.mean.item() / exact_mean - 1) <= 1e-12
    assert abs(summary.std.item() / exact_std - 1) <= 1e-9
    assert summary.count.item() == 200_000


@contextmanager
def _precision(name: str):
    saved = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
        # This way of asking raises where the settings behind it disagree: they must be back as one.
        assert torch.get_float32_matmul_precision() == name
    finally:
        torch.set_float32_matmul_precision(saved)


@contextmanager
def _matmul(backend: Any, precision: str):
    saved = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = precision
    try:
        yield
    finally:
        backend.matmul.fp32_precision = saved


MKLDNN: Any = torch.backends.mkldnn  # its matmul is not in the stubs
SETTINGS = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "matmul precision medium": lambda: _precision("medium"),
    "matmul precision high": lambda: _precision("high"),
    "mkldnn matmul in bf16": lambda: _matmul(MKLDNN, "bf16"),
    "mkldnn matmul in tf32": lambda: _matmul(MKLDNN, "tf32"),
    "cuda matmul in tf32": lambda: _matmul(torch.backends.cuda, "tf32"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.turns(2)
def test_a_setting_of_the_process_changes_no_statistic_and_stays_as_it_was(setting: str, backend: str):
    query, key, value = (torch.randn(1, 4, 64, 32) * 2 for _ in range(3))
    sink, temperature = torch.randn(4), torch.rand(4, 1) + 0.5

    def run() -> tuple[Tensor, AttentionStats]:
        return attended(backend, query, key, value, is_causal=True, sink_logits=sink, temperature=temperature)

    expected, want = run()
    with SETTINGS[setting]():
        before = _settings()
        output, stats = run()
        assert _settings() == before
    assert torch.equal(output, expected)
    for name in stats:
        assert torch.equal(stats[name], want[name]), name


def _settings() -> tuple:
    return (
        MKLDNN.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision,
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(),
    )  # fmt: skip


def test_settings_are_put_back_after_a_kernel_raised(monkeypatch: pytest.MonkeyPatch):
    def broken(*_):
        raise RuntimeError("kernel broke")

    monkeypatch.setattr("attemper.backends.blocked.forward", broken)
    query = torch.randn(1, 1, 2, 4)
    with _precision("medium"):
        before = _settings()
        with pytest.raises(RuntimeError, match="kernel broke"):
            attemper.attention(query, query, query, backend="blocked")
        assert _settings() == before


def test_settings_are_put_back_after_calls_from_many_threads():
    tensors = [torch.randn(1, 2, 64, 16) for _ in range(3)]
    expected, _ = attended("blocked", *tensors)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(50):
            output, _ = attended("blocked", *tensors)
            if not torch.equal(output, expected):
                wrong.append(output)

    with _precision("medium"):
        before = _settings()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _settings() == before
    assert not wrong


@pytest.mark.parametrize("gap", [80.0, 88.0, 95.0, 104.0, 110.0])
def test_flushing_denormals_changes_no_statistic(gap: float, backend: str):
    scores = -torch.linspace(0, 1, 64).repeat(3, 1) * 0.1
    scores[:, 32:] -= gap
    kept = of_scores(scores, backend)
    assert torch.set_flush_denormal(True)
    try:
        flushed = of_scores(scores, backend)
    finally:
        torch.set_flush_denormal(False)
    for name in kept:
        assert torch.isfinite(flushed[name]).all(), name
        torch.testing.assert_close(flushed[name], kept[name], rtol=1e-7, atol=1e-30, msg=name)
