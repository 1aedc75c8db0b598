r"""What temperature does: limits, a Gaussian kernel, the slope of entropy, and advice on it, measured.

Scores y become weights softmax(y / T). T below 1 sharpens, above 1 flattens; :math:`dH/dT = \mathrm{Var}_p(y) / T^3` is
never negative, unless something that T does not divide (a position bias) is added to the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attemper import attention_statistics
from attemper.functional import effective_tokens, entropy, entropy_slope, softmax
from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings, one_thread
from attemper.lab.model import SeenCalls, load, shipped_text, windows
from attemper.schedules import layerwise, warmup_anneal

TEMPERATURES = (0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0, math.inf)
PLAIN = (1.0, 2.0, 3.0)
TIED = (3.0, 3.0, 1.0)
BIASED = (0.0, 3.0, 3.0, 3.0)
BIAS = (6.0, 0.0, 0.0, 0.0)
KEYS = 64
ROWS = 400
CURVE = tuple(10 ** (step / 20) for step in range(-26, 31))
"""Temperatures of the curves, from 0.05 to 32."""
ADVICE: tuple[tuple[str, float], ...] = (
    ("early training", 2.0),
    ("middle of training", 1.05),
    ("late training", 0.1),
    ("pretraining", 1.0),
    ("fine-tuning, little data, from", 0.5),
    ("fine-tuning, little data, to", 1.0),
    ("fine-tuning, much data, from", 0.1),
    ("fine-tuning, much data, to", 0.5),
    ("long context, below 1", 0.9),
    ("retrieval, below 1", 0.9),
)
"""What an article advises, as starting points. For stages of training it has words; the numbers are those of its
schedule at the start, half way and at the end. For "below 1" we take 0.9.
"""
LAYERS = 5
LOW, HIGH = 0.5, 1.0
"""Temperatures of the layerwise schedules."""
START, END, WARMUP = 2.0, 0.1, 0.1
"""Of the schedule over training: temperatures, and the share of steps that warm up."""
STEPS = 10_000
"""Of that training: the library's schedules take a step and a total."""


@one_thread()
def temperature(*, seed: int = 0) -> Experiment:
    """Limits, entropy and slope, the Gaussian kernel, the effect of a bias, and what advised temperatures do."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, KEYS, generator=generator, dtype=torch.float64)
    query, key = (torch.randn(KEYS, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    return Experiment(
        name="temperature",
        question="what does temperature do to attention weights, and where do rules of thumb about it hold?",
        seed=seed,
        tables=(
            _limits(),
            _unit_variance(generator),
            _kernel(query, key),
            _slopes(rows),
            _bias(),
            _advice(rows),
            _layers(),
            _schedule(),
        ),
        charts=(
            _curves("entropy over temperature", "entropy (nats)", rows, lambda y, T: entropy(y, temperature=T), 0),
            _curves("slope of the entropy", "slope (nats per unit of T)", rows, entropy_slope, 1),
            _kernel_chart(query, key),
            _schedule_chart(),
        ),
    )


def kernel_weights(query: Tensor, key: Tensor, variance: float) -> Tensor:
    """Rows of a Gaussian kernel exp(-|q - k|^2 / (2 variance)), each divided by its sum: [queries, keys]."""
    squares = (query[:, None] - key[None]).square().sum(-1)
    kernel = torch.exp(-squares / (2 * variance))
    return kernel / kernel.sum(-1, keepdim=True)


def their_layerwise(layer: int, shape: str) -> float:
    """Temperature of a layer as the article's class computes it, with its 'u' upside down."""
    ratio = layer / max(1, LAYERS - 1)
    if shape == "linear":
        return LOW + ratio * (HIGH - LOW)
    if shape == "exp":
        return LOW * (HIGH / LOW) ** ratio
    return HIGH - 0.5 * (HIGH - LOW) * abs(2 * ratio - 1)


def their_schedule(done: float) -> float:
    """Temperature after a share of the steps as the article's class computes it."""
    if done < WARMUP:
        return START * done / WARMUP
    return START - (START - END) * 0.5 * (1 + math.cos(math.pi * (done - WARMUP) / (1 - WARMUP)))


def anneal(done: float) -> float:
    """What its comment describes, by the library: up to START, then down to END. It starts at 1, never at 0."""
    return warmup_anneal(START, END, warmup=WARMUP)(round(done * STEPS), STEPS)


def _limits() -> Table:
    plain, tied = (torch.tensor(row, dtype=torch.float64) for row in (PLAIN, TIED))
    rows = tuple(
        (
            f"{T:g}",
            *softmax(plain, temperature=T).tolist(),
            float(entropy(plain, temperature=T)),
            float(entropy(tied, temperature=T)),
        )
        for T in TEMPERATURES
    )
    tie = list(map(int, TIED))
    return Table(
        title=f"limits, scores {list(map(int, PLAIN))} and {tie}",
        see=(
            f"As T goes to 0, entropy goes to 0, or to log 2 = {math.log(2):.5g} with two equal maxima; as T goes to "
            f"infinity, to log 3 = {math.log(3):.5g}."
        ),
        columns=headings("T", *(f"weight {key}" for key in (1, 2, 3)), "entropy [nats]", f"entropy of {tie} [nats]"),
        rows=rows,
    )


def _unit_variance(generator: torch.Generator) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for size in (16, 64, 512):
        query, key = (torch.randn(ROWS, size, generator=generator, dtype=torch.float64) for _ in range(2))
        scores = query @ key[:KEYS].mT
        for name, divisor in (("1", 1.0), ("sqrt(d)", math.sqrt(size)), ("d", float(size))):
            weights = softmax(scores, temperature=divisor)
            spread = float((scores / divisor).var(-1).mean()), float(weights.var(-1, unbiased=False).mean())
            rows.append((size, name, *spread, float(effective_tokens(weights).mean())))
    return Table(
        title=f"what sqrt(d) makes 1, {KEYS} keys",
        see=(
            "The variance of the scores, not of the weights, as is sometimes written: weights that sum to 1 have a "
            f"variance of at most (n - 1)/n^2 = {(KEYS - 1) / KEYS**2:.4f} here, and of 1/4 for any n."
        ),
        columns=headings("d", "T", "variance of scores [logit^2]", "variance of weights", "effective tokens [keys]"),
        rows=tuple(rows),
    )


def _kernel(query: Tensor, key: Tensor) -> Table:
    equal = torch.nn.functional.normalize(key, dim=-1) * math.sqrt(key.shape[-1])
    rows = []
    for T in (0.5, 1.0, 2.0, 4.0, 8.0):
        weights, others = softmax(query @ equal.mT, temperature=T), softmax(query @ key.mT, temperature=T)
        differences = (
            weights - kernel_weights(query, equal, T),
            weights - kernel_weights(query, equal, T**2),
            others - kernel_weights(query, key, T),
        )
        # Below 1e-12 is rounding of float64, and differs between machines.
        rows.append((T, *(round(float(part.abs().max()), 12) for part in differences)))
    return Table(
        title="softmax(q.k / T) against a Gaussian kernel: largest difference of a weight",
        see=(
            "T is the variance of the kernel, and its standard deviation is sqrt(T); the two readings agree at T = 1 "
            "only. Keys of unequal length differ under either: a longer key gains weight in a softmax."
        ),
        columns=headings(
            "T", "variance T, equal norms", "standard deviation T, equal norms", "variance T, unequal norms"
        ),
        rows=tuple(rows),
    )


def _slopes(scores: Tensor) -> Table:
    step = 1e-4
    rows = []
    for T in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
        H = entropy(scores, temperature=T).mean()
        difference = (entropy(scores, temperature=T + step) - entropy(scores, temperature=T - step)).mean() / (2 * step)
        slope = entropy_slope(scores, T)
        rows.append((T, float(H), float(slope.mean()), float(difference), float(slope.min())))
    return Table(
        title=f"entropy and its slope, {KEYS} keys, scores of variance 1",
        see=("The closed form Var_p(y)/T^3 agrees with differences of the entropy. No row's slope is negative."),
        columns=headings(
            "T", "entropy, mean [nats]", "slope, mean [nats]", "by differences [nats]", "smallest slope [nats]"
        ),
        rows=tuple(rows),
    )


def biased_entropy(T: float) -> tuple[float, float]:
    """Entropy of softmax(BIASED / T + BIAS) in nats, and its slope."""
    y, b = (torch.tensor(row, dtype=torch.float64) for row in (BIASED, BIAS))
    return float(entropy(y / T + b)), float(entropy_slope(y, T, bias=b))


def _bias() -> Table:
    rows = []
    for T in (0.1, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0, 16.0):
        y = torch.tensor(BIASED, dtype=torch.float64)
        rows.append((T, *biased_entropy(T), float(entropy(y, temperature=T)), float(entropy_slope(y, T))))
    return Table(
        title=f"scores {list(map(int, BIASED))} / T + bias {list(map(int, BIAS))}",
        see=(
            "With the bias entropy rises until T = 0.5, where all scores are equal, and falls from there: every "
            "entropy between log 3 = 1.0986 and log 4 = 1.3863 belongs to two temperatures. Without the bias it rises."
        ),
        columns=headings("T", "entropy [nats]", "slope [nats]", "entropy, no bias [nats]", "slope, no bias [nats]"),
        rows=tuple(rows),
    )


def _advice(scores: Tensor) -> Table:
    projected = _projections()
    trained = {T: _shipped_share(projected, T) for T in {T for _, T in ADVICE}}
    rows = []
    for where, T in ADVICE:
        shares = entropy(scores, temperature=T) / math.log(KEYS)
        tokens = effective_tokens(softmax(scores, temperature=T)).mean()
        rows.append((where, T, 100 * float(shares.mean()), float(tokens), 100 * trained[T]))
    return Table(
        title="temperatures that are advised, as starting points",
        see=(
            f"Random rows of {KEYS} keys and variance 1, and the byte-level model that ships, each layer at T on what "
            "it is given at T = 1. Trained heads are sharper at T = 1 than random rows, so the same T means something "
            "else in each."
        ),
        columns=headings(
            "where", "T", "random rows [% of log n]", "effective tokens [keys]", "shipped model [% of log n]"
        ),
        rows=tuple(rows),
    )


def _projections() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values [windows, heads, N, D] of every layer of the shipped model over the text that ships."""
    model = load()
    with torch.no_grad(), SeenCalls() as seen:
        model(windows(shipped_text(), model.config.context)[:4])
    return seen.calls


def _shipped_share(projected: list[tuple[Tensor, Tensor, Tensor]], T: float) -> float:
    """Mean normalised entropy over layers, heads and rows that see two keys at least."""
    total = 0.0
    for query, key, _ in projected:
        stats = attention_statistics(query, key, is_causal=True, temperature=T, stats=("normalized_entropy",))
        total += float(stats.per_head()["normalized_entropy"].mean.mean())
    return total / len(projected)


def _layers() -> Table:
    return Table(
        title=f"temperature by layer, {LAYERS} layers, {LOW:g} to {HIGH:g}",
        see=(
            "The u of the article is upside down: highest in the middle, and its ends are half way, so the lowest "
            "temperature is never reached. Its own comment asks for a low middle and high ends: the last column, "
            "attemper.schedules.layerwise."
        ),
        columns=headings("layer", "linear", "exponential", "u, as printed", "u, as described"),
        rows=tuple(
            (layer, *(their_layerwise(layer, shape) for shape in ("linear", "exp", "u")), described)
            for layer, described in enumerate(layerwise(LAYERS, LOW, HIGH, "u"))
        ),
    )


def _schedule() -> Table:
    shares = (0.0, 0.05, 0.0999, 0.1, 0.325, 0.55, 0.775, 1.0)
    return Table(
        title=f"warm up to {START:g}, then anneal to {END:g}",
        see=(
            "As printed it starts at T = 0, a division by zero, falls to 0.1 the moment the warm-up ends, and climbs "
            "to 2 at the end: the cosine is subtracted where it should be added. The last column is "
            "attemper.schedules.warmup_anneal."
        ),
        columns=headings("steps done [%]", "T, as printed", "T, as described"),
        rows=tuple((100 * done, round(their_schedule(done), 12), round(anneal(done), 12)) for done in shares),
    )


def _curves(title: str, shown: str, scores: Tensor, measure: Callable[[Tensor, float], Tensor], biased: int) -> Chart:
    """A measure of rows over temperature; ``biased``: which number of ``biased_entropy`` it is."""
    tied = torch.tensor(TIED, dtype=torch.float64)
    return Chart(
        title,
        Axis("temperature T (no unit)", "log"),
        Axis(shown),
        (
            Series(f"{KEYS} random keys", CURVE, tuple(float(measure(scores, T).mean()) for T in CURVE)),
            Series(f"{list(map(int, TIED))}", CURVE, tuple(float(measure(tied, T)) for T in CURVE)),
            Series("with a bias", CURVE, tuple(biased_entropy(T)[biased] for T in CURVE)),
        ),
    )


def _kernel_chart(query: Tensor, key: Tensor) -> Chart:
    equal = torch.nn.functional.normalize(key, dim=-1) * math.sqrt(key.shape[-1])
    squares = torch.cdist(query[:1], equal)[0].square()
    order = squares.argsort()
    T = 8.0
    parts = {
        f"softmax(q.k / {T:g})": softmax(query[0] @ equal.mT, temperature=T),
        f"Gaussian of variance {T:g}": kernel_weights(query[:1], equal, T)[0],
        f"Gaussian of standard deviation {T:g}": kernel_weights(query[:1], equal, T**2)[0],
    }
    x = tuple(squares[order].sqrt().tolist())
    return Chart(
        "one query, keys of equal norm",
        Axis("distance of query and key (no unit)"),
        Axis("weight (no unit)"),
        # The softmax lies on the first kernel: as points over its line both are seen.
        tuple(
            Series(name, x, tuple(weights[order].tolist()), line=place > 0)
            for place, (name, weights) in enumerate(parts.items())
        ),
    )


def _schedule_chart() -> Chart:
    # The last step of the warm-up, as in the table: what is printed jumps after it.
    shares = tuple(sorted((*(step / 200 for step in range(201)), 0.0999)))
    x = tuple(100 * share for share in shares)
    return Chart(
        "warm-up and annealing",
        Axis("steps done (%)"),
        Axis("temperature T (no unit)"),
        (
            Series("as printed", x, tuple(their_schedule(share) for share in shares)),
            Series("as described", x, tuple(anneal(share) for share in shares)),
        ),
    )
