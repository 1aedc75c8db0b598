"""Document 000 in numbers: what its snippets get right and wrong, each against a computation of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import attemper
from tests.articles.cases.document_000 import CONDITIONAL, LAYERWISE, REGULARIZED, SCHEDULE
from tests.articles.cases.document_000_monitoring import ANOMALY, DEBUG, MONITOR
from tests.articles.runner import require_empty_weights, run_of


def entropies(weights: Tensor) -> Tensor:
    """-sum p log p of every row, one at a time, in float64."""
    rows = [-sum(p * math.log(p) for p in row if p > 0) for row in weights.detach().double().flatten(0, -2).tolist()]
    return torch.tensor(rows).view(weights.shape[:-1])


def test_the_conditional_temperature_stops_at_a_name_that_only_init_knows() -> None:
    run = run_of(CONDITIONAL)
    assert run.complaints == ["NameError: name 'torch' is not defined", "NameError: name 'F' is not defined"]
    assert run.outputs[0] == "NameError: name 'd_model' is not defined"


def test_the_last_token_changes_the_first_row_by_its_temperature_and_by_nothing_else() -> None:
    names = run_of(CONDITIONAL).names
    layer, found = names["layer"], []
    for tokens in (names["x"], names["other"]):
        weights, temperature = layer(tokens)[1][0, 0, 0], layer.temp_net(tokens.mean(1))[0, 0]
        found.append(((weights[0] / weights[1]).log() * temperature, temperature))
    (first, cold), (second, warm) = found
    assert abs(cold - warm) > 0.05
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_softplus_underflows_to_a_temperature_of_0_and_every_weight_to_nan() -> None:
    assert torch.nn.functional.softplus(torch.tensor(-100.0)) > 0
    assert torch.nn.functional.softplus(torch.tensor(-104.0)) == 0
    assert run_of(CONDITIONAL).outputs[2] == "[[0.0, 0.0, 0.0, 0.0]] True"


def test_attention_with_their_temperature_gives_their_weights() -> None:
    names = run_of(CONDITIONAL).names
    ours = attemper.functional.dense_weights(names["q"], names["k"], temperature=names["temperature"])
    torch.testing.assert_close(ours, names["layer"](names["x"])[1], rtol=1e-5, atol=1e-7)


def test_their_u_is_high_in_the_middle_and_its_ends_never_reach_the_high_temperature() -> None:
    schedule = run_of(LAYERWISE).names["article"].LayerwiseTemperatureSchedule
    layers = [schedule(5, pattern="u").get_temperature(layer) for layer in range(5)]
    assert layers == [0.75, 0.875, 1.0, 0.875, 0.75]
    as_said = [0.5 + 0.5 * abs(2 * layer / 4 - 1) for layer in range(5)]
    assert as_said == [1.0, 0.75, 0.5, 0.75, 1.0]
    ratios = [schedule(5, pattern="exp").get_temperature(layer + 1) / schedule(5, pattern="exp").get_temperature(layer)
              for layer in range(4)]  # fmt: skip
    assert ratios == pytest.approx([2**0.25] * 4)


def test_the_loss_is_minus_the_mean_entropy_and_nan_in_float16() -> None:
    run = run_of(REGULARIZED)
    loss, weights = run.names["article"].entropy_regularized_attention_loss, run.names["weights"]
    assert loss(weights).item() == pytest.approx(-0.01 * entropies(weights).mean().item(), rel=1e-6)
    one_hot = torch.tensor([[1.0, 0.0]])
    assert loss(one_hot) == 0
    assert loss(one_hot.half()).isnan()


def test_around_an_sdpa_model_the_regularisation_is_the_integer_0() -> None:
    require_empty_weights()
    assert run_of(REGULARIZED).outputs[2] == "0"


def test_around_an_eager_model_it_sums_over_layers_and_does_not_shift_labels() -> None:
    names = run_of(REGULARIZED).names
    outputs, tokens, losses = names["outputs"], names["tokens"], names["losses"]
    by_layer = [-0.01 * entropies(weights).mean().item() for weights in outputs.attentions]
    assert losses["ent_loss"].item() == pytest.approx(sum(by_layer), rel=1e-5)
    logits = outputs.logits.double().log_softmax(-1)
    own = [-logits[b, i, tokens[b, i]].item() for b in range(2) for i in range(12)]
    following = [-logits[b, i, tokens[b, i + 1]].item() for b in range(2) for i in range(11)]
    assert losses["task_loss"].item() == pytest.approx(np.mean(own), rel=1e-5)
    assert outputs.loss.item() == pytest.approx(np.mean(following), rel=1e-5)


def test_the_penalty_of_attention_has_the_gradient_of_their_loss() -> None:
    names = run_of(REGULARIZED).names
    q, k, v = (names[name].clone().requires_grad_() for name in "qkv")
    stats = attemper.attention(q, k, v, stats=("entropy",)).stats
    assert stats is not None
    (ours,) = torch.autograd.grad(-0.01 * stats.entropy.mean(), q)
    weights = torch.softmax(q @ k.mT / math.sqrt(8), dim=-1)
    (theirs,) = torch.autograd.grad(names["article"].entropy_regularized_attention_loss(weights), q)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-8)


def test_the_schedule_starts_at_0_falls_to_its_end_after_warm_up_and_rises_back() -> None:
    schedule = run_of(SCHEDULE).names["article"].EntropySchedule()
    steps = [schedule.get_temperature(step, 100) for step in (0, 9, 10, 55, 100)]
    assert steps == pytest.approx([0.0, 1.8, 0.1, 1.05, 2.0])
    mended = [2.0 - 1.9 * (1 - schedule._cosine_schedule(t)) for t in (0.0, 1.0)]
    assert mended == pytest.approx([2.0, 0.1])
    assert run_of(SCHEDULE).outputs[1] == "tensor([nan, nan])"
    *ours, refused = run_of(SCHEDULE).here.strip().split("\n")
    assert ours == ["0 1.0", "5 1.5", "10 2.0", "55 1.05", "100 0.1"]
    assert refused.startswith("InputError: softmax(temperature=...) must be above 0, got 0.0.")


def test_the_third_strategy_of_the_schedule_does_not_exist() -> None:
    schedule = run_of(SCHEDULE).names["article"].EntropySchedule
    assert schedule("contrastive").get_temperature(1, 2) == schedule("no such strategy").get_temperature(1, 2) == 1.0


def test_the_monitor_tells_mean_deviation_and_slope() -> None:
    run = run_of(MONITOR)
    scores = run.names["scores"]
    history = np.array([entropies(torch.softmax(t * scores, -1)).mean((0, 2)).tolist() for t in range(1, 6)])
    monitor = run.names["article"].AttentionEntropyMonitor(1, 4)
    for step in range(1, 6):
        monitor.analyze(0, torch.softmax(step * scores, dim=-1))
    stats = monitor.get_statistics()["layer_0"]
    np.testing.assert_allclose(stats["mean"], history.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["std"], history.std(0), rtol=1e-4)
    times = np.arange(5) - 2
    assert stats["trend"] == pytest.approx((times * history.mean(1)).sum() / (times**2).sum(), rel=1e-5)
    assert run.outputs[1] == "LinAlgError: SVD did not converge in Linear Least Squares"


def test_watch_reads_the_entropies_of_the_eager_weights() -> None:
    names = run_of(MONITOR).names
    eager = names["model"](names["tokens"], output_attentions=True).attentions[0]
    assert names["ours"] == pytest.approx(entropies(eager).mean((0, 2)).tolist(), abs=1e-6)


def test_the_anomaly_detector_fails_on_means_per_head() -> None:
    ambiguous, unformatted, _ = run_of(ANOMALY).outputs
    assert ambiguous == (
        "ValueError: The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()"
    )
    assert unformatted == "TypeError: unsupported format string passed to numpy.ndarray.__format__"


def test_the_anomaly_detector_fits_one_length_only() -> None:
    detect = run_of(ANOMALY).names["article"].detect_attention_anomaly
    alarmed = [n for n in range(2, 600) if detect({"layer": {"mean": math.log(n)}})]
    assert alarmed == [*range(2, 8), *range(275, 600)]
    assert math.ceil(512**0.9) == 275
    assert run_of(ANOMALY).here == "diffuse 1.0"


def test_debugging_is_silent_on_sdpa_fails_on_eager_and_leaves_eval_mode() -> None:
    require_empty_weights()
    run = run_of(DEBUG)
    assert run.outputs[0] == "[]"
    assert run.outputs[1] == "NameError: name 'attention_entropy' is not defined"
    assert run.outputs[2].endswith("\nFalse")
    assert run.here.startswith("True\n")


def test_scan_reads_what_their_debugging_would() -> None:
    names = run_of(DEBUG).names
    for site, (_, theirs) in zip(names["scan"].sites, names["entropies"], strict=True):
        assert [head.entropy_nats for head in site.heads] == pytest.approx(theirs.tolist(), abs=1e-5)
