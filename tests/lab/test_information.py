"""Information over temperature: the curves, the shipped model's heads, and the two readings of a bound."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from attemper.functional import dense_weights, entropy, entropy_of, mutual_information
from attemper.lab import information
from attemper.lab.information import GIBBS, TEMPERATURES, gibbs, model_at, random_curves, read
from attemper.lab.model import SeenCalls, bits_per_byte, load, shipped_text
from attemper.lab.representation import direction
from tests.lab.printed import rows
from tests.support.experiments import Run

RATES = "mutual information of query and key"
DISTORTIONS = "distortion of the output, against T = 1"


@pytest.fixture(scope="module")
def model():
    return load().double()


@pytest.fixture(scope="module")
def heads(model):
    return read(model)


@pytest.fixture(scope="module")
def result():
    """With few temperatures of the model, and windows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(information, "MODEL_TEMPERATURES", (0.25, 1.0))
        patch.setattr(information, "WINDOWS", 2)
        return information.information()


# Rates


@pytest.mark.slow("takes many seconds")
def test_the_rate_of_random_queries_falls_with_temperature_and_that_of_a_shared_key_rises_first(result):
    ways = {name: direction(result.table(RATES).column(name)) for name in ("random", "shared key")}
    assert ways == {"random": "falls", "shared key": "rises, then falls"}
    see = result.table(RATES).see
    assert "random falls; shared key rises, then falls" in see
    for column in result.table(RATES).columns[3:]:
        way = direction(result.table(RATES).column(column.name))
        assert f"{column.name} {way}" in see
        assert way == "falls"


def test_every_rate_lies_between_0_and_its_bound(result):
    for column in result.table(RATES).columns[1:]:
        keys = information.TOKENS if column.name in ("random", "shared key") else 128
        assert all(0 <= value <= math.log(keys) for value in result.table(RATES).column(column.name))


def test_the_distortion_is_0_at_temperature_1_and_grows_on_both_sides(result):
    at_one = TEMPERATURES.index(1.0)
    for column in result.table(DISTORTIONS).columns[1:]:
        values = result.table(DISTORTIONS).column(column.name)
        assert values[at_one] == 0
        assert direction(values[at_one:]) == "rises"
        # With one shared key nothing is left to move below T = 0.1.
        assert all(a >= b for a, b in pairwise(values[: at_one + 1]))


def test_the_rate_of_random_rows_is_that_of_a_short_loop():
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(256, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    p = torch.softmax(query @ key.T / 8 / 0.5, -1)
    want = entropy_of(p.mean(0)) - entropy_of(p).mean()
    got = random_curves(5)["random"].rate[TEMPERATURES.index(0.5)]
    assert got.item() == pytest.approx(want.item(), rel=1e-12)


# The shipped model


def test_the_scores_are_those_that_the_model_attends_with(model, heads):
    """Weights on the common keys, renormalised, from the model's own causal attention."""
    ids = shipped_text()[:256][None]
    with torch.no_grad(), SeenCalls() as seen:
        model(ids)
    query, key, _ = seen.calls[2]
    weights = dense_weights(query, key, is_causal=True)[0, :, 128:, :128]
    torch.testing.assert_close(heads.share[2].shape, weights.shape[:1])
    torch.testing.assert_close(entropy(heads.scores[2, 0]), entropy_of(weights), rtol=1e-9, atol=1e-9)


def test_information_of_causal_rows_is_that_of_their_dense_weights(model, heads):
    ids = shipped_text()[: 256 * information.WINDOWS].view(-1, 256)
    with torch.no_grad(), SeenCalls() as seen:
        model(ids)
    p: Tensor = dense_weights(*seen.calls[1][:2], is_causal=True)
    want = (entropy_of(p.mean(2)) - entropy_of(p).mean(2)).mean(0)
    torch.testing.assert_close(heads.causal[1], want, rtol=1e-9, atol=1e-12)


def test_at_its_own_temperature_the_model_has_its_own_loss_and_scores(model, heads):
    found = model_at(model, 1.0)
    spread, rate = found.entropy, found.information
    ids = shipped_text()[: 256 * information.WINDOWS + 1]
    assert found.losses.shape == (information.WINDOWS,)
    assert found.loss == pytest.approx(bits_per_byte(model, ids), rel=1e-6)
    assert rate == pytest.approx(mutual_information(heads.scores).mean().item(), rel=1e-9)
    assert spread == pytest.approx(entropy(heads.scores).mean().item(), rel=1e-9)


@pytest.mark.slow("takes many seconds")
def test_the_temperature_of_most_information_is_not_that_of_the_lowest_loss(experiment: Run):
    table = experiment("information").table(
        "the temperature that maximises information, and the one that minimises the loss"
    )
    points, rates, losses = (
        [float(str(cell)) for cell in table.column(name)] for name in ("T", "mean mutual information", "loss")
    )
    most, least = points[rates.index(max(rates))], points[losses.index(min(losses))]
    assert (most, least) == (0.25, 1.2)
    assert "Of those tried, information is largest at T = 0.25, the lowest tried" in table.see
    assert "lowest at T = 1.2, 0.0121 +- 0.0102 less than at T = 1 (paired over windows)" in table.see
    assert "At T = 0.25 the loss is 0.2359 +- 0.0487 more than there" in table.see
    spread, divergence = (
        [float(str(cell)) for cell in table.column(name)] for name in ("mean entropy", "mean KL to uniform")
    )
    assert [a + b for a, b in zip(spread, divergence, strict=True)] == pytest.approx([math.log(128)] * len(points))


# The bound


@pytest.mark.quick("0]", "1]")
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_with_the_divergence_holds_and_that_with_the_entropy_does_not(seed: int):
    found = gibbs(seed)
    assert all(proven >= 0.5 for *_, proven, _ in found)
    assert [told < 0.5 for *_, told in found][:2] == [True, True]


def test_the_sentence_counts_what_the_table_shows(result):
    table = result.tables[-1]
    above = table.column("above 0.5")
    held, fails = above.count("both") + above.count("with KL"), above.count("with KL") + above.count("neither")
    for *_, proven, told, said in rows(table):
        assert said == {(1, 1): "both", (1, 0): "with KL"}[proven >= 0.5, told >= 0.5]
    assert f"holds at {held} of {len(GIBBS)}" in table.see
    assert f"below 0.5 at {fails} of them" in table.see
    assert (held, fails) == (len(GIBBS), 3)
