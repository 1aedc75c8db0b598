"""Temperature: limits, kernel, slope, advice; the article's schedules as printed and as described."""

from __future__ import annotations

import math

import pytest
import torch

import attemper
from attemper import schedules
from attemper.functional import softmax
from attemper.lab import temperature as lab
from attemper.lab.model import load, shipped_text, windows
from tests.articles.cases.document_000 import LAYERWISE, SCHEDULE
from tests.articles.runner import run_of
from tests.lab.printed import rows
from tests.support.experiments import Run


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("temperature")


@pytest.mark.parametrize("step", [0, 1, 50, 99, 100, 101, 550, 999, 1000])
def test_the_schedule_shown_is_the_one_that_is_printed(step: int):
    printed = run_of(SCHEDULE).names["article"].EntropySchedule()
    assert lab.their_schedule(step / 1000) == pytest.approx(printed.get_temperature(step, 1000), abs=1e-12)


@pytest.mark.parametrize("shape", ["linear", "exp", "u"])
def test_the_layerwise_temperatures_shown_are_those_that_are_printed(shape: str):
    printed = run_of(LAYERWISE).names["article"].LayerwiseTemperatureSchedule(lab.LAYERS, pattern=shape)
    for layer in range(lab.LAYERS):
        assert lab.their_layerwise(layer, shape) == printed.get_temperature(layer)


def test_the_printed_schedule_starts_at_zero_and_runs_backwards_and_the_described_one_does_not(result):
    table = result.table("warm up to 2, then anneal to 0.1")
    printed, described = table.column("T, as printed"), table.column("T, as described")
    assert (printed[0], printed[3], printed[-1]) == (0.0, 0.1, 2.0)
    assert list(printed[3:]) == sorted(printed[3:])
    assert list(described[3:]) == sorted(described[3:], reverse=True)
    assert min(described) == 0.1
    u = result.table("temperature by layer, 5 layers, 0.5 to 1")
    assert u.column("u, as printed") == (0.75, 0.875, 1.0, 0.875, 0.75)
    assert u.column("u, as described") == (1.0, 0.625, 0.5, 0.625, 1.0)


def test_what_is_shown_as_described_is_what_the_library_computes(result):
    table = result.table("warm up to 2, then anneal to 0.1")
    schedule = schedules.warmup_anneal(2.0, 0.1)
    for done, T in zip(table.column("steps done"), table.column("T, as described"), strict=True):
        assert pytest.approx(schedule(round(10_000 * done), 1_000_000), abs=1e-12) == T
    u = result.table("temperature by layer, 5 layers, 0.5 to 1")
    assert list(u.column("u, as described")) == schedules.layerwise(5, 0.5, 1.0, "u")


def test_the_limits_are_one_hot_ties_and_uniform(result):
    table = result.table("limits, scores [1, 2, 3] and [3, 3, 1]")
    first, last = table.rows[0], table.rows[-1]
    assert first[3] == 1.0
    assert first[4] == pytest.approx(0, abs=1e-40)
    assert first[5] == pytest.approx(math.log(2), rel=1e-15)
    assert last[0] == "inf"
    assert last[1:4] == pytest.approx((1 / 3,) * 3, rel=1e-15)
    assert last[4:] == pytest.approx((math.log(3),) * 2, rel=1e-15)
    for name in ("entropy", "entropy of [3, 3, 1]"):
        assert list(table.column(name)) == sorted(table.column(name))


@pytest.mark.parametrize("seed", [0, 1])
def test_sqrt_d_makes_the_variance_of_scores_1_and_not_that_of_weights(seed: int, experiment: Run):
    table = experiment("temperature", seed).table("what sqrt(d) makes 1, 64 keys")
    for row in rows(table):
        size, divisor, scores, weights = row[:4]
        want = {"1": size, "sqrt(d)": 1.0, "d": 1 / size}[str(divisor)]
        assert scores == pytest.approx(want, rel=0.1)
        assert weights <= 63 / 64**2
    assert max(row[3] for row in rows(table) if row[1] == "sqrt(d)") < 0.001


def test_kernel_weights_are_those_of_a_loop():
    query, key = torch.randn(2, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    weights = lab.kernel_weights(query, key, 1.7)
    for i in range(2):
        kernel = [
            math.exp(-sum((float(query[i, d]) - float(key[j, d])) ** 2 for d in range(3)) / 3.4) for j in range(4)
        ]
        assert weights[i].tolist() == pytest.approx([k / sum(kernel) for k in kernel], rel=1e-13)
    equal = key / key.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(lab.kernel_weights(query, equal, 0.3), softmax(query @ equal.mT, temperature=0.3))


def test_slopes_are_those_of_differences_and_never_negative(result):
    table = result.table("entropy and its slope, 64 keys, scores of variance 1")
    assert table.column("slope, mean") == pytest.approx(table.column("by differences"), rel=1e-4)
    assert min(table.column("smallest slope")) >= 0
    assert list(table.column("entropy, mean")) == sorted(table.column("entropy, mean"))


def test_with_the_bias_entropy_rises_to_one_half_then_falls_and_without_it_only_rises(result):
    table = result.table("scores [0, 3, 3, 3] / T + bias [6, 0, 0, 0]")
    slopes = dict(zip(table.column("T"), table.column("slope"), strict=True))
    for T, slope in slopes.items():
        assert (slope > 0) == (T < 0.5)
        assert (slope < 0) == (T > 0.5)
    assert min(table.column("slope, no bias")) > 0
    assert lab.biased_entropy(0.5)[0] == pytest.approx(math.log(4), rel=1e-15)
    assert lab.biased_entropy(0.02)[0] == pytest.approx(math.log(3), rel=1e-15)
    # One entropy, two temperatures.
    assert lab.biased_entropy(0.3)[0] > math.log(3)
    assert lab.biased_entropy(0.55)[0] > lab.biased_entropy(0.3)[0] > lab.biased_entropy(0.8)[0]


def test_trained_heads_are_sharper_than_random_rows_at_every_advised_temperature(result):
    table = result.table("temperatures that are advised, as starting points")
    for where, T, random, tokens, trained in table.rows:
        assert trained < random, where
        assert 1 <= tokens <= 64
        assert T > 0
    order = sorted(range(len(table.rows)), key=lambda place: table.rows[place][1])
    assert [table.rows[place][4] for place in order] == sorted(table.column("shipped model"))


def test_the_shares_of_the_shipped_model_are_those_of_a_scan():
    """At T = 1 they are what ``attemper.scan`` reads of the same windows."""
    model = load()
    read = windows(shipped_text(), model.config.context)[:4]
    heads = [head for site in attemper.scan(model, [read]).sites for head in site.heads]
    want = sum(head.normalized_entropy or 0.0 for head in heads) / len(heads)
    assert lab._shipped_share(lab._projections(), 1.0) == pytest.approx(want, rel=1e-5)
