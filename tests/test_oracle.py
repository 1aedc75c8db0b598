"""The oracle against mpmath, against numbers worked by hand, and its gradients against finite differences of itself."""

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

from tests.support import cases, oracle, oracle_gradients

SMALL = [case for case in cases.CASES if case.dtype == torch.float32]


def numbers_of(*tensors: Any, **options: Any) -> dict[str, float]:
    found = oracle.forward(oracle.inputs(*tensors, **options))
    return {name: array.item() for name, array in found.items() if array.size == 1}


def test_two_equal_scores_by_hand():
    value = torch.tensor([[1.0], [3.0]])[None, None]
    got = numbers_of(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 2, 2), value)
    assert got["output"] == 2
    assert math.isclose(got["entropy"], math.log(2))
    assert math.isclose(got["lse"], math.log(2))
    assert (got["effective_tokens"], got["max_weight"], got["gini"], got["mean_distance"]) == (2, 0.5, 0, 0.5)
    assert (got["logit_variance"], got["first_token_mass"], got["visible_keys"]) == (0, 0.5, 2)


def test_one_score_above_another_by_hand():
    query, key = (torch.tensor([[rows]], dtype=torch.float64) for rows in ([[math.log(3)]], [[1.0], [0.0]]))
    got = numbers_of(query, key, sink_logits=torch.zeros(1, dtype=torch.float64))
    assert math.isclose(got["lse"], math.log(4))
    assert math.isclose(got["max_weight"], 0.75)
    assert math.isclose(got["entropy"], -0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert math.isclose(got["effective_tokens"], 1.6)
    assert math.isclose(got["gini"], 0.25)
    assert math.isclose(got["logit_variance"], 0.75 * 0.25 * math.log(3) ** 2)
    assert math.isclose(got["mass"], 0.8)
    assert math.isclose(got["entropy_with_sink"], -sum(p * math.log(p) for p in (0.6, 0.2, 0.2)))


@pytest.mark.parametrize("gap", [0.1, 5, 20, 50, 300])
def test_a_row_agrees_with_mpmath(gap: float):
    scores = [0.0, *np.linspace(-gap, -2 * gap, 30)]
    row = oracle.Row(
        np.arange(31), np.array(scores, oracle.FLOAT), np.array(scores, oracle.FLOAT), np.ones(31), np.ones(31),
        np.arange(31) < 2, np.arange(31), None,
    )  # fmt: skip
    got = oracle.row_statistics(row)
    with mpmath.workdps(60):
        e = [mpmath.exp(s) for s in scores]
        p = [x / mpmath.fsum(e) for x in e]
        mean = mpmath.fsum(x * s for x, s in zip(p, scores, strict=True))
        want = {
            "lse": mpmath.log(mpmath.fsum(e)),
            "mean_logit": mean,
            "logit_variance": mpmath.fsum(x * (s - mean) ** 2 for x, s in zip(p, scores, strict=True)),
            "effective_tokens": 1 / mpmath.fsum(x * x for x in p),
            "first_token_mass": p[0] + p[1],
        }
    for name, value in want.items():
        assert abs(got[name] - oracle.FLOAT(mpmath.nstr(value, 30))) <= 1e-17 * max(1, abs(float(value))) * 31, name
    assert abs(got["entropy"] - oracle.precise_entropy(scores)) < 2**-51  # the double that precise_entropy returns


@pytest.mark.quick("all at once", "sink, empty rows")
@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_the_gradients_are_those_of_finite_differences(case: cases.Case):
    call = cases.oracle_call(case)
    above = {name: oracle.numbers(g) for name, g in cases.answer(case).upstream.items()}
    grads, sizes = oracle_gradients.gradients(call, above)

    def terms() -> list[oracle.Array]:
        """Of the loss, entry by entry: what a step leaves alone must not round what it moves."""
        results = oracle.forward(call)
        return [above[n] * np.where(np.isfinite(results[n]), results[n], 0) for n in above]

    arrays = {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "attn_mask": call.bias,
        "sink_logits": call.sink,
    }
    generator = np.random.default_rng(0)
    for name in oracle_gradients.GRADIENTS:
        if arrays.get(name) is None:
            continue
        array = np.array(arrays[name])
        attribute = {"attn_mask": "bias", "sink_logits": "sink"}.get(name, name)
        hidden = ~np.isfinite(array) | (np.abs(array) > 1e6)
        direction = np.where(hidden, 0, generator.standard_normal(array.shape))
        step = oracle.FLOAT(1e-6)
        both = []
        for sign in (1, -1):
            setattr(call, attribute, array + sign * step * direction)
            both.append(terms())
        setattr(call, attribute, arrays[name])
        moved = sum((up - down).sum() for up, down in zip(*both, strict=True))
        numeric = float(moved / (2 * step))
        analytic = float((grads[name] * direction).sum())
        scale = float((sizes[name] * np.abs(direction)).sum())
        # Central differences: step^2 times a third derivative, plus 1e-19 / step of rounding, relative to the terms.
        assert abs(numeric - analytic) <= 1e-8 * max(scale, 1.0), f"{name}: {numeric} and {analytic} (terms {scale})"
        assert np.all(np.abs(grads[name]) <= sizes[name] * (1 + 1e-12)), f"{name}: a gradient exceeds its terms"


def test_the_temperature_gradient_is_that_of_finite_differences():
    case = cases.Case(
        "oracle temperature", make=lambda case: {"temperature": torch.rand(2, 4, 7) + 0.5}, names=("entropy",)
    )
    call = cases.oracle_call(case)
    above = {name: oracle.numbers(g) for name, g in cases.answer(case).upstream.items()}
    grads, _ = oracle_gradients.gradients(call, above)
    temperature, losses = call.temperature, []
    for sign in (1, -1):
        call.temperature = temperature * (1 + sign * 1e-6)
        results = oracle.forward(call)
        losses.append(sum((above[n] * results[n]).sum() for n in above))
    numeric = float((losses[0] - losses[1]) / 2e-6)
    assert abs(numeric - float((grads["temperature"] * temperature).sum())) < 1e-7
