"""Gradients of entmax above alpha = 2, where a key of little weight moves fastest of all, against 800 digits."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

import attemper
from attemper import functional as F
from attemper.backends.native import rows as native_rows
from attemper.backends.normalizers import NORMALIZERS
from tests.support.fixtures import NATIVE

pytestmark = pytest.mark.each

ROWS = {
    "one small": [0.6, 0.4 - 1e-6, 1e-6, 0.0],
    "two small": [0.7, 0.3, 1e-4, 3e-5],
    "equal and small": [1.0, 1e-5, 1e-5, 0.0],
    "nearly one-hot": [0.9999, 1e-4, 0.0, 0.0],
    "even": [0.25, 0.25, 0.25, 0.25],
    "tiny": [1.0, 1e-12, 0.0, 0.0],
}
ABOVE = [0.3, -1.7, 2.1, 0.4]


def exact(weights: Tensor, above: Tensor, alpha: float) -> Tensor:
    with mpmath.workdps(800):
        w, g = ([mpmath.mpf(float(x)) for x in part] for part in (weights, above))
        r = [x ** (2 - mpmath.mpf(alpha)) if x > 0 else mpmath.mpf(0) for x in w]
        mean = sum((a * b for a, b in zip(r, g, strict=True)), mpmath.mpf(0)) / sum(r)
        return torch.tensor([float(a * (b - mean)) for a, b in zip(r, g, strict=True)], dtype=torch.float64)


def by_native(weights: Tensor, above: Tensor, alpha: float) -> Tensor:
    return native_rows.gradient(weights[None], above[None], "entmax", alpha)[0]


def by_torch(weights: Tensor, above: Tensor, alpha: float) -> Tensor:
    return NORMALIZERS["entmax"].gradient(weights, above, alpha, None)


WAYS: dict[str, tuple[Callable[[Tensor, Tensor, float], Tensor], torch.dtype]] = {
    "torch, float64": (by_torch, torch.float64),
    "torch, float32": (by_torch, torch.float32),
    **({"native": (by_native, torch.float32)} if NATIVE else {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alpha", [2.5, 3.0, 4.0, 5.0, 10.0, 30.0])
@pytest.mark.parametrize("row", ROWS)
def test_no_digit_cancels_beside_a_key_of_little_weight(row: str, alpha: float, way: str) -> None:
    function, dtype = WAYS[way]
    weights, above = (torch.tensor(part, dtype=dtype) for part in (ROWS[row], ABOVE))
    found, want = function(weights, above, alpha), exact(weights, above, alpha)
    # A power has about as many roundings as its exponent; what is beyond the type's numbers may be anything large.
    digits = 40 * max(alpha, 10) * torch.finfo(dtype).eps
    bounded = want.abs() < torch.finfo(dtype).max ** 0.5
    assert ((found.double() - want).abs() <= digits * want.abs().clamp(min=want[bounded].abs().max() * 1e-3))[
        bounded
    ].all()
    assert not found.isnan().any()


def test_the_gradient_of_scores_sums_to_nothing() -> None:
    scores = torch.tensor([0.0, -0.33323335]).requires_grad_()
    (found,) = torch.autograd.grad(F.entmax(scores, 4.0), scores, torch.tensor([0.3, -1.7]))
    assert float(found[0]) == pytest.approx(2.0004, rel=1e-3)
    assert float(found.sum()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("below", "alpha", "backend", "want"),
    [
        *((-0.33323335, 4.0, backend, pytest.approx(2.0004, rel=1e-3)) for backend in ("blocked", *NATIVE)),
        # A weight of 1e-5, r = 1e39: double precision would cancel.
        *((-0.1111, 10.0, backend, pytest.approx(2.0, rel=1e-2)) for backend in NATIVE),
    ],
)
def test_attention_passes_it_on(below: float, alpha: float, backend: str, want: object) -> None:
    found = key_gradient(below, alpha, backend)
    assert float(found[0]) == want
    assert float(found.sum()) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("backend", ["blocked", *NATIVE, "triton"])
@pytest.mark.usefixtures("interpreted")
def test_gradients_of_a_row_sum_to_nothing(backend: str) -> None:
    """Also where float32 does not know its smallest weight to more than a digit."""
    if backend == "triton":
        pytest.importorskip("triton")
    found = key_gradient(-0.3266, 4.0, backend)
    assert float(found.abs().max()) > 1
    assert float(found.sum().abs()) < 1e-6 * float(found.abs().max())


@pytest.mark.parametrize("backend", ["reference", "blocked", *NATIVE])
@pytest.mark.parametrize("below", [-0.3266, -0.3331, -0.33333, -0.333333])
def test_a_weight_that_float64_hardly_resolves_leaves_the_others_where_they_are(below: float, backend: str) -> None:
    query, key = torch.ones(1, 1, 1, 1), torch.tensor([0.0, below]).view(1, 1, 2, 1)
    output, _ = attemper.attention(
        query, key, torch.eye(2)[None, None], scale=1.0, normalizer=attemper.nn.Entmax(4.0), backend=backend
    )
    with mpmath.workdps(50):
        gap = 1 + 3 * mpmath.mpf(float(torch.tensor(below)))  # w_2^3 = w_1^3 - 1 + gap, w_1 + w_2 = 1
        small = mpmath.findroot(lambda w: w**3 - (1 - w) ** 3 + 1 - gap, gap / 3)
    assert float(output[..., 1]) == pytest.approx(float(small), abs=1e-5)
    assert float(output.sum()) == pytest.approx(1, abs=1e-5)


def key_gradient(below: float, alpha: float, backend: str) -> Tensor:
    """[2]: of keys that score 0 and ``below``."""
    query = torch.ones(1, 1, 6, 1)
    key = torch.tensor([0.0, below]).view(1, 1, 2, 1).requires_grad_()
    value = torch.tensor([0.3, -1.7]).view(1, 1, 2, 1)
    output, _ = attemper.attention(query, key, value, scale=1.0, normalizer=attemper.nn.Entmax(alpha), backend=backend)
    output.sum().backward()
    assert key.grad is not None
    return key.grad.flatten() / 6
