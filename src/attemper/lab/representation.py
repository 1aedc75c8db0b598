r"""What temperature does to the model that ships: what its attention puts out, and how well it predicts.

Every score of every layer is divided by T, text is read, and four things are measured: the effective rank of each
layer's attention outputs, their mean pairwise cosine, the loss, and the calibration of the predicted bytes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from attemper.checks import positive_number
from attemper.errors import InputError
from attemper.functional import entropy_of, softmax
from attemper.lab.experiment import Axis, Chart, Column, Experiment, Series, Table, headings, one_thread
from attemper.lab.model import Attention, ByteModel, load, shipped_text, windows
from attemper.monitor.scan import scan

TEMPERATURES = (0.25, 0.5, 0.7, 1.0, 1.2, 1.5, 2.0, 4.0, 8.0)
BINS = 15
"""Of confidence, of equal width, for the calibration error."""
SHOWN = (0.25, 1.0, 4.0)
"""Temperatures whose calibration is drawn."""
ADVISED = 2.0
"""What an article's schedule calls high: what is said of a high temperature is judged here and at the highest tried."""


@dataclass(frozen=True)
class Behaviour:
    """What the model does at one temperature: W windows of N bytes, L layers."""

    temperature: float
    entropies: tuple[float, ...]
    """Normalised entropy of each layer, a mean over its heads and rows."""
    ranks: Tensor
    """Effective rank of the attention outputs, [L, W]."""
    cosines: Tensor
    """Mean pairwise cosine of the attention outputs, [L, W]."""
    losses: Tensor
    """Bits, [W, N]."""
    confidence: Tensor
    """Probability of the likeliest byte, [W, N]."""
    hits: Tensor
    """Whether it was that byte, [W, N] of 0 and 1."""

    @property
    def bits_per_byte(self) -> float:
        return float(self.losses.mean())

    @property
    def overconfidence(self) -> float:
        return float(self.confidence.mean() - self.hits.mean())

    @property
    def overconfidences(self) -> Tensor:
        """Of each window, [W]."""
        return self.confidence.mean(1) - self.hits.mean(1)


@one_thread()
def representation(*, seed: int = 0) -> Experiment:
    """Effective rank, cosine, loss and calibration of the shipped model over temperature. Nothing is drawn."""
    model, ids = load().double(), shipped_text()
    found = [behaviour(model, ids, temperature) for temperature in TEMPERATURES]
    return Experiment(
        name="representation",
        question="what does temperature do to what a trained model's attention puts out, and to its predictions?",
        seed=seed,
        tables=(_outputs(found), *_layers(found), _predictions(found), _claims(found)),
        charts=(
            _over_temperature(
                "attention outputs: effective rank", "effective rank (directions)", _by_layer(found, "ranks")
            ),
            _over_temperature(
                "attention outputs: cosine", "mean pairwise cosine (no unit)", _by_layer(found, "cosines")
            ),
            _over_temperature("predictions of the next byte", "loss (bits per byte)", (_losses(found),)),
            _calibration_chart(found),
        ),
    )


def tempered_copy(model: ByteModel, temperature: float) -> ByteModel:
    """A copy whose attention scores are divided by ``temperature`` in every layer: its query weights are.

    Raises:
        InputError: the temperature is not above 0, or the model normalises its queries, which would undo it.
    """
    number = positive_number("tempered_copy(temperature=...)", temperature, "It divides every score.", infinite=True)
    if model.config.qk_norm:
        raise InputError(
            "tempered_copy(model): queries of this model are normalised after their projection, so that its weights "
            "have no say in the size of a score. Take a model with qk_norm=False."
        )
    changed = copy.deepcopy(model)
    for attention in _attentions(changed):
        assert isinstance(attention.q_proj, nn.Linear)
        attention.q_proj.weight.data.div_(number)
    return changed


def behaviour(model: ByteModel, ids: Tensor, temperature: float) -> Behaviour:
    """Reads ``ids`` in windows of the model's context at this temperature: outputs, entropies and predictions."""
    changed = tempered_copy(model, temperature)
    read = windows(ids, model.config.context + 1, stride=model.config.context)
    outputs: list[Tensor] = []
    logits: list[Tensor] = []

    def keep_output(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        outputs.append(inputs[0])

    def keep_logits(_: nn.Module, __: tuple[Tensor, ...], result: Tensor) -> None:
        logits.append(result)

    # The copy is thrown away, and its hooks with it.
    for attention in _attentions(changed):
        attention.o_proj.register_forward_pre_hook(keep_output)
    changed.register_forward_hook(keep_logits)
    seen = scan(changed, [read[:, :-1]], stats=("normalized_entropy",))
    p, target = softmax(logits[0]), read[:, 1:]
    confidence, guess = p.max(-1)
    return Behaviour(
        temperature=temperature,
        entropies=tuple(_mean([head.normalized_entropy for head in site.heads]) for site in seen.sites),
        ranks=torch.stack([effective_rank(output) for output in outputs]),
        cosines=torch.stack([mean_cosine(output) for output in outputs]),
        losses=-p.gather(-1, target[..., None])[..., 0].log2(),
        confidence=confidence,
        hits=(guess == target).to(p.dtype),
    )


def effective_rank(vectors: Tensor) -> Tensor:
    r"""Effective rank of [..., N, E] vectors: over how many directions they spread, 1 to min(N, E).

    .. math:: \exp H(\sigma / \textstyle\sum \sigma), \quad \sigma \text{ the singular values}

    Source: Roy and Vetterli 2007, "The Effective Rank".
    """
    return entropy_of(torch.linalg.svdvals(vectors)).exp()


def mean_cosine(vectors: Tensor) -> Tensor:
    r"""Mean cosine over all pairs of [..., N, E] vectors, from -1/(N - 1) to 1.

    .. math:: \frac{|\sum_i u_i|^2 - N}{N (N - 1)}, \quad u_i = v_i / |v_i|
    """
    n = vectors.shape[-2]
    units = vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return (units.sum(-2).square().sum(-1) - n) / (n * (n - 1))


def reliability(confidence: Tensor, hits: Tensor, bins: int = BINS) -> list[tuple[float, float, int]]:
    """(mean confidence, share of hits, predictions) of every bin of confidence that is not empty, ascending."""
    places = (confidence.flatten() * bins).ceil().long().clamp(1, bins) - 1
    rows = []
    for place in places.unique().tolist():
        inside = places == place
        rows.append(
            (float(confidence.flatten()[inside].mean()), float(hits.flatten()[inside].mean()), int(inside.sum()))
        )
    return rows


def calibration_error(confidence: Tensor, hits: Tensor, bins: int = BINS) -> float:
    r"""Expected calibration error: the mean over predictions of how far their bin's confidence is from its hits.

    .. math:: \sum_b \frac{n_b}{n} \, | \mathrm{conf}_b - \mathrm{acc}_b |

    Source: Guo et al. 2017, "On Calibration of Modern Neural Networks", equation 3.
    """
    return sum(abs(conf - acc) * count for conf, acc, count in reliability(confidence, hits, bins)) / hits.numel()


def direction(values: Sequence[float]) -> str:
    """What a sequence does: "rises", "falls", "stays", or how it bends, in order; equal neighbours do not bend it."""
    steps = ["rises" if later > earlier else "falls" for earlier, later in pairwise(values) if later != earlier]
    if not steps:
        return "stays"
    turns = [step for place, step in enumerate(steps) if place == 0 or steps[place - 1] != step]
    return ", then ".join(turns)


def _attentions(model: ByteModel) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    assert len(known) == len(values)
    return sum(known) / len(known)


def _mean_and_error(each: Tensor) -> tuple[float, float]:
    """Mean of [W] and its standard error over windows."""
    return float(each.mean()), float(each.std() / math.sqrt(len(each)))


def difference(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean of ``one - other`` [W] of the same windows, and its standard error."""
    return _mean_and_error(one - other)


def less(one: Tensor, other: Tensor) -> str:
    """How much less ``one`` is than ``other`` [W], with its standard error, in words; in any case with its sign."""
    mean, error = difference(one, other)
    return f"{abs(mean):.4f} +- {error:.4f} {'less' if mean < 0 else 'more'}"


def _outputs(found: list[Behaviour]) -> Table:
    ranks = [_mean_and_error(one.ranks.mean(0)) for one in found]
    cosines = [_mean_and_error(one.cosines.mean(0)) for one in found]
    entropies = [_mean(one.entropies) for one in found]
    rank, cosine = (direction([mean for mean, _ in values]) for values in (ranks, cosines))
    return Table(
        title="attention outputs over temperature, mean of the layers",
        see=(
            f"With temperature, entropy {direction(entropies)}, effective rank {rank} "
            f"({ranks[0][0]:.1f} to {ranks[-1][0]:.1f}), mean cosine {cosine} "
            f"({cosines[0][0]:.2f} to {cosines[-1][0]:.2f}). Errors are standard errors over windows."
        ),
        columns=headings(
            "T",
            "normalised entropy",
            "effective rank [directions]",
            "error of rank [directions]",
            "mean cosine",
            "error of cosine",
        ),
        rows=tuple(
            (one.temperature, entropy, *rank, *cosine)
            for one, entropy, rank, cosine in zip(found, entropies, ranks, cosines, strict=True)
        ),
    )


def _layers(found: list[Behaviour]) -> tuple[Table, Table]:
    layers = range(len(found[0].ranks))
    ranks = [direction([float(one.ranks[layer].mean()) for one in found]) for layer in layers]
    cosines = [direction([float(one.cosines[layer].mean()) for one in found]) for layer in layers]
    columns = Column("T"), *(Column(f"layer {layer}") for layer in layers)
    return (
        Table(
            title="effective rank of each layer, directions",
            see=(
                f"It falls without exception in {ranks.count('falls')} of {len(ranks)} layers. Only layer 0 reads the "
                "same input at every temperature; the others read what the layers below made of it."
            ),
            columns=columns,
            rows=tuple((one.temperature, *one.ranks.mean(1).tolist()) for one in found),
        ),
        Table(
            title="mean cosine of each layer",
            see=f"It rises without exception in {cosines.count('rises')} of {len(cosines)} layers.",
            columns=columns,
            rows=tuple((one.temperature, *one.cosines.mean(1).tolist()) for one in found),
        ),
    )


def _own(found: list[Behaviour]) -> Behaviour:
    """At the temperature that the model was trained at."""
    return next(one for one in found if one.temperature == 1.0)


def _predictions(found: list[Behaviour]) -> Table:
    best = min(found, key=lambda one: one.bits_per_byte)
    calm = min(found, key=lambda one: one.overconfidence)
    always = "is over-confident at every temperature" if calm.overconfidence > 0 else "is not always over-confident"
    return Table(
        title="predictions of the next byte",
        see=(
            f"{_lowest_loss(best, _own(found))} The model {always}; with temperature, over-confidence "
            f"{direction([one.overconfidence for one in found])}. {_least_confident(found, calm)}"
        ),
        columns=headings("T", "loss [bits/byte]", "accuracy", "confidence", "over-confidence", "calibration error"),
        rows=tuple(
            (
                one.temperature,
                one.bits_per_byte,
                float(one.hits.mean()),
                float(one.confidence.mean()),
                one.overconfidence,
                calibration_error(one.confidence, one.hits),
            )
            for one in found
        ),
    )


def _lowest_loss(best: Behaviour, own: Behaviour) -> str:
    said = f"Of those tried, T = {best.temperature:g} has the lowest loss"
    if best is own:
        return f"{said}."
    return f"{said}, {less(best.losses.mean(1), own.losses.mean(1))} than at T = 1 (standard error over windows)."


def _least_confident(found: list[Behaviour], calm: Behaviour) -> str:
    place = found.index(calm)
    around = [one for one in (found[max(place - 1, 0)], *found[place + 1 : place + 2]) if one is not calm]
    near = min(around, key=lambda one: one.overconfidence)
    compared = {one.temperature: one for one in (near, _own(found)) if one is not calm}
    than = ", ".join(
        f"{less(calm.overconfidences, one.overconfidences)} than at T = {T:g}" for T, one in compared.items()
    )
    return f"It is least at T = {calm.temperature:g} of those tried: {than}."


def _is_below(own: float, advised: float, highest: float) -> str:
    """Whether both are below the model's own, or at which temperature one is."""
    below = advised < own, highest < own
    return {(True, True): "yes", (False, False): "no", (True, False): f"at {ADVISED:g} only"}.get(
        below, "at the end only"
    )


def _digits(values: Sequence[float]) -> tuple[float, ...]:
    """Three of each, for a narrow table of what stands in full above it."""
    return tuple(float(f"{value:.3g}") for value in values)


def _claims(found: list[Behaviour]) -> Table:
    """What is often said of temperature, beside what this model does from its own temperature to either end."""
    advised = next(one for one in found if one.temperature == ADVISED)
    four = (found[0], _own(found), advised, found[-1])
    rank = [float(one.ranks.mean()) for one in four]
    cosine = [float(one.cosines.mean()) for one in four]
    over = [one.overconfidence for one in four]
    accuracy = [float(one.hits.mean()) for one in four]
    low = ("no", "yes")
    rows = (
        ("high T: outputs less alike", *_digits(cosine), _is_below(*cosine[1:])),
        ("high T: more directions", *_digits(rank), _is_below(*(-value for value in rank[1:]))),
        ("low T: more accurate", *_digits(accuracy), low[accuracy[0] > accuracy[1]]),
        ("low T: more over-confident", *_digits(over), low[over[0] > over[1]]),
        ("high T: less over-confident", *_digits(over), _is_below(*over[1:])),
    )
    count = sum(row[-1] == "yes" for row in rows)
    parts = sum(str(row[-1]).startswith("at") for row in rows)
    return Table(
        title="what is said of temperature, and this model",
        see=(
            f"{count} of {len(rows)} hold here throughout, {parts} in part, for a model trained at T = 1 whose "
            "temperature is changed afterwards. Sayings about a high temperature are judged at both high ones."
        ),
        columns=headings("said", *(f"T = {one.temperature:g}" for one in four), "holds"),
        rows=rows,
    )


def _over_temperature(title: str, unit: str, series: tuple[Series, ...]) -> Chart:
    return Chart(title, Axis("temperature T (times the model's own)", "log"), Axis(unit), series)


def _by_layer(found: list[Behaviour], name: str) -> tuple[Series, ...]:
    """A curve for each layer of ``ranks`` or ``cosines``."""
    stacked = torch.stack([getattr(one, name).mean(1) for one in found])
    return tuple(
        Series(f"layer {layer}", TEMPERATURES, tuple(column)) for layer, column in enumerate(stacked.T.tolist())
    )


def _losses(found: list[Behaviour]) -> Series:
    losses = [_mean_and_error(one.losses.mean(1)) for one in found]
    return Series("loss", TEMPERATURES, tuple(mean for mean, _ in losses), errors=tuple(error for _, error in losses))


def _calibration_chart(found: list[Behaviour]) -> Chart:
    series = [Series("calibrated", (0.0, 1.0), (0.0, 1.0))]
    for one in found:
        if one.temperature in SHOWN:
            bins = [row for row in reliability(one.confidence, one.hits) if row[2] >= 20]
            series.append(
                Series(f"T = {one.temperature:g}", tuple(row[0] for row in bins), tuple(row[1] for row in bins))
            )
    return Chart(
        "calibration, bins of 20 bytes or more",
        Axis("confidence (probability)"),
        Axis("accuracy (share of bytes)"),
        tuple(series),
    )
