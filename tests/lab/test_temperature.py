"""Temperature: limits, kernel, slope, advice; the article's schedules as printed and as described."""

from __future__ import annotations

import math

import pytest
import torch

from attemper import schedules
from attemper.functional import entropy, softmax
from attemper.lab import temperature as lab
from tests.lab.printed import FromItsCode, Printed, rows
from tests.support.experiments import Run

ARTICLE, SOFTMAX = "temperature and attention entropy", "softmax analysis"


class AsPrinted:
    """The article's two classes, formulas as printed."""

    T_init, T_final = 2.0, 0.1

    def get_temperature(self, step: int, total_steps: int) -> float:
        ratio = step / total_steps
        if ratio < 0.1:
            warmup_ratio = ratio / 0.1
            return self.T_init * warmup_ratio
        anneal_ratio = (ratio - 0.1) / 0.9
        return self.T_init - (self.T_init - self.T_final) * self._cosine_schedule(anneal_ratio)

    def _cosine_schedule(self, t: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * t))

    def layer(self, layer_idx: int, pattern: str, num_layers: int, T_low: float = 0.5, T_high: float = 1.0) -> float:
        ratio = layer_idx / max(1, num_layers - 1)
        if pattern == "linear":
            return T_low + ratio * (T_high - T_low)
        if pattern == "u":
            return T_high - 0.5 * (T_high - T_low) * abs(2 * ratio - 1)
        return T_low * ((T_high / T_low) ** ratio)


SCHEDULE = AsPrinted().get_temperature
LAYER = AsPrinted().layer
LIBRARY_U = schedules.layerwise(lab.LAYERS, lab.LOW, lab.HIGH, "u").__getitem__
FROM_CODE = [
    # What its class returns against what its comment describes.
    FromItsCode(ARTICLE, "T at step 0", SCHEDULE(0, 1000), lab.anneal(0.0), right=False),
    FromItsCode(ARTICLE, "T as the warm-up ends", SCHEDULE(100, 1000), lab.anneal(0.1), right=False),
    FromItsCode(ARTICLE, "T half way through the annealing", SCHEDULE(550, 1000), lab.anneal(0.55), right=True),
    FromItsCode(ARTICLE, "T at the last step", SCHEDULE(1000, 1000), lab.anneal(1.0), right=False),
    FromItsCode(ARTICLE, "T of the first layer, u", LAYER(0, "u", 5), LIBRARY_U(0), right=False),
    FromItsCode(ARTICLE, "T of the second layer, u", LAYER(1, "u", 5), LIBRARY_U(1), right=False),
    FromItsCode(ARTICLE, "T of the middle layer, u", LAYER(2, "u", 5), LIBRARY_U(2), right=False),
]
PRINTED = [
    Printed(ARTICLE, "T_low, of the first layer, linear", "0.5", lab.their_layerwise(0, "linear")),
    Printed(ARTICLE, "T_high, of the last layer, linear", "1.0", lab.their_layerwise(4, "linear")),
    Printed(ARTICLE, "T_init, after the warm-up", "2.0", lab.anneal(lab.WARMUP)),
    Printed(ARTICLE, "T_final, at the last step", "0.1", lab.anneal(1.0)),
    Printed(ARTICLE, "lowest limit of the entropy", "0", float(entropy(torch.tensor([1.0, 2.0]), temperature=1e-3))),
]


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("temperature")


@pytest.mark.parametrize("number", FROM_CODE, ids=str)
def test_a_number_that_the_printed_code_gives_is_ours_or_is_wrong(number: FromItsCode):
    number.check()


@pytest.mark.parametrize("number", PRINTED, ids=str)
def test_a_printed_number_is_ours_or_is_corrected(number: Printed):
    number.check()


@pytest.mark.parametrize("step", [0, 1, 50, 99, 100, 101, 550, 999, 1000])
def test_the_schedule_shown_is_the_one_that_is_printed(step: int):
    assert lab.their_schedule(step / 1000) == pytest.approx(AsPrinted().get_temperature(step, 1000), abs=1e-12)


@pytest.mark.parametrize("shape", ["linear", "exp", "u"])
def test_the_layerwise_temperatures_shown_are_those_that_are_printed(shape: str):
    for layer in range(lab.LAYERS):
        assert lab.their_layerwise(layer, shape) == AsPrinted().layer(layer, shape, lab.LAYERS)


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


def test_the_drawn_schedule_rises_to_where_the_table_says_and_starts_and_ends_there(result):
    chart = next(chart for chart in result.charts if chart.title == "warm-up and annealing")
    table = result.table("warm up to 2, then anneal to 0.1")
    for series, name in zip(chart.series, ("T, as printed", "T, as described"), strict=True):
        drawn = dict(zip(series.x, series.y, strict=True))
        for done, T in zip(table.column("steps done"), table.column(name), strict=True):
            assert drawn[done] == pytest.approx(T, abs=1e-11), (name, done)


def test_every_axis_says_its_unit_and_what_lies_on_a_curve_is_drawn_as_points(result):
    for chart in result.charts:
        for axis in (chart.x, chart.y):
            assert axis.label.endswith(")"), axis.label
    kernel = next(chart for chart in result.charts if chart.title.startswith("one query"))
    assert [series.line for series in kernel.series] == [False, True, True]
    assert kernel.series[0].y == pytest.approx(kernel.series[1].y, rel=1e-12)


@pytest.mark.parametrize("seed", [0, 1])
def test_sqrt_d_makes_the_variance_of_scores_1_and_not_that_of_weights(seed: int, experiment: Run):
    table = experiment("temperature", seed).table("what sqrt(d) makes 1, 64 keys")
    for row in rows(table):
        size, divisor, scores, weights = row[:4]
        want = {"1": size, "sqrt(d)": 1.0, "d": 1 / size}[str(divisor)]
        assert scores == pytest.approx(want, rel=0.1)
        assert weights <= 63 / 64**2
    assert max(row[3] for row in rows(table) if row[1] == "sqrt(d)") < 0.001


def test_the_variance_of_weights_is_largest_for_one_key_and_at_most_a_quarter():
    for n in range(2, 20):
        one = torch.eye(n, dtype=torch.float64)[0]
        assert one.var(unbiased=False).item() == pytest.approx((n - 1) / n**2)
        assert (n - 1) / n**2 <= 0.25
        other = torch.rand(n, dtype=torch.float64)
        assert (other / other.sum()).var(unbiased=False) < one.var(unbiased=False)


def test_temperature_is_the_variance_of_the_gaussian_kernel(result):
    table = next(t for t in result.tables if "Gaussian" in t.title)
    for T, variance, deviation, unequal in table.rows:
        assert variance == 0
        assert (deviation > 0.01) == (T != 1)
        assert unequal > 0.01


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
    import attemper
    from attemper.lab import model as shipped

    model = shipped.load()
    text = (shipped.WEIGHTS.parents[1] / "text.txt").read_text(encoding="utf-8")
    windows = shipped.windows(shipped.encode(text), model.config.context)[:4]
    heads = [head for site in attemper.scan(model, [windows]).sites for head in site.heads]
    want = sum(head.normalized_entropy or 0.0 for head in heads) / len(heads)
    assert lab._shipped_share(lab._projections(), 1.0) == pytest.approx(want, rel=1e-5)
