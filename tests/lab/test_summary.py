"""What is kept of a run: signs of trouble in its curves, thinner curves, and differences paired by seed."""

from __future__ import annotations

import math

import pytest

from attemper.lab.trained.summary import SIGNS, above, least, paired_difference, signs, thin_out

CALM = {
    "measured": [0, 10], "max_logits": [5.0, 99.0], "entropies": [[0.9, 0.06], [0.8, 0.05]],
    "losses": [2.0, 2.1] * 40, "gradient_norms": [1.0, 1.2] * 40,
}  # fmt: skip


def test_each_sign_has_the_first_step_that_gave_it_and_a_calm_run_gives_none():
    assert signs(CALM) == dict.fromkeys(SIGNS)
    found = signs(
        CALM
        | {"measured": [0, 10, 20], "max_logits": [5.0, 100.5, 200.0], "entropies": [[0.9], [0.5], [0.04]]}
        | {"losses": [2.0, 2.1] * 30 + [2.4, 9.0], "gradient_norms": [1.0, 1.2] * 26 + [5.4, 6.1, 99.0]}
    )
    assert found == {"max logit": 10, "entropy": 20, "gradient norm": 53, "loss": 60}


def test_a_number_that_is_none_is_a_sign_and_too_few_steps_before_are_not():
    found = signs(CALM | {"losses": [2.0, 900.0, math.nan], "gradient_norms": [1.0, 900.0], "max_logits": [5.0, None]})
    assert (found["loss"], found["gradient norm"], found["max logit"]) == (2, None, 10)
    assert above(math.nan, 1.0)
    assert not above(1.0, 1.0)
    assert least([0.5, None, math.nan, 0.2]) == 0.2
    assert least([]) == math.inf


def test_a_curve_keeps_about_thirty_points_the_mean_loss_and_the_largest_gradient():
    curve = {
        "measured": list(range(0, 600, 10)), "losses": [float(step) for step in range(600)],
        "gradient_norms": [1.0] * 305 + [7.0] + [1.0] * 294, "max_logits": [float(step) for step in range(60)],
        "entropies": [[0.5, 0.1 + step / 100] for step in range(60)],
    }  # fmt: skip
    thin = thin_out(curve)
    assert thin["steps"] == list(range(0, 600, 20))
    assert thin["losses"][1] == pytest.approx(sum(range(1, 21)) / 20)
    assert [step for step, norm in zip(thin["steps"], thin["gradient_norms"], strict=True) if norm > 1] == [320]
    assert thin["max_logits"][:3] == [0.0, 2.0, 4.0]
    assert thin["least_entropies"][1] == 0.12


def test_an_interval_of_pairs_is_that_of_student():
    found = paired_difference({0: 1.0, 1: 2.0, 2: 3.0, 9: 7.0}, {0: 1.5, 1: 1.5, 2: 1.5, 3: 0.0})
    assert found is not None
    assert found == pytest.approx((0.5, 4.302653 / 3**0.5), rel=1e-3)
    assert not found.told
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    same = paired_difference({seed: 1.0 + 0.1 * (seed % 2) for seed in range(20)}, dict.fromkeys(range(20), 0.0))
    assert same is not None
    assert same.told
