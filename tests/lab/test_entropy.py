"""Entropy: bounds, units, the bias of an eps, gradients, and the formulas of the articles that are wrong."""

from __future__ import annotations

import math

import numpy as np
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
    with_eps,
)
from tests.lab.printed import FromItsCode, Printed, rows
from tests.support.experiments import Run

REGULARISED, SOFTMAX = "entropy regularisation", "softmax analysis"
WEIGHTS = torch.tensor(TRAINED, dtype=torch.float64)
ENTROPIES = entropy_of(WEIGHTS)
ONE, EVEN = torch.eye(6, dtype=torch.float64)[0], torch.full((6,), 1 / 6, dtype=torch.float64)

FROM_CODE = [
    FromItsCode(SOFTMAX, "Gini of one key of six", float(their_gini(ONE)), float(gini(ONE)), right=False),
    FromItsCode(SOFTMAX, "Gini of equal weights", float(their_gini(EVEN)), float(gini(EVEN)), right=True),
]
PRINTED = [
    *(Printed(REGULARISED, f"sum of row {row}", "1.000000", float(w.sum())) for row, w in enumerate(WEIGHTS)),
    Printed(REGULARISED, "alpha, and what its rows average", "0.2", float(ENTROPIES.mean())),
    Printed(REGULARISED, "smallest entropy, one-hot", "0", float(entropy_of(ONE))),
]  # fmt: skip


@pytest.fixture(scope="module")
def result(experiment: Run):
    return experiment("entropy")


@pytest.mark.parametrize("number", FROM_CODE, ids=str)
def test_a_number_that_the_printed_code_gives_is_ours_or_is_wrong(number: FromItsCode):
    number.check()


@pytest.mark.parametrize("number", PRINTED, ids=str)
def test_a_printed_number_is_ours_or_is_corrected(number: Printed):
    number.check()


def test_the_articles_eps_changes_no_shown_digit_of_the_twelve_rows():
    torch.testing.assert_close(with_eps(WEIGHTS, 1e-7).mean(), ENTROPIES.mean(), rtol=0, atol=1e-6)


def test_the_twelve_rows_average_0_194_nats_and_are_0_033_off_the_target(result):
    table = result.table("twelve rows trained towards 0.2 nats, six keys")
    assert len(table.rows) == 13
    assert f"{table.rows[-1][2]:.3f} {table.rows[-1][3]:.3f}" == "0.194 0.033"
    assert "0.194 nats, 0.033 away" in table.see
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_long_random_rows_stay_half_a_nat_below_log_n(seed: int, experiment: Run):
    """To first order by half their variance: log n + 1/2 for lse, less E_p[s] = 1."""
    table = experiment("entropy", seed).table("bounds of the entropy of n weights")
    for n, _, drawn, nats, *_ in rows(table):
        if n >= 512:
            assert nats - drawn == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("n", COUNTS)
def test_an_eps_takes_log_of_1_plus_n_eps(n: int, eps: float):
    assert eps_bias(n, eps) == pytest.approx(math.log1p(n * eps), rel=1e-9, abs=1e-13)


def test_the_bias_at_131072_keys_is_0_12_and_0_84_nats_and_below_0_001_at_64(result):
    table = next(t for t in result.tables if "too small by" in t.title)
    place = table.column("n").index(131_072)
    assert f"{table.column('eps 1e-06')[place]:.2f}" == "0.12"
    assert f"{table.column('eps 1e-05')[place]:.2f}" == "0.84"
    assert max(table.rows[table.column("n").index(64)][2:]) < 0.001


def test_half_precision_loses_the_eps_itself(result):
    table = result.table("-sum p log(p + eps) of one key with all the weight")
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["float16"][3] == "NaN"
    assert all(value < 0 for value in rows["float64"][:4])
    assert {row[-1] for row in table.rows} == {0.0}


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


def test_every_form_of_weights_is_given_the_same_softmax_once():
    for name in (*WITHOUT, *WITH_EPS):
        scores = torch.tensor([1.0, 2.0], requires_grad=True)
        value, nodes, seen = FORMS[name](scores), [], set()
        nodes.append(value.grad_fn)
        while nodes:
            node = nodes.pop()
            if node is not None and node not in seen:
                seen.add(node)
                nodes += [parent for parent, _ in node.next_functions]
        assert [node.name() for node in seen if "Softmax" in node.name()] == ["SoftmaxBackward0"], name


def test_in_float64_an_eps_of_1e_7_costs_15_percent_and_the_others_next_to_nothing(result):
    table = result.table(GRADIENTS)
    off = {cells[1]: cells[4] for cells in rows(table) if cells[0] == "[20, 0, 0]"}
    assert f"{off.pop('-sum p log(p + 1e-7)'):.0f}" == "15"
    assert f"{off.pop('-sum p log(p + 1e-10)'):.4f}" == "0.0055"
    assert set(off.values()) == {0.0}
    far = {cells[1]: cells[4] for cells in rows(table) if cells[0] == "[100, 0, -200]"}
    assert far.pop(OURS) == 0.0
    assert set(far.values()) == {100.0}
    assert "1e-7 costs 15%, 1e-10 0.0055%" in table.see


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


def test_the_alarm_says_low_or_nothing_of_the_most_diffuse_row(result):
    table = next(t for t in result.tables if t.title.startswith("an alarm"))
    said = dict(zip(table.column("n"), table.column("it says"), strict=True))
    assert [n for n, told in said.items() if told == "low"] == [4, 6]
    assert [n for n, told in said.items() if told == "high"] == [512, 4096, 131_072]
    assert math.log(7) < 2 < math.log(8)
    assert math.log(274) < 0.9 * math.log(512) < math.log(275)
    assert "nothing up to 274" in table.see


def test_the_alarm_as_printed_compares_an_array_to_a_number():
    """Its mean is an array with one entry a head."""
    mean_ent = np.array([[0.5, 3.0], [0.7, 2.0]]).mean(axis=0)
    with pytest.raises(ValueError, match="truth value of an array"):
        bool(mean_ent < 2.0)


def test_e_to_the_entropy_is_at_least_the_effective_tokens(result):
    table = result.table("simple rows of eight keys")
    for name, _, exponential, effective, largest, _ in table.rows:
        assert 1 / largest <= effective * (1 + 1e-12) <= exponential * (1 + 2e-12) <= 8 * (1 + 3e-12)
        even = name in ("one key", "two keys, equal", "all equal")
        assert (exponential == pytest.approx(effective)) == even, name
