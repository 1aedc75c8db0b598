"""Entropy: bounds, units, the bias of an eps, gradients, and the formulas of the articles that are wrong."""

from __future__ import annotations

import math

import pytest
import torch

from attemper.functional import entropy_of, gini
from attemper.lab.entropy import (
    COUNTS,
    EPSILONS,
    FORMS,
    ROWS,
    TRAINED,
    distributions,
    eps_bias,
    their_gini,
    value_and_gradient,
)
from tests.lab.printed import rows
from tests.support.experiments import Run

WEIGHTS = torch.tensor(TRAINED, dtype=torch.float64)
ENTROPIES = entropy_of(WEIGHTS)


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("entropy")


def test_the_twelve_rows_average_0_194_nats_and_are_0_033_off_the_target(result):
    table = result.table("twelve rows trained towards 0.2 nats, six keys")
    assert len(table.rows) == 13
    assert f"{table.rows[-1][2]:.3f} {table.rows[-1][3]:.3f}" == "0.194 0.033"
    assert "0.194 nats, 0.033 away" in table.see
    assert WEIGHTS.sum(-1).tolist() == pytest.approx([1] * 12, abs=5e-7), "as printed"
    by_loop = [-sum(p * math.log(p) for p in row) for row in TRAINED]
    # entropy_of divides by the sum, which the printed digits miss by 1e-8.
    assert list(table.column("entropy")[:12]) == pytest.approx(by_loop, rel=1e-6)


def test_bounds_are_0_and_log_n_in_nats_and_log2_n_in_bits(result):
    table = result.table("bounds of the entropy of n weights")
    assert set(table.column("one key")) == {0.0}
    for n, _, drawn, nats, bits, share in table.rows:
        assert nats == pytest.approx(math.log(n), rel=1e-14)
        assert bits == pytest.approx(math.log2(n), rel=1e-14)
        assert 0 < drawn < nats
        assert share == pytest.approx(100 * drawn / nats)


@pytest.mark.quick("0]")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_long_random_rows_stay_half_a_nat_below_log_n(seed: int, experiment: Run):
    """To first order by half their variance: log n + 1/2 for lse, less E_p[s] = 1."""
    table = experiment("entropy", seed).table("bounds of the entropy of n weights")
    for n, _, drawn, nats, *_ in rows(table):
        if n >= 512:
            assert nats - drawn == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.turns(4)
def test_an_eps_takes_log_of_1_plus_n_eps(n: int, eps: float):
    assert eps_bias(n, eps) == pytest.approx(math.log1p(n * eps), rel=1e-9, abs=1e-13)


GRADIENTS = "value and gradient of the usual forms"
OURS = "attemper.functional"
WITH_EPS = ("-sum p log(p + 1e-10)", "-sum p log(p + 1e-7)")
WITHOUT = ("-sum p log p", "torch.special.xlogy", "torch.special.entr")


def verdicts(result, row: str) -> dict[str, str]:
    """Form -> what the table says of its float32 gradient."""
    return {cells[1]: cells[3] for cells in rows(result.table(GRADIENTS)) if cells[0] == row}


def test_a_hidden_key_or_an_underflow_makes_nan_of_the_forms_without_eps_only(result):
    for row in ("[1, 2, hidden]", "[100, 0, -200]"):
        said = verdicts(result, row)
        assert {said[form] for form in WITHOUT} == {"NaN"}
        assert {value_and_gradient(FORMS[form], ROWS[row])[1] for form in WITHOUT} == {3}
        assert "NaN" not in {said[form] for form in (*WITH_EPS, OURS)}
    assert {verdicts(result, "[1, 2, hidden]")[form] for form in (*WITH_EPS, OURS)} == {"right"}


def test_a_sharp_row_is_wrong_with_and_without_eps_alike_and_a_less_sharp_one_right(result):
    """So it is no doing of the eps: the softmax that all forms share rounds."""
    assert {verdict for form, verdict in verdicts(result, "[20, 0, 0]").items() if form != OURS} == {"wrong"}
    assert set(verdicts(result, "[10, 0, 0]").values()) == {"right"}
    errors = {value_and_gradient(FORMS[form], ROWS["[20, 0, 0]"])[2] for form in (*WITHOUT, *WITH_EPS)}
    assert max(errors) - min(errors) < 1e-3
    assert all(verdicts(result, row)[OURS] == "right" for row in ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_ours_is_right_by_more_than_the_table_asks(row: str):
    _, missing, error = value_and_gradient(FORMS[OURS], ROWS[row])
    assert missing == 0
    # The weights of [100, 0, -200] are subnormal in float32, with a few bits.
    assert error < (0.02 if row == "[100, 0, -200]" else 1e-5)


def test_the_gini_of_the_article_has_the_wrong_sign(result):
    for name, weights in distributions().items():
        assert their_gini(weights).item() == pytest.approx(-gini(weights).item(), abs=1e-15), name
    table = result.table("a Gini coefficient with the wrong order")
    assert table.rows[0][1:] == (-0.875, 0.875)
    assert table.rows[-1][1:] == (0.0, 0.0)
