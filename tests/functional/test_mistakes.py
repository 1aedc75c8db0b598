"""What every function of scores or of weights refuses alike, with what was expected and what came."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attemper import InputError
from attemper import functional as F

pytestmark = pytest.mark.each

Z = torch.zeros(2, 3)
OF_SCORES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("softmax", "entropy", "logit_variance", "statistics", "softmax_jacobian", "kl_to_uniform"), ()),
    **dict.fromkeys(("softmax_plus_one", "scalable_softmax", "sigmoid", "sparsemax", "entmax15", "entmax"), ()),
    **dict.fromkeys(("entmax_iterations", "entropy_slope"), ()),
    "topk_softmax": (2,), "threshold_softmax": (0.1,), "softmax_with_sink": (0.0,),
}  # fmt: skip
"""Functions of scores, and what they take beside them."""
OF_WEIGHTS = ("entropy_of", "effective_tokens", "gini", "max_weight")

TENSORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "ints": (torch.zeros(3, dtype=torch.int64), {}, r"\({kind}\) must be a floating tensor, got torch\.int64"),
    "a list": ([1.0, 2.0], {}, r"\({kind}\) must be a floating tensor, got list"),
    "no dimension": (torch.tensor(1.0), {}, r"\({kind}\) must have a dimension of keys, got a tensor without dim"),
    "no such dimension": (Z, {"dim": 2}, r"\(dim=...\) must be an int from -2 to 1 for a tensor \[2, 3\], got 2\. It"),
    "none from the end": (Z, {"dim": -3}, r"\(dim=...\) must be an int from -2 to 1 for a tensor \[2, 3\], got -3"),
    "two dimensions": (Z, {"dim": [1, 0]}, r"\(dim=...\) must be an int .* got \[1, 0\]\. It is the dimension of the"),
}
TEMPERATURES: dict[str, tuple[Any, str]] = {
    "0": (0.0, r"\(temperature=...\) must be above 0, got 0\.0\. Temperature divides the scores"),
    "NaN": (math.nan, r"\(temperature=...\) must be above 0, got nan"),
    "True": (True, r"\(temperature=...\) must be a number, got bool\. Temperature divides"),
    "a list": ([1.0], r"\(temperature=...\) must be a number, got list"),
    "too many": (torch.ones(3), r"\(temperature\) must be broadcastable to \[2\], the scores .*, got \[3\]\. Temper"),
}


@pytest.mark.parametrize("what", TENSORS)
@pytest.mark.parametrize("name", [*OF_SCORES, *OF_WEIGHTS])
def test_tensors_and_dimensions_that_do_not_fit_are_refused(name: str, what: str):
    tensor, options, message = TENSORS[what]
    message = message.replace("{kind}", "weights" if name in OF_WEIGHTS else "scores")
    with pytest.raises(InputError, match=f"^{name}{message}"):
        getattr(F, name)(tensor, *OF_SCORES.get(name, ()), **options)


@pytest.mark.parametrize("what", TEMPERATURES)
@pytest.mark.parametrize("name", OF_SCORES)
def test_temperatures_that_do_not_fit_are_refused(name: str, what: str):
    temperature, message = TEMPERATURES[what]
    with pytest.raises(InputError, match=f"^{name}{message}"):
        getattr(F, name)(Z, *OF_SCORES[name], temperature=temperature)
