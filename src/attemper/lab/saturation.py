r"""What large scores do to a softmax: its weights, its gradients, its Jacobian.

The Jacobian of p = softmax(s) is :math:`J = \mathrm{diag}(p) - p p^T`: every gradient that reaches the scores has been
multiplied by it. As one weight approaches 1 all of J approaches 0, and so does what the layer can learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile

import torch
from torch import Tensor

from attemper.functional import entropy, max_weight, softmax, softmax_jacobian
from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings, one_thread

LARGE = (100.0, 120.0, 150.0)
"""Scores as they come from a head of size :data:`LARGE_SIZE`, not scaled."""
LARGE_SIZE = 1024
STEEP = (10.0, 20.0, 30.0)
GAPS = (0.0, 1.0, 2.0, 5.0, 10.0, 16.0, 17.5, 20.0, 50.0, 100.0, 110.0)
"""Between two scores, in logits."""
SIZES = (2, 4, 16, 64, 512, 1024)
KEYS = 64
ROWS = 400
SPREADS = (0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""Standard deviations of the scores of a row, in logits."""


@one_thread()
def saturation(*, seed: int = 0) -> Experiment:
    """Weights and gradients of large scores, and the norm of the Jacobian against the spread of the scores."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, KEYS, generator=generator, dtype=torch.float64)
    norms = {spread: jacobian_norms(rows * spread) for spread in SPREADS}
    return Experiment(
        name="saturation",
        question="what do large scores do to a softmax, and to the gradient that passes it?",
        seed=seed,
        tables=(_steep(), _weights(), _gradients(), _gaps(), _spreads(norms), _sizes(rows)),
        charts=(_norm_chart(norms), _gap_chart()),
    )


def jacobian_norms(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Frobenius and spectral norm of the Jacobian of each row's softmax, [rows] each."""
    jacobian = softmax_jacobian(scores)
    # Symmetric and positive semidefinite: the spectral norm is the largest eigenvalue.
    return torch.linalg.matrix_norm(jacobian), torch.linalg.eigvalsh(jacobian)[..., -1]


def gradient_of_first(
    scores: Tensor, divisor: float = 1.0, through: Callable[[Tensor], Tensor] = softmax
) -> tuple[Tensor, Tensor]:
    """Gradient of the first weight of ``through(scores / divisor)``, by autograd: to scores, to divided ones."""
    scores = scores.clone().requires_grad_()
    divided = scores / divisor
    to_scores, to_divided = torch.autograd.grad(through(divided)[0], (scores, divided))
    return to_scores, to_divided


def usual(scores: Tensor) -> Tensor:
    """torch's softmax, through which models and the article send their gradients; ours rounds otherwise."""
    return torch.softmax(scores, dim=-1)


def _steep() -> Table:
    weights = softmax(torch.tensor(STEEP, dtype=torch.float64)).tolist()
    return Table(
        title=f"softmax of {list(map(int, STEEP))}",
        see=f"Rounded: 0, 0, 1. The two other keys together keep {sum(weights[:2]):.2g} of the weight.",
        columns=headings("key", "score [logit]", "weight"),
        rows=tuple((key, *cells) for key, cells in enumerate(zip(STEEP, weights, strict=True), 1)),
    )


def _weights() -> Table:
    # In float32, as models compute them: the digits are part of what is shown.
    scores, divisor = torch.tensor(LARGE), math.sqrt(LARGE_SIZE)
    columns = (scores, softmax(scores), scores / divisor, softmax(scores / divisor))
    return Table(
        title=f"softmax of {list(map(int, LARGE))} in float32, d = {LARGE_SIZE}",
        see="Unscaled, the weight of one key is 1 to float32. Divided by sqrt(d) = 32, all three keys count.",
        columns=headings("key", "score [logit]", "weight", "score / 32 [logit]", "weight, scaled"),
        rows=tuple((key, *cells) for key, cells in enumerate(zip(*(c.tolist() for c in columns), strict=True), 1)),
    )


def _gradients() -> Table:
    scores, divisor = torch.tensor(LARGE), math.sqrt(LARGE_SIZE)
    unscaled, _ = gradient_of_first(scores, through=usual)
    to_scores, to_divided = gradient_of_first(scores, divisor, through=usual)
    return Table(
        title="gradient of the first weight, torch.softmax in float32",
        see=(
            "Which scores it is taken to matters: to the scaled ones, which the softmax is given, it is 32 times what "
            "arrives at the unscaled ones, where the division has shrunk it again."
        ),
        columns=headings(
            "key",
            "unscaled softmax [1/logit]",
            "scaled, to unscaled scores [1/logit]",
            "scaled, to scaled scores [1/logit]",
        ),
        rows=tuple(
            (key, *cells)
            for key, cells in enumerate(zip(unscaled.tolist(), to_scores.tolist(), to_divided.tolist(), strict=True), 1)
        ),
    )


def _gaps() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for gap in GAPS:
        scores = torch.tensor([gap, 0.0], dtype=torch.float64)
        norm = float(jacobian_norms(scores)[1])
        larger, _ = gradient_of_first(scores.float(), through=usual)
        ours, _ = gradient_of_first(scores.float())
        rows.append((gap, float(softmax(scores)[1]), norm, float(larger[0]), float(ours[0])))
    return Table(
        title="two keys, a gap apart",
        see=(
            "In float32 torch.softmax gives the larger weight no gradient once it rounds to 1, near a gap of 17. Ours "
            "keeps the gradient until it underflows, beyond 100."
        ),
        columns=headings(
            "gap [logit]",
            "smaller weight",
            "spectral norm of J [1/logit]",
            "gradient, torch float32 [1/logit]",
            "gradient, ours float32 [1/logit]",
        ),
        rows=tuple(rows),
    )


def _mean_remark(norms: dict[float, tuple[Tensor, Tensor]]) -> str:
    """From which spread on the mean is not that of a common row."""
    apart = list(takewhile(lambda s: norms[s][1].median() < norms[s][1].mean() / 2, reversed(norms)))
    assert apart, "in saturated rows a few rows make the mean"
    return (
        f"From {apart[-1]:g} on the median row has less than half the mean, which rows with two near-equal scores hold "
        "up."
    )


def _spreads(norms: dict[float, tuple[Tensor, Tensor]]) -> Table:
    return Table(
        title=f"norm of the Jacobian against the spread of the scores, {KEYS} keys, {ROWS} rows",
        see=(
            "It is largest at a spread of 3 to 4: equal weights pass 1/n of a gradient, saturated ones nothing. "
            f"{_mean_remark(norms)}"
        ),
        columns=headings(
            "standard deviation [logit]",
            "Frobenius, mean [1/logit]",
            "spectral, mean [1/logit]",
            "standard error [1/logit]",
            "spectral, median [1/logit]",
        ),
        rows=tuple(
            (
                spread,
                float(frobenius.mean()),
                float(spectral.mean()),
                float(spectral.std() / math.sqrt(ROWS)),
                float(spectral.median()),
            )
            for spread, (frobenius, spectral) in norms.items()
        ),
    )


def _sizes(rows: Tensor) -> Table:
    cells: list[tuple[Cell, ...]] = []
    for size in SIZES:
        unscaled = rows * math.sqrt(size)
        _, spectral = jacobian_norms(unscaled)
        cells.append(
            (
                size,
                math.sqrt(size),
                float(max_weight(softmax(unscaled)).mean()),
                float(entropy(unscaled).mean()),
                float(spectral.median()),
            )
        )
    _, spectral = jacobian_norms(rows)
    scaled = ("any, scaled", 1.0, float(max_weight(softmax(rows)).mean()), float(entropy(rows).mean()))
    return Table(
        title=f"random rows of each head size, {KEYS} keys",
        see=(
            "Unscaled scores of unit-variance queries and keys spread by sqrt(d): the larger the head, the nearer to "
            "one-hot. Divided by sqrt(d), every head size is the last row."
        ),
        columns=headings(
            "d",
            "standard deviation [logit]",
            "largest weight, mean",
            "entropy, mean [nats]",
            "spectral, median [1/logit]",
        ),
        rows=(*cells, (*scaled, float(spectral.median()))),
    )


def _norm_chart(norms: dict[float, tuple[Tensor, Tensor]]) -> Chart:
    def curve(name: str, values: list[Tensor]) -> Series:
        return Series(name, SPREADS, tuple(float(value) for value in values))

    return Chart(
        f"Jacobian of a softmax over {KEYS} keys",
        Axis("standard deviation of the scores (logit)", "log"),
        Axis("norm (1/logit)", "log"),
        (
            curve("Frobenius, mean", [frobenius.mean() for frobenius, _ in norms.values()]),
            curve("spectral, mean", [spectral.mean() for _, spectral in norms.values()]),
            curve("spectral, median", [spectral.median() for _, spectral in norms.values()]),
        ),
    )


def _gap_chart() -> Chart:
    gaps = tuple(float(gap) for gap in range(31))
    rows = [torch.tensor([gap, 0.0], dtype=torch.float64) for gap in gaps]
    in_float32 = [float(gradient_of_first(row.float(), through=usual)[0][0]) for row in rows]
    return Chart(
        "gradient of the larger of two weights",
        Axis("gap between the scores (logit)"),
        Axis("gradient (1/logit)", "log"),
        (
            Series("exact, p (1 - p)", gaps, tuple(float(gradient_of_first(row)[0][0]) for row in rows)),
            # Exactly 0 has no place on a logarithmic axis: the curve ends there.
            Series("torch.softmax in float32, 0 where it ends", gaps, tuple(value or None for value in in_float32)),
        ),
    )
