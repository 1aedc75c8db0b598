"""Signs of trouble in the curves of a run: the first step that gave each, and none where there is none."""

from __future__ import annotations

import math

from attemper.lab.trained.summary import SIGNS, above, least, signs

CALM = {
    "measured": [0, 10], "max_logits": [5.0, 99.0], "entropies": [[0.9, 0.06], [0.8, 0.05]],
    "losses": [2.0, 2.1] * 40, "gradient_norms": [1.0, 1.2] * 40,
}  # fmt: skip


def test_a_calm_run_gives_no_sign():
    assert signs(CALM) == dict.fromkeys(SIGNS)


def test_each_sign_has_the_first_step_that_gave_it():
    found = signs(
        CALM
        | {"measured": [0, 10, 20], "max_logits": [5.0, 100.5, 200.0], "entropies": [[0.9], [0.5], [0.04]]}
        | {"losses": [2.0, 2.1] * 30 + [2.4, 9.0], "gradient_norms": [1.0, 1.2] * 26 + [5.4, 6.1, 99.0]}
    )
    assert found == {"max logit": 10, "entropy": 20, "gradient norm": 53, "loss": 60}


def test_a_number_that_is_none_is_a_sign_and_too_few_steps_before_are_not():
    found = signs(CALM | {"losses": [2.0, 900.0, math.nan], "gradient_norms": [1.0, 900.0], "max_logits": [5.0, None]})
    assert (found["loss"], found["gradient norm"], found["max logit"]) == (2, None, 10)
    assert above(None, 1.0)
    assert above(math.nan, 1.0)
    assert not above(1.0, 1.0)


def test_the_least_entropy_leaves_out_what_is_no_number():
    assert least([0.5, None, math.nan, 0.2]) == 0.2
    assert least([]) == math.inf
