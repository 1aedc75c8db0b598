r"""How much attention tells of the key that it picks, over temperature, and what a PAC-Bayes bound says of its entropy.

Mutual information :math:`I = H(\bar p) - \overline{H(p_i)}` of query and key, the rate of a rate-distortion curve whose
parameter is temperature; and a bound :math:`L \le \hat L + \sqrt{(\mathrm{KL} + \log(2 \sqrt m / \delta)) / (2 m)}`
read in two ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attemper.functional import (
    RateDistortion,
    dense_weights,
    entropy,
    kl_to_uniform,
    mutual_information,
    pac_bayes_bound,
    rate_distortion,
    softmax,
)
from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings, one_thread
from attemper.lab.model import ByteModel, SeenCalls, load, shipped_text, windows
from attemper.lab.representation import direction, less, tempered_copy

TEMPERATURES = (0.05, 0.1, 0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 4.0, 8.0, 16.0)
TOKENS, SIZE = 256, 64
"""Random queries and keys, and the size of their head."""
SHARED = 8.0
"""What one key has more than the others, for every query, in logits: as an attention sink has."""
WINDOWS = 4
"""Of the shipped text, read by the shipped model."""
MODEL_TEMPERATURES = (0.25, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 4.0)
HYPOTHESES, EXAMPLES, DELTA = 1 << 18, 50, 0.05
GIBBS = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 100.0)
"""Temperatures of the posterior over hypotheses, in errors."""


@dataclass(frozen=True)
class Heads:
    """Queries of the later half of each window over the keys of the earlier half, which all of them see."""

    scores: Tensor
    """[L, W, H, N/2, N/2] at the model's own temperature."""
    values: Tensor
    """[L, W, H, N/2, D]"""
    share: Tensor
    """Weight that these queries give to these keys, [L, H]."""
    causal: Tensor
    """Mutual information of all rows under the causal mask, [L, H]."""


@one_thread()
def information(*, seed: int = 0) -> Experiment:
    """Mutual information, rate and distortion over temperature; two readings of a bound."""
    model = load().double()
    heads = read(model)
    curves = random_curves(seed) | head_curves(heads)
    at = {T: model_at(model, T) for T in MODEL_TEMPERATURES}
    bounds = gibbs(seed)
    return Experiment(
        name="information",
        question="does a sharper attention carry more information, and does its entropy make a bound worse or better?",
        seed=seed,
        tables=(
            _rates(curves),
            _distortions(curves),
            _heads(heads),
            _optimum(at, heads.scores.shape[-1]),
            _bounds(bounds),
        ),
        charts=(_rate_chart(curves), _curve_chart(curves), _optimum_chart(at), _bound_chart(bounds)),
    )


def random_curves(seed: int) -> dict[str, RateDistortion]:
    """Of normal queries, keys and values, and of the same where one key has more for every query."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(TOKENS, SIZE, generator=generator, dtype=torch.float64) for _ in range(3))
    scores = query @ key.T / math.sqrt(SIZE)
    shared = scores.clone()
    shared[:, 0] += SHARED
    return {
        "random": rate_distortion(scores, value, TEMPERATURES),
        "shared key": rate_distortion(shared, value, TEMPERATURES),
    }


def head_curves(heads: Heads) -> dict[str, RateDistortion]:
    """Of the two heads that give most weight to the keys which all rows see; means over windows."""
    chosen = heads.share.flatten().argsort(descending=True, stable=True)[:2].tolist()
    curves = {}
    for place in chosen:
        layer, head = divmod(place, heads.share.shape[1])
        curve = rate_distortion(heads.scores[layer, :, head], heads.values[layer, :, head], TEMPERATURES)
        curves[f"layer {layer} head {head}"] = RateDistortion(
            curve.temperature, curve.rate.mean(0), curve.distortion.mean(0)
        )
    return curves


def read(model: ByteModel) -> Heads:
    """The shipped model's heads on the first windows of the shipped text."""
    length = model.config.context
    with torch.no_grad(), SeenCalls() as seen:
        model(windows(shipped_text(), length)[:WINDOWS])
    query, key, value = (torch.stack(parts) for parts in zip(*seen.calls, strict=True))
    half, scale = length // 2, 1 / math.sqrt(query.shape[-1])
    weights = torch.stack([dense_weights(q, k, is_causal=True) for q, k in zip(query, key, strict=True)])
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    causal = mutual_information((query @ key.mT * scale).masked_fill(hidden, -math.inf))
    return Heads(
        scores=query[..., half:, :] @ key[..., :half, :].mT * scale,
        values=value[..., :half, :],
        share=weights[..., half:, :half].sum(-1).mean((1, 3)),
        causal=causal.mean(1),
    )


@dataclass(frozen=True)
class AtTemperature:
    """The shipped model on the first windows of the shipped text."""

    entropy: float
    """Mean over heads, windows and rows, in nats."""
    information: float
    """Mean over heads and windows, in nats."""
    losses: Tensor
    """Of each window, bits a byte, [W]."""

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


def model_at(model: ByteModel, temperature: float) -> AtTemperature:
    """What attention tells, and how well the model predicts, when every score is divided by ``temperature``."""
    changed, length = tempered_copy(model, temperature), model.config.context
    read = windows(shipped_text(), length + 1, stride=length)[:WINDOWS]
    with torch.no_grad(), SeenCalls() as seen:
        losses = -softmax(changed(read[:, :-1])).gather(-1, read[:, 1:, None])[..., 0].log2()
    half = length // 2
    scores = torch.stack([q[..., half:, :] @ k[..., :half, :].mT / math.sqrt(q.shape[-1]) for q, k, _ in seen.calls])
    return AtTemperature(float(entropy(scores).mean()), float(mutual_information(scores).mean()), losses.mean(1))


def gibbs(seed: int) -> list[tuple[float, ...]]:
    r"""(T, entropy, KL, loss on the examples, bound with KL, "bound" with the entropy in its place) per temperature.

    One query, :data:`HYPOTHESES` keys, each a coin that predicts :data:`EXAMPLES` coins: its score is minus its
    errors, and whatever the weights, the expected loss is 1/2.
    """
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randint(0, 2, (EXAMPLES, HYPOTHESES), generator=generator, dtype=torch.uint8)
    errors = wrong.sum(0, dtype=torch.int64).double()
    rows = []
    for temperature in GIBBS:
        weights = softmax(-errors, temperature=temperature)
        loss = float((weights * errors).sum() / EXAMPLES)
        spread, divergence = (float(f(-errors, temperature=temperature)) for f in (entropy, kl_to_uniform))
        proven, told = (float(pac_bayes_bound(loss, cost, EXAMPLES, delta=DELTA)) for cost in (divergence, spread))
        rows.append((temperature, spread, divergence, loss, proven, told))
    return rows


def _by_temperature(curves: dict[str, RateDistortion], name: str) -> tuple[tuple[float, ...], ...]:
    """Rows of a table: temperature, then "rate" or "distortion" of each curve."""
    columns = (getattr(curve, name).tolist() for curve in curves.values())
    return tuple(zip(TEMPERATURES, *columns, strict=True))


def _rates(curves: dict[str, RateDistortion]) -> Table:
    ways = [f"{name} {direction(curve.rate.tolist())}" for name, curve in curves.items()]
    return Table(
        title="mutual information of query and key",
        see=(
            f"With temperature: {'; '.join(ways)}. A low temperature gives little information only where all rows pick "
            "the same key."
        ),
        columns=headings("T", *(f"{name} [nats]" for name in curves)),
        rows=_by_temperature(curves, "rate"),
    )


def _distortions(curves: dict[str, RateDistortion]) -> Table:
    sharp = max(float(curve.distortion[0]) for curve in curves.values())
    return Table(
        title="distortion of the output, against T = 1",
        see=(
            f"0 at T = 1, and it grows on both sides: at T = {TEMPERATURES[0]:g} the output is another one, too (up to "
            f"{sharp:.2g} of its squared size). A higher rate is not a better output of this head."
        ),
        columns=headings("T", *curves),
        rows=_by_temperature(curves, "distortion"),
    )


def _heads(heads: Heads) -> Table:
    half = heads.scores.shape[-1]
    length = 2 * half
    mask = mutual_information(
        torch.zeros(length, length, dtype=torch.float64).masked_fill(
            torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf
        )
    )
    at = {T: mutual_information(heads.scores, temperature=T).mean(1) for T in (0.25, 1.0, 4.0)}
    falling = int(((at[0.25] > at[1.0]) & (at[1.0] > at[4.0])).sum())
    rows: list[tuple[Cell, ...]] = [
        (
            layer,
            head,
            float(heads.share[layer, head]),
            *(float(one[layer, head]) for one in at.values()),
            float(heads.causal[layer, head]),
        )
        for layer in range(len(heads.share))
        for head in range(heads.share.shape[1])
    ]
    return Table(
        title=f"the shipped model: queries {half} to {length - 1} over keys 0 to {half - 1}",
        see=(
            f"Information falls from T = 0.25 to 1 to 4 in {falling} of {len(rows)} heads. All rows see these keys. "
            f"Under the causal mask they do not: equal scores would give {float(mask):.3f} nats in the last column."
        ),
        columns=headings(
            "layer",
            "head",
            "weight on these keys",
            *(f"I at T = {T:g} [nats]" for T in at),
            "I of all causal rows [nats]",
        ),
        rows=tuple(rows),
    )


def _optimum(at: dict[float, AtTemperature], keys: int) -> Table:
    most = max(at, key=lambda T: at[T].information)
    best = min(at, key=lambda T: at[T].loss)
    edge = ", the lowest tried" if most == min(at) else ", the highest tried" if most == max(at) else ""
    against = "" if best == 1.0 else f", {less(at[best].losses, at[1.0].losses)} than at T = 1 (paired over windows)"
    return Table(
        title="the temperature that maximises information, and the one that minimises the loss",
        see=(
            f"Of those tried, information is largest at T = {most:g}{edge}, and the loss on the first {WINDOWS} "
            f"windows of the text lowest at T = {best:g}{against}. At T = {most:g} the loss is "
            f"{less(at[most].losses, at[best].losses)} than there: most information is not least loss."
        ),
        columns=headings(
            "T",
            "mean entropy [nats]",
            "mean KL to uniform [nats]",
            "mean mutual information [nats]",
            "loss [bits/byte]",
        ),
        rows=tuple((T, one.entropy, math.log(keys) - one.entropy, one.information, one.loss) for T, one in at.items()),
    )


def _bounds(found: list[tuple[float, ...]]) -> Table:
    broken = [row for row in found if row[5] < 0.5]
    held = sum(row[4] >= 0.5 for row in found)
    above = {(True, True): "both", (True, False): "with KL", (False, True): "with H", (False, False): "neither"}
    return Table(
        title=f"PAC-Bayes: {HYPOTHESES} keys that know nothing, {EXAMPLES} examples, expected loss 0.5",
        see=(
            f"The bound with KL = log n - H holds at {held} of {len(found)} temperatures; a low entropy costs more. "
            f"With H in place of KL, as if a high entropy cost more, the number is below 0.5 at {len(broken)} of them: "
            "it is not a bound."
        ),
        columns=headings(
            "T [errors]",
            "H [nats]",
            "KL = log n - H [nats]",
            "loss on examples",
            "bound with KL",
            "same with H",
            "above 0.5",
        ),
        rows=tuple((*row, above[row[4] >= 0.5, row[5] >= 0.5]) for row in found),
    )


def _rate_chart(curves: dict[str, RateDistortion]) -> Chart:
    return Chart(
        "rate",
        Axis("temperature T (no unit)", "log"),
        Axis("mutual information (nats)"),
        tuple(Series(name, TEMPERATURES, tuple(curve.rate.tolist())) for name, curve in curves.items()),
    )


def _curve_chart(curves: dict[str, RateDistortion]) -> Chart:
    series = []
    for name, curve in curves.items():
        near = curve.distortion <= 1
        series.append(Series(name, tuple(curve.distortion[near].tolist()), tuple(curve.rate[near].tolist())))
    return Chart(
        "rate against distortion, which is 0 at T = 1",
        Axis("distortion up to 1 (share of |o|^2)"),
        Axis("mutual information (nats)"),
        tuple(series),
    )


def _optimum_chart(at: dict[float, AtTemperature]) -> Chart:
    points = tuple(at)
    return Chart(
        "the shipped model",
        Axis("temperature T (times the model's own)", "log"),
        Axis("nats; bits per byte"),
        (
            Series("mean mutual information (nats)", points, tuple(one.information for one in at.values())),
            Series("loss (bits per byte)", points, tuple(one.loss for one in at.values())),
        ),
    )


def _bound_chart(found: list[tuple[float, ...]]) -> Chart:
    columns = list(zip(*found, strict=True))
    return Chart(
        "a valid bound and an invalid one",
        Axis("temperature T (errors)", "log"),
        Axis("loss (share of examples)"),
        (
            Series("with KL = log n - H", columns[0], columns[4]),
            Series("with H instead", columns[0], columns[5]),
            Series("on the examples", columns[0], columns[3]),
            Series("expected", columns[0], (0.5,) * len(found)),
        ),
    )
