"""Documents 001, 002 and 003 in numbers: digit for digit where they are right, the correction where they are not."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from attemper import functional
from attemper.lab.experiment import Experiment
from tests.articles.case import SNIPPETS
from tests.articles.cases import document_001, document_002, document_003
from tests.articles.runner import run_of
from tests.support.experiments import Run


@pytest.fixture
def scaling(experiment: Run) -> Experiment:
    return experiment("scaling")


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d*(?:e[-+]\d+)?", text)]


@pytest.mark.parametrize("case", [document_001.SIMPLE, document_001.FULL], ids=lambda case: case.name)
def test_the_examples_fail_as_printed_and_restored_print_what_the_article_says(case) -> None:
    run = run_of(case)
    assert run.complaints == ["SyntaxError: invalid syntax"]
    article = (SNIPPETS / f"{case.name}.result.txt").read_text()
    assert re.sub(r"[-\d.e+\s]", "", run.printed) == re.sub(r"[-\d.e+\s]", "", article)
    # To the bit where exp is rounded as on the author's machine; elsewhere two steps of float32.
    assert numbers(run.printed) == pytest.approx(numbers(article), rel=2 * 2.0**-23, abs=0)


def test_softmax_of_10_20_30_is_nearly_one_hot() -> None:
    assert run_of(document_001.SOFTMAX).failure == "SyntaxError: invalid character '≈' (U+2248)"
    total = math.exp(-20) + math.exp(-10) + 1
    weights = functional.softmax(torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64)).tolist()
    assert weights == pytest.approx([math.exp(-20) / total, math.exp(-10) / total, 1 / total], rel=1e-12)
    assert [round(weight, 4) for weight in weights] == [0.0, 0.0, 1.0]


def test_scaled_scores_have_variance_1() -> None:
    run = run_of(document_001.SCALED)
    article = run.names["article"]
    assert run.complaints[0] == "NameError: name 'scores' is not defined"
    # Scores of a million pairs share 2,000 vectors: their variance is off by about sqrt(2 / 2000 / 64) d at most.
    assert article.scores.var().item() == pytest.approx(64, rel=0.02)
    assert article.scaled_scores.var().item() == pytest.approx(article.scores.var().item() / 64, rel=1e-5)


def test_the_range_of_the_table_is_two_standard_deviations_and_45_2_should_be_45_3(scaling: Experiment) -> None:
    ours = dict(zip(*(scaling.table("where 95% of the scores lie").column(name) for name in
                      ("d", "unscaled, +-")), strict=True))  # fmt: skip
    assert [round(float(ours[d]), 1) for d in (2, 4, 512, 1024)] == [2.8, 4.0, 45.3, 64.0]


def test_5_9_percent_of_scores_of_size_2_are_beyond_the_range() -> None:
    draws = 200_000
    query, key = torch.randn(2, draws, 2, dtype=torch.float64).unbind()
    share = ((query * key).sum(-1).abs() > 2 * math.sqrt(2)).double().mean().item()
    expected = math.exp(-2 * math.sqrt(2))
    assert abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / draws)
    assert run_of(document_001.TABLE).outputs[0].endswith("\n0.059")


def test_the_printed_gradient_is_32_times_smaller_than_that_of_the_scores_that_softmax_sees() -> None:
    p = np.exp(np.array([100.0, 120.0, 150.0]) / 32 - 150 / 32)
    p = p / p.sum()
    with_respect_to_scaled = p[0] * (np.array([1.0, 0.0, 0.0]) - p)
    printed = [0.0035553360357880592, -0.0010004914365708828, -0.002554844366386533]
    np.testing.assert_allclose(printed, with_respect_to_scaled / 32, rtol=1e-6)
    score = torch.tensor([100.0, 120.0, 150.0], dtype=torch.float64)
    np.testing.assert_allclose(functional.softmax_jacobian(score, temperature=32)[0], printed, rtol=1e-6)
    np.testing.assert_allclose(functional.softmax_jacobian(score / 32)[0], with_respect_to_scaled, rtol=1e-12)


def test_keras_snippets_fail_as_printed_and_then_ask_for_layers_and_tf() -> None:
    assert run_of(document_002.CROSS).complaints == [
        "SyntaxError: invalid syntax",
        "NameError: name 'layers' is not defined",
        "NameError: name 'tf' is not defined",
    ]
    assert run_of(document_002.FIT).complaints == ["SyntaxError: invalid syntax", "NameError: name 'tf' is not defined"]


def test_the_penalty_of_the_layer_is_that_of_the_entropy() -> None:
    names = run_of(document_002.CROSS).names
    rows = [-sum(p * math.log(p) for p in row) for row in names["weights"].detach().double().flatten(0, 2).tolist()]
    expected = np.mean([(h - 0.2) ** 2 for h in rows])
    assert names["layer"].losses[0].item() == pytest.approx(expected, rel=1e-5)
    assert (names["result"].stats.entropy - 0.2).square().mean().item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("einsum", [torch.einsum, np.einsum], ids=["torch", "numpy"])
def test_the_last_einsum_reads_a_diagonal_and_is_not_the_matrix_product(einsum) -> None:
    heads, kernel = torch.randn(1, 4, 3, 5), torch.randn(3, 5, 5)
    theirs = torch.as_tensor(einsum("abcd, cdd->abd", heads, kernel))
    loops = torch.tensor([[[sum(heads[0, b, c, d] * kernel[c, d, d] for c in range(3)) for d in range(5)]
                           for b in range(4)]])  # fmt: skip
    torch.testing.assert_close(theirs, loops)
    product = sum(heads[:, :, c] @ kernel[c] for c in range(3))
    assert (theirs - product).abs().max() > 0.1
    torch.testing.assert_close(torch.as_tensor(einsum("abcd, cde->abe", heads, kernel)), product)


def test_fit_prints_the_word_loss_and_no_loss() -> None:
    lines = run_of(document_002.FIT).outputs[0].split("\n")
    assert lines[-2:] == ["loss", "TypeError: not all arguments converted during string formatting"]


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
    np.testing.assert_allclose(run_of(document_002.WEIGHTS).names["entropy"].flatten(), entropy, rtol=1e-5)


def test_three_sigma_of_variance_1_64_is_0_375_and_64_cubed_is_3_8e_minus_6(scaling: Experiment) -> None:
    assert 3 * math.sqrt(1 / 64) == 0.375
    assert f"{1 / 64**3:.1e}" == "3.8e-06"
    assert round(3 * math.sqrt(1 / 64**3), 4) == 0.0059
    table = scaling.table("three standard deviations, d = 64")
    assert table.column("three sigma, +-") == (24.0, 3.0, 0.375, 0.005859375)
    assert table.column("variance")[3] == 1 / 64**3


def test_the_four_rows_of_weights_are_right_and_the_scores_have_variance_4() -> None:
    printed = [[0.867, 0.016, 0.117], [0.506, 0.186, 0.307], [0.376, 0.293, 0.332], [0.336, 0.331, 0.333]]
    for divisor, row in zip((1, 4, 16, 256), printed, strict=True):
        e = [math.exp(score / divisor) for score in (12, 8, 10)]
        assert [round(x / sum(e), 3) for x in e] == row
        ours = functional.softmax(torch.tensor([12.0, 8.0, 10.0], dtype=torch.float64), temperature=divisor)
        assert [round(x, 3) for x in ours.tolist()] == row
    assert np.var([12, 8, 10], ddof=1) == 4
    assert run_of(document_003.WEIGHTS).outputs[0] == "tensor(4.)"
