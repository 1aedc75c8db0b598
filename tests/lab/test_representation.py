"""Temperature on the shipped model: the measures by hand, the tempering, and what the tables say."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from attemper import attention_statistics
from attemper.errors import InputError
from attemper.lab import representation
from attemper.lab.experiment import Experiment
from attemper.lab.model import ByteConfig, ByteModel, SeenCalls, bits_per_byte, load, shipped_text, windows
from attemper.lab.representation import (
    behaviour,
    calibration_error,
    difference,
    direction,
    effective_rank,
    less,
    mean_cosine,
    reliability,
    tempered_copy,
)
from tests.support.experiments import Run


@pytest.fixture(scope="module")
def model() -> ByteModel:
    return load().double()


@pytest.fixture(scope="module")
def short() -> Experiment:
    """Four temperatures and two windows: the same code in a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(representation, "TEMPERATURES", (0.25, 1.0, 2.0, 8.0))
        patch.setattr(representation, "shipped_text", lambda: shipped_text()[: 2 * 256 + 1])
        return representation.representation()


# The measures


def test_the_effective_rank_counts_equal_directions_and_of_unequal_ones_lies_between():
    for rank in (1, 3, 8):
        vectors = torch.zeros(20, 8, dtype=torch.float64)
        vectors[:rank, :rank] = 5 * torch.eye(rank)
        turn = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q
        assert effective_rank(vectors @ turn).item() == pytest.approx(rank, rel=1e-12)
    want = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))).item() == pytest.approx(want)


def test_the_mean_cosine_is_that_of_all_pairs():
    vectors = torch.randn(2, 7, 5, dtype=torch.float64)
    pairs = torch.nn.functional.cosine_similarity(vectors[:, :, None], vectors[:, None], dim=-1)
    want = (pairs.sum((1, 2)) - 7) / 42
    torch.testing.assert_close(mean_cosine(vectors), want, rtol=0, atol=1e-14)
    assert mean_cosine(torch.ones(4, 3, dtype=torch.float64)).item() == pytest.approx(1, rel=1e-14)
    assert mean_cosine(torch.tensor([[1.0, 0.0], [-2.0, 0.0]])).item() == -1


def test_the_calibration_error_by_hand_and_confidence_at_the_edges_in_the_outer_bins():
    confidence = torch.tensor([0.9, 0.95, 0.3, 0.3, 0.05], dtype=torch.float64)
    hits = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    rows = reliability(confidence, hits, bins=10)
    assert [count for *_, count in rows] == [1, 2, 1, 1]
    want = (0.05 + 2 * abs(0.3 - 0.5) + abs(0.9 - 1) + 0.95) / 5
    assert calibration_error(confidence, hits, bins=10) == pytest.approx(want, rel=1e-12)
    rows = reliability(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), bins=15)
    assert rows == [(0.0, 0.0, 1), (1.0, 1.0, 1)]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 2, 3], "rises"),
        ([3, 1], "falls"),
        ([1, 2, 0], "rises, then falls"),
        ([1, 1, 1], "stays"),
        ([1, 1, 2], "rises"),
    ],
)
def test_a_direction_in_words(values: list[float], words: str):
    assert direction(values) == words


# Tempering


@pytest.mark.parametrize("temperature", [0.5, 3.0, math.inf])
def test_a_tempered_model_attends_at_that_temperature_in_every_layer(model: ByteModel, temperature: float):
    ids = windows(shipped_text(), 64)[:2]
    with torch.no_grad(), SeenCalls() as own:
        model(ids)
    changed = tempered_copy(model, temperature)
    with torch.no_grad(), SeenCalls() as seen:
        changed(ids)
    (q, k, v), (own_q, own_k, own_v) = seen.calls[0], own.calls[0]
    assert torch.equal(k, own_k)
    assert torch.equal(v, own_v)
    got = attention_statistics(q, k, is_causal=True).entropy
    want = attention_statistics(own_q, own_k, is_causal=True, temperature=temperature).entropy
    # The rotation rounds to float32.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_tempering_leaves_the_model_and_everything_but_queries_as_they_are(model: ByteModel):
    before = copy.deepcopy(model.state_dict())
    changed = tempered_copy(model, 2.0).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert torch.equal(changed[name], tensor / 2 if name.endswith("q_proj.weight") else tensor), name


def test_a_model_whose_queries_are_normalised_cannot_be_tempered_so():
    with pytest.raises(InputError, match=r"tempered_copy\(model\): queries .* are normalised.*qk_norm=False"):
        tempered_copy(ByteModel(ByteConfig(layers=1, heads=1, width=8, qk_norm=True)), 2.0)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan])
def test_a_temperature_must_be_above_0(model: ByteModel, temperature: float):
    with pytest.raises(InputError, match=r"tempered_copy\(temperature=\.\.\.\) must be above 0"):
        tempered_copy(model, temperature)


def test_the_loss_is_the_bits_per_byte_of_the_model(model: ByteModel):
    ids = shipped_text()[: 2 * 256 + 1]
    found = behaviour(model, ids, 1.0)
    # bits_per_byte takes the logarithm in float32.
    assert found.bits_per_byte == pytest.approx(bits_per_byte(model, ids), rel=1e-6)
    assert found.ranks.shape == found.cosines.shape == (4, 2)
    assert found.losses.shape == found.confidence.shape == found.hits.shape == (2, 256)
    assert len(found.entropies) == 4
    assert ((found.ranks >= 1) & (found.ranks <= 128)).all()


# The experiment


def columns(result, title: str, *names: str) -> list[list[float]]:
    return [[float(value) for value in result.table(title).column(name)] for name in names]


OUTPUTS = "attention outputs over temperature, mean of the layers"
PREDICTIONS = "predictions of the next byte"
RANKS, COSINES = "effective rank of each layer, directions", "mean cosine of each layer"
CLAIMS = "what is said of temperature, and this model"


def test_sentences_and_verdicts_follow_from_the_numbers(short: Experiment):
    result = short
    entropy, rank, cosine = columns(result, OUTPUTS, "normalised entropy", "effective rank", "mean cosine")
    see = result.table(OUTPUTS).see
    assert f"entropy {direction(entropy)}, effective rank {direction(rank)} ({rank[0]:.1f} to {rank[-1]:.1f})" in see
    assert f"mean cosine {direction(cosine)}" in see
    loss, over, accuracy, confidence = columns(result, PREDICTIONS, "loss", "over-confidence", "accuracy", "confidence")
    assert f"T = {(0.25, 1, 2, 8)[loss.index(min(loss))]:g} has the lowest loss" in result.table(PREDICTIONS).see
    assert over == pytest.approx([c - a for c, a in zip(confidence, accuracy, strict=True)], abs=1e-15)
    claims = dict(zip(result.table(CLAIMS).column("said"), result.table(CLAIMS).column("holds"), strict=True))
    assert claims == {
        "high T: outputs less alike": held(cosine[1:]),
        "high T: more directions": held([-value for value in rank[1:]]),
        "low T: more accurate": "yes" if accuracy[0] > accuracy[1] else "no",
        "low T: more over-confident": "yes" if over[0] > over[1] else "no",
        "high T: less over-confident": held(over[1:]),
    }


def held(values: list[float]) -> str:
    """Of the model's own, the advised high temperature's and the highest one's."""
    own, advised, highest = values
    if (advised < own) == (highest < own):
        return "yes" if advised < own else "no"
    return "at 2 only" if advised < own else "at the end only"


def test_a_difference_of_the_same_windows_has_the_error_of_the_differences():
    one, other = torch.tensor([1.0, 5.0, 9.0]), torch.tensor([1.5, 5.5, 9.5])
    assert difference(one, other) == (-0.5, 0.0)
    assert less(one, other) == "0.5000 +- 0.0000 less"
    mean, error = difference(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0]))
    assert (mean, error) == (1.0, pytest.approx(1.0))
    assert less(torch.tensor([2.0, 0.0]), torch.tensor([0.0, 0.0])) == "1.0000 +- 1.0000 more"


@pytest.mark.slow("takes many seconds")
def test_on_the_shipped_model_rank_falls_and_cosine_rises_with_temperature_the_opposite_of_what_is_said(
    experiment: Run,
):
    result = experiment("representation")
    entropy, rank, cosine = columns(result, OUTPUTS, "normalised entropy", "effective rank", "mean cosine")
    assert [direction(values) for values in (entropy, rank, cosine)] == ["rises", "falls", "rises"]
    assert rank[0] - rank[-1] > 50
    loss, over = columns(result, PREDICTIONS, "loss", "over-confidence")
    assert representation.TEMPERATURES[loss.index(min(loss))] == 1.2
    assert direction(over) == "falls, then rises"
    assert result.table(CLAIMS).column("holds") == ("no", "no", "no", "yes", "at 2 only")
    assert "in 4 of 4 layers" in result.table(RANKS).see
    assert "in 4 of 4 layers" in result.table(COSINES).see
    see = result.table(PREDICTIONS).see
    assert "Of those tried, T = 1.2 has the lowest loss, 0.0081 +- 0.0047 less than at T = 1" in see
    assert "least at T = 2 of those tried: 0.0007 +- 0.0053 less than at T = 1.5, 0.0137 +- 0.0084 less" in see
