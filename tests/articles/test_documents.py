"""What the pages say of the articles' numbers, beyond what their runs print, each against a computation of its own."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

import attemper
from attemper import functional
from tests.articles.case import SNIPPETS
from tests.articles.cases import document_001, document_002, document_003, document_004
from tests.articles.cases.document_000 import CONDITIONAL, REGULARIZED, SCHEDULE
from tests.articles.cases.document_000_monitoring import ANOMALY, DEBUG, MONITOR
from tests.articles.cases.document_004_tools import ADAPTIVE, ANALYSIS, ENTMAX, GRADIENT, KERNEL, MIXED, OPTIMISATION
from tests.articles.runner import require_empty_weights, run_of
from tests.support.experiments import Run


def article(case):
    return run_of(case).names["article"]


def entropies(weights: Tensor) -> Tensor:
    """-sum p log p of every row, one at a time, in float64."""
    rows = [-sum(p * math.log(p) for p in row if p > 0) for row in weights.detach().double().flatten(0, -2).tolist()]
    return torch.tensor(rows).view(weights.shape[:-1])


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d*(?:e[-+]\d+)?", text)]


# --- document 000 ---


def test_the_last_token_changes_the_first_row_by_its_temperature_and_by_nothing_else() -> None:
    names = run_of(CONDITIONAL).names
    layer, found = names["layer"], []
    for tokens in (names["x"], names["other"]):
        weights, temperature = layer(tokens)[1][0, 0, 0], layer.temp_net(tokens.mean(1))[0, 0]
        found.append(((weights[0] / weights[1]).log() * temperature, temperature))
    (first, cold), (second, warm) = found
    assert abs(cold - warm) > 0.05
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_around_an_eager_model_the_loss_sums_over_layers_and_does_not_shift_labels() -> None:
    names = run_of(REGULARIZED).names
    outputs, tokens, losses = names["outputs"], names["tokens"], names["losses"]
    by_layer = [-0.01 * entropies(weights).mean().item() for weights in outputs.attentions]
    assert losses["ent_loss"].item() == pytest.approx(sum(by_layer), rel=1e-5)
    logits = outputs.logits.double().log_softmax(-1)
    own = [-logits[b, i, tokens[b, i]].item() for b in range(2) for i in range(12)]
    following = [-logits[b, i, tokens[b, i + 1]].item() for b in range(2) for i in range(11)]
    assert losses["task_loss"].item() == pytest.approx(np.mean(own), rel=1e-5)
    assert outputs.loss.item() == pytest.approx(np.mean(following), rel=1e-5)


def test_the_cosine_of_the_schedule_turned_round_goes_from_its_start_to_its_end() -> None:
    schedule = article(SCHEDULE).EntropySchedule()
    assert [2.0 - 1.9 * (1 - schedule._cosine_schedule(t)) for t in (0.0, 1.0)] == pytest.approx([2.0, 0.1])


def test_the_monitor_tells_mean_deviation_and_slope_and_watch_reads_the_eager_entropies() -> None:
    names = run_of(MONITOR).names
    scores = names["scores"]
    history = np.array([entropies(torch.softmax(t * scores, -1)).mean((0, 2)).tolist() for t in range(1, 6)])
    monitor = names["article"].AttentionEntropyMonitor(1, 4)
    for step in range(1, 6):
        monitor.analyze(0, torch.softmax(step * scores, dim=-1))
    stats = monitor.get_statistics()["layer_0"]
    np.testing.assert_allclose(stats["mean"], history.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["std"], history.std(0), rtol=1e-4)
    times = np.arange(5) - 2
    assert stats["trend"] == pytest.approx((times * history.mean(1)).sum() / (times**2).sum(), rel=1e-5)
    eager = names["model"](names["tokens"], output_attentions=True).attentions[0]
    assert names["ours"] == pytest.approx(entropies(eager).mean((0, 2)).tolist(), abs=1e-6)


def test_the_anomaly_detector_fits_one_length_only() -> None:
    detect = article(ANOMALY).detect_attention_anomaly
    alarmed = [n for n in range(2, 600) if detect({"layer": {"mean": math.log(n)}})]
    assert alarmed == [*range(2, 8), *range(275, 600)]
    assert math.ceil(512**0.9) == 275


def test_scan_reads_what_their_debugging_would() -> None:
    require_empty_weights()
    names = run_of(DEBUG).names
    for site, (_, theirs) in zip(names["scan"].sites, names["entropies"], strict=True):
        assert [head.entropy_nats for head in site.heads] == pytest.approx(theirs.tolist(), abs=1e-5)


# --- documents 001 to 003 ---


@pytest.mark.parametrize("case", [document_001.SIMPLE, document_001.FULL], ids=lambda case: case.name)
def test_the_examples_restored_print_what_the_article_says(case) -> None:
    run = run_of(case)
    said = (SNIPPETS / f"{case.name}.result.txt").read_text()
    assert re.sub(r"[-\d.e+\s]", "", run.printed) == re.sub(r"[-\d.e+\s]", "", said)
    # To the bit where exp is rounded as on the author's machine; elsewhere two steps of float32.
    assert numbers(run.printed) == pytest.approx(numbers(said), rel=2 * 2.0**-23, abs=0)


def test_scaled_scores_have_variance_1_and_5_9_percent_of_size_2_are_beyond_the_range() -> None:
    # Scores of a million pairs share 2,000 vectors: their variance is off by about sqrt(2 / 2000 / 64) d at most.
    assert article(document_001.SCALED).scores.var().item() == pytest.approx(64, rel=0.02)
    draws = 200_000
    query, key = torch.randn(2, draws, 2, dtype=torch.float64).unbind()
    share = ((query * key).sum(-1).abs() > 2 * math.sqrt(2)).double().mean().item()
    expected = math.exp(-2 * math.sqrt(2))
    assert abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / draws)


def test_the_ranges_of_the_articles_are_those_of_the_lab(experiment: Run) -> None:
    scaling = experiment("scaling")
    table = scaling.table("where 95% of the scores lie")
    ours = dict(zip(table.column("d"), table.column("unscaled, +-"), strict=True))
    assert [round(float(str(ours[d])), 1) for d in (2, 4, 512, 1024)] == [2.8, 4.0, 45.3, 64.0]
    three = scaling.table("three standard deviations, d = 64")
    assert three.column("three sigma, +-") == (24.0, 3.0, 0.375, 0.005859375)
    assert three.column("variance")[3] == 1 / 64**3
    assert run_of(document_003.WEIGHTS).outputs[0] == f"tensor({np.var([12, 8, 10], ddof=1)})".replace("4.0", "4.")


def test_the_printed_gradient_is_32_times_smaller_than_that_of_the_scores_that_softmax_sees() -> None:
    p = np.exp(np.array([100.0, 120.0, 150.0]) / 32 - 150 / 32)
    p = p / p.sum()
    printed = [0.0035553360357880592, -0.0010004914365708828, -0.002554844366386533]
    np.testing.assert_allclose(printed, p[0] * (np.array([1.0, 0.0, 0.0]) - p) / 32, rtol=1e-6)


def test_the_penalty_of_the_layer_is_that_of_the_entropy() -> None:
    names = run_of(document_002.CROSS).names
    expected = (entropies(names["weights"]) - 0.2).square().mean().item()
    assert names["layer"].losses[0].item() == pytest.approx(expected, rel=1e-5)
    assert (names["result"].stats.entropy - 0.2).square().mean().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow("takes many seconds")
def test_a_thousand_steps_bring_the_entropy_near_alpha() -> None:
    run = run_of(document_002.MODEL)
    assert run.printed.count("\nloss\n") == 1000
    entropy = run.names["entropy"]
    assert (entropy.mean() - 0.2).abs() < 0.02
    assert (entropy - 0.2).abs().mean() < 0.06
    first = float(re.findall(r"tensor\((\d\.\d+)", run.printed)[0])
    assert first == pytest.approx((math.log(6) - 0.2) ** 2, rel=0.01), "before training the rows are uniform"


def test_the_printed_weights_are_rows_of_mean_entropy_0_194() -> None:
    rows = np.array(numbers(run_of(document_002.WEIGHTS).printed)[-72:]).reshape(12, 6)
    np.testing.assert_allclose(rows.sum(1), 1, atol=1e-6)
    entropy = -(rows * np.log(rows)).sum(1)
    assert round(entropy.mean(), 3) == 0.194
    assert round(np.abs(entropy - 0.2).mean(), 3) == 0.033
    assert (round(entropy.min(), 2), round(entropy.max(), 2)) == (0.11, 0.23)


# --- document 004 ---


def test_softmax_and_attention_are_those_of_torch_until_a_row_sees_nothing() -> None:
    x = torch.randn(4, 6) * 1000
    theirs = article(document_004.ATTENTION).softmax(x)
    torch.testing.assert_close(theirs, x.softmax(-1))
    assert torch.equal(article(document_004.STABLE).numerically_stable_softmax(x), theirs)


def test_complexity_counts_every_operation() -> None:
    assert run_of(document_004.COMPLEXITY).here == f"{2 * (2 * 512 * 512 * 64) + 6 * 512 * 512} 33816576"


def test_kernel_attention_sees_the_future() -> None:
    q, k, v = torch.randn(3, 1, 4, 3).unbind()
    later = v.clone()
    later[0, -1] += 1
    attend = article(KERNEL).kernel_attention
    assert (attend(q, k, v)[0, 0] - attend(q, k, later)[0, 0]).abs().max() > 0.01


def test_entmax_is_right_with_2_tau_and_wrong_with_tau() -> None:
    run = run_of(ENTMAX)
    scores, tau = run.names["scores"], run.names["tau"]
    right = (scores / 2 - tau).clamp(min=0) ** 2
    assert right.sum().item() == pytest.approx(1, abs=1e-12)
    # The optimality of alpha-entmax: sqrt(p) is score / 2 less one threshold, on the support.
    assert (right[0].sqrt() - right[1].sqrt()).item() == pytest.approx((scores[0] - scores[1]).item() / 2, abs=1e-12)
    snippet = run.names["article"]
    snippet.threshold_and_support_for_entmax15 = lambda x, dim: 2 * tau
    assert snippet.entmax15(scores).tolist() == pytest.approx(right.tolist(), abs=1e-12)
    snippet.threshold_and_support_for_entmax15 = lambda x, dim: tau
    assert snippet.entmax15(scores).sum().item() == pytest.approx(0.6047, abs=1e-4)


def test_their_gini_is_the_right_one_with_the_wrong_sign_and_their_other_measures_are_right() -> None:
    analyze = article(ANALYSIS).analyze_attention_distribution
    weights = torch.cat((torch.rand(5, 8).softmax(-1), torch.eye(8)[:1], torch.full((1, 8), 1 / 8)))
    theirs = analyze(weights)
    torch.testing.assert_close(theirs["gini"], -functional.gini(weights), rtol=1e-4, atol=1e-6)
    assert functional.gini(weights)[5:].tolist() == pytest.approx([7 / 8, 0], abs=1e-6)
    for name, measure in (
        ("max_weight", "max_weight"),
        ("entropy", "entropy_of"),
        ("effective_tokens", "effective_tokens"),
    ):
        torch.testing.assert_close(theirs[name], getattr(functional, measure)(weights), rtol=1e-4, atol=1e-6)


def test_the_optimisation_stops_at_flash_attention() -> None:
    run = run_of(OPTIMISATION)
    given = (getattr(run.names["article"], name) for name in ("query", "key", "value"))
    expected = torch.nn.functional.scaled_dot_product_attention(*given)
    torch.testing.assert_close(run.names["result"].output, expected, rtol=1e-5, atol=1e-6)


def test_their_jacobian_is_silently_wrong_for_another_dimension() -> None:
    square = torch.randn(3, 3)
    ours = functional.softmax_jacobian(square, dim=0)
    assert (article(GRADIENT).softmax_gradient(square, dim=0) - ours).abs().max() > 0.01


def test_a_learned_temperature_without_a_floor_goes_below_0_and_ours_does_not() -> None:
    run = run_of(ADAPTIVE)
    assert run.outputs[0].split("\n")[2].startswith("temperature -0.0")
    temperatures = [float(line.split()[1].rstrip(",")) for line in run.here.split("\n")]
    assert temperatures == sorted(temperatures, reverse=True)
    assert min(temperatures) > 0


def test_mixed_precision_rounds_half_precision_once_and_float64_to_float32() -> None:
    mixed = article(MIXED).mixed_precision_softmax
    x = torch.randn(50, dtype=torch.float64)
    assert 1e-12 < (mixed(x) - x.softmax(-1)).abs().max().item() < 1e-7
    assert torch.equal(mixed(x.half()), x.half().float().softmax(-1).half())
    assert attemper.functional.softmax(x).dtype == torch.float64
