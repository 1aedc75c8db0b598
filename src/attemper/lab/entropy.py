r"""What entropy says of a row of attention weights, and what the usual formula with an eps gets wrong.

:math:`H = -\sum_j p_j \log p_j` lies between 0 (one key has all the weight) and log n (n keys share it equally). The
usual code adds an eps inside the logarithm, which takes :math:`\log(1 + n \epsilon)` from that of n equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from attemper import functional
from attemper.functional import effective_tokens, entropy_of, gini, max_weight
from attemper.lab.experiment import Axis, Cell, Chart, Experiment, Series, Table, headings, one_thread

COUNTS = (2, 6, 8, 64, 512, 4096, 131_072)
"""Visible keys of a row."""
EPSILONS = (1e-5, 1e-6, 1e-7, 1e-10)
DRAWS = 32
TARGET = 0.2
"""Nats: what the twelve printed rows were trained towards."""
TRAINED = (
    (3.27099487e-03, 2.51237601e-02, 9.59103048e-01, 6.17671618e-03, 4.41661570e-03, 1.90874794e-03),
    (3.13497148e-03, 2.45431308e-02, 9.60317731e-01, 5.98660251e-03, 4.21733223e-03, 1.80015271e-03),
    (3.40689556e-03, 2.57629622e-02, 9.57871556e-01, 6.44017057e-03, 4.52079810e-03, 1.99752697e-03),
    (1.10661890e-03, 1.27607975e-02, 9.81542170e-01, 2.43383530e-03, 1.57478068e-03, 5.81745524e-04),
    (3.10348310e-02, 8.87579299e-05, 4.77730093e-04, 1.46521628e-03, 9.52835977e-01, 1.40975416e-02),
    (2.63910089e-02, 5.77273713e-05, 3.39534425e-04, 1.06126023e-03, 9.60522711e-01, 1.16277682e-02),
    (3.12446002e-02, 9.48462111e-05, 5.04475611e-04, 1.46811537e-03, 9.52523112e-01, 1.41648324e-02),
    (1.50452955e-02, 1.21340790e-05, 9.36727956e-05, 3.67841218e-04, 9.78706181e-01, 5.77491429e-03),
    (2.43717595e-03, 2.99123675e-02, 9.57738578e-01, 8.62001721e-03, 6.63190091e-04, 6.28605427e-04),
    (2.37493636e-03, 2.91979928e-02, 9.58939075e-01, 8.24017916e-03, 6.44378248e-04, 6.03430963e-04),
    (2.84763589e-03, 3.26210111e-02, 9.53170657e-01, 9.78391431e-03, 8.07495147e-04, 7.69288861e-04),
    (1.05220091e-03, 1.88548081e-02, 9.75066125e-01, 4.56135161e-03, 2.38224253e-04, 2.27281591e-04),
)
"""Three heads, four queries, six keys: weights that an article prints after training with (H - 0.2)^2 in the loss."""
QUERIES = 4
ALARM_KEYS, ALARM_SHARE, ALARM_LOW = 512, 0.9, 2.0
"""An article's alarm: high above 0.9 log 512 nats, low below 2 nats, whatever the row can see."""


@one_thread()
def entropy(*, seed: int = 0) -> Experiment:
    """Bounds, units, other measures, the bias of an eps, gradients under masks, and two formulas that are wrong."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {n: _drawn_entropies(n, generator) for n in COUNTS}
    return Experiment(
        name="entropy",
        question="what does entropy say of a row of weights, and what does an eps in its logarithm cost?",
        seed=seed,
        tables=(_bounds(drawn), _measures(), _bias(), _precisions(), _gradients(), _alarm(), _gini(), _trained_rows()),
        charts=(_bound_chart(drawn), _bias_chart()),
    )


def with_eps(weights: Tensor, eps: float) -> Tensor:
    """-sum p log(p + eps), as the articles compute it."""
    return -(weights * torch.log(weights + eps)).sum(-1)


def their_gini(weights: Tensor) -> Tensor:
    """An article's Gini coefficient, which ranks the weights from the largest down."""
    ordered = weights.sort(dim=-1, descending=True).values
    n = weights.shape[-1]
    rank = torch.arange(1, n + 1, dtype=weights.dtype)
    return 2 * (ordered * rank).sum(-1) / (n * ordered.sum(-1)) - (n + 1) / n


def _uniform(n: int) -> Tensor:
    return torch.full((n,), 1 / n, dtype=torch.float64)


def distributions() -> dict[str, Tensor]:
    """Simple rows of eight keys."""
    halves = 0.5 ** torch.arange(1, 9, dtype=torch.float64)
    rest = torch.full((8,), 0.5 / 7, dtype=torch.float64)
    rest[0] = 0.5
    zipf = 1 / torch.arange(1, 9, dtype=torch.float64)
    return {
        "one key": torch.eye(8, dtype=torch.float64)[0],
        "two keys, equal": torch.tensor([0.5, 0.5] + [0.0] * 6, dtype=torch.float64),
        "each half of the last": halves / halves.sum(),
        "half on one, rest equal": rest,
        "1/rank": zipf / zipf.sum(),
        "all equal": _uniform(8),
    }


def _drawn_entropies(n: int, generator: torch.Generator) -> Tensor:
    scores = torch.randn(DRAWS, n, generator=generator, dtype=torch.float64)
    return torch.stack([functional.entropy(row) for row in scores])  # a row fits the caches, all of them do not


def _bounds(drawn: dict[int, Tensor]) -> Table:
    rows = []
    for n, entropies in drawn.items():
        even = torch.zeros(n, dtype=torch.float64)
        one = torch.full((n,), -math.inf, dtype=torch.float64)
        one[0] = 0.0
        highest = float(functional.entropy(even))
        rows.append(
            (
                n,
                float(functional.entropy(one)),
                float(entropies.mean()),
                highest,
                float(functional.entropy(even, unit="bits")),
                100 * float(entropies.mean()) / highest,
            )
        )
    return Table(
        title="bounds of the entropy of n weights",
        see=(
            "From 0 for one key to log n for equal weights; bits are nats / log 2. Random scores of variance 1 stay "
            "half a nat below log n in long rows, so their share of it rises with n."
        ),
        columns=headings(
            "n [keys]",
            "one key [nats]",
            "random, mean [nats]",
            "uniform [nats]",
            "uniform [bits]",
            "random [% of log n]",
        ),
        rows=tuple(rows),
    )


def _measures() -> Table:
    rows = []
    for name, weights in distributions().items():
        H = float(entropy_of(weights))
        rows.append(
            (name, H, math.exp(H), float(effective_tokens(weights)), float(max_weight(weights)), float(gini(weights)))
        )
    return Table(
        title="simple rows of eight keys",
        see=(
            "Both e^H and 1 / sum p^2 count keys, and agree where keys share equally; where they do not, the second is "
            "smaller, since it listens to the large weights."
        ),
        columns=headings("row", "entropy [nats]", "e^H [keys]", "effective tokens [keys]", "largest weight", "Gini"),
        rows=tuple(rows),
    )


def eps_bias(n: int, eps: float) -> float:
    """What -sum p log(p + eps) of n equal weights is too small by, in nats: log(1 + n eps) in exact arithmetic."""
    return float(_entropy_of_uniform(n) - with_eps(_uniform(n), eps))


@cache
def _entropy_of_uniform(n: int) -> Tensor:
    """The same for every eps, and up to a million keys long to add up."""
    return entropy_of(_uniform(n))


def _bias() -> Table:
    return Table(
        title="what -sum p log(p + eps) is too small by, n equal weights",
        see=(
            "It is log(1 + n eps): below 0.001 nats at 64 keys, 0.12 at 131072 keys with 1e-6 and 0.84 with 1e-5. A"
            " model with a long context would look sharper than it is."
        ),
        columns=headings("n [keys]", "log n [nats]", *(f"eps {eps:g} [nats]" for eps in EPSILONS)),
        # Below 1e-12 is rounding of float64, and differs between machines.
        rows=tuple((n, math.log(n), *(round(eps_bias(n, eps), 12) for eps in EPSILONS)) for n in COUNTS),
    )


def _precisions() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        one = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)
        values = [float(with_eps(one, eps)) + 0.0 for eps in EPSILONS]
        ours = float(entropy_of(one))
        rows.append((str(dtype).removeprefix("torch."), *("NaN" if math.isnan(v) else v for v in values), ours))
    return Table(
        title="-sum p log(p + eps) of one key with all the weight",
        see=(
            "The entropy is 0. The formula is negative where eps is not lost in 1 + eps, and NaN where eps itself "
            "rounds to 0: float16 holds no 1e-10."
        ),
        columns=headings("precision", *(f"eps {eps:g} [nats]" for eps in EPSILONS), "ours [nats]"),
        rows=tuple(rows),
    )


def _plain(weights: Tensor) -> Tensor:
    return -(weights * weights.log()).sum(-1)


def _by_log_softmax(scores: Tensor) -> Tensor:
    logs = scores.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


OF_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "-sum p log p": _plain,
    "torch.special.xlogy": lambda p: -torch.special.xlogy(p, p).sum(-1),
    "torch.special.entr": lambda p: torch.special.entr(p).sum(-1),
    "-sum p log(p + 1e-10)": lambda p: with_eps(p, 1e-10),
    "-sum p log(p + 1e-7)": lambda p: with_eps(p, 1e-7),
}
"""Forms of p = torch.softmax(scores), which each of them is given once."""
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: (lambda s, form=form: form(s.softmax(-1))) for name, form in OF_WEIGHTS.items()},
    "-sum e^l l, log_softmax": _by_log_softmax,
    "attemper.functional": functional.entropy,
}
ROWS = {
    "[1, 2, hidden]": (1.0, 2.0, -math.inf),
    "[10, 0, 0]": (10.0, 0.0, 0.0),
    "[20, 0, 0]": (20.0, 0.0, 0.0),
    "[100, 0, -200]": (100.0, 0.0, -200.0),
}
WRONG = 0.03
"""A gradient whose largest error is more than this share of its largest entry is called wrong."""


def value_and_gradient(
    form: Callable[[Tensor], Tensor], row: tuple[float, ...], dtype: torch.dtype = torch.float32
) -> tuple[float, int, float]:
    """Value, how many gradients are NaN, and the largest error of the gradient relative to its largest entry."""
    exact = torch.tensor(row, dtype=torch.float64, requires_grad=True)
    functional.entropy(exact).backward()
    scores = torch.tensor(row, dtype=dtype, requires_grad=True)
    value = form(scores)
    value.backward()
    assert scores.grad is not None
    assert exact.grad is not None
    error = (scores.grad.double() - exact.grad).abs().max() / exact.grad.abs().max()
    return float(value.detach()), int(scores.grad.isnan().sum()), float(error)


def _verdict(missing: int, error: float) -> str:
    # How far off float32 is, is rounding, and differs between machines; that it is, does not.
    return "NaN" if missing else "right" if error < WRONG else "wrong"


def _gradients() -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, row in ROWS.items():
        for form, function in FORMS.items():
            value, missing, error = value_and_gradient(function, row)
            said = _verdict(missing, error)
            _, missing, error = value_and_gradient(function, row, torch.float64)
            off = "NaN" if missing else round(100 * error, 4)
            rows.append((name, form, "NaN" if math.isnan(value) else value, said, off))
    large, small = (
        value_and_gradient(FORMS[f"-sum p log(p + {eps})"], ROWS["[20, 0, 0]"], torch.float64)[2]
        for eps in ("1e-7", "1e-10")
    )
    return Table(
        title="value and gradient of the usual forms",
        see=(
            "A hidden key, or a weight that underflows, makes every gradient of p log p, xlogy and entr NaN. An eps "
            f"keeps them finite. In a nearly one-hot row all forms but ours are wrong (off by more than {WRONG:.0%}), "
            "because the backward pass of torch.softmax rounds: in float32 at [20, 0, 0], in float64 at "
            "[100, 0, -200]. The eps adds an error, seen in float64 at [20, 0, 0]: 1e-7 costs "
            f"{large:.0%}, 1e-10 {small:.4%}."
        ),
        columns=headings("scores", "form", "float32 value [nats]", "float32 gradient", "float64 gradient off by [%]"),
        rows=tuple(rows),
    )


def _alarm() -> Table:
    limit = ALARM_SHARE * math.log(ALARM_KEYS)
    rows = []
    for n in (4, 6, 8, 64, 128, 256, 512, 4096, 131_072):
        told = "low" if math.log(n) < ALARM_LOW else "high" if math.log(n) > limit else "nothing"
        rows.append((n, math.log(n), told, 100 * limit / math.log(n), 100 * ALARM_LOW / math.log(n)))
    return Table(
        title=f"an alarm for low below {ALARM_LOW:g} nats, high above {ALARM_SHARE:g} log {ALARM_KEYS}",
        see=(
            "What it says of n equal weights, the most diffuse row there is: too low up to 7 keys, nothing up to "
            f"{math.floor(math.exp(limit))}; and in long rows it calls high what is far from uniform. Normalised by "
            "the keys that each row can see, one limit fits all. (As printed it also compares an array of heads to "
            "a number, which raises an error with more than one head.)"
        ),
        columns=headings("n [keys]", "uniform [nats]", "it says", "high above [% of log n]", "low below [% of log n]"),
        rows=tuple(rows),
    )


def _gini() -> Table:
    return Table(
        title="a Gini coefficient with the wrong order",
        see=(
            "Ranked from the largest weight down it comes out negative, and 0, its largest value, means all equal. "
            "Ascending it is 0 for equal weights and (n - 1)/n for one key."
        ),
        columns=headings("row", "as printed", "ours"),
        rows=tuple(
            (name, round(float(their_gini(weights)), 12) + 0.0, round(float(gini(weights)), 12) + 0.0)
            for name, weights in distributions().items()
        ),
    )


def _trained_rows() -> Table:
    weights = torch.tensor(TRAINED, dtype=torch.float64)
    entropies = entropy_of(weights)
    rows: list[tuple[Cell, ...]] = [
        (str(number // QUERIES + 1), number % QUERIES + 1, float(H), float((H - TARGET).abs()), float(w.max()))
        for number, (H, w) in enumerate(zip(entropies, weights, strict=True))
    ]
    off = (entropies - TARGET).abs().mean()
    rows.append(("mean", None, float(entropies.mean()), float(off), float(weights.amax(-1).mean())))
    return Table(
        title=f"twelve rows trained towards {TARGET:g} nats, six keys",
        see=(
            f"They average {entropies.mean():.3f} nats, {off:.3f} away from the target on average: near one-hot, as "
            f"asked, and {100 * float(entropies.mean()) / math.log(6):.0f}% of log 6."
        ),
        columns=headings("head", "query", "entropy [nats]", "off the target [nats]", "largest weight"),
        rows=tuple(rows),
    )


def _bound_chart(drawn: dict[int, Tensor]) -> Chart:
    x = tuple(float(n) for n in COUNTS)
    errors = tuple(float(H.std() / math.sqrt(DRAWS)) for H in drawn.values())
    return Chart(
        "entropy of n weights",
        Axis("keys n", "log"),
        Axis("entropy (nats)"),
        (
            Series("uniform, log n", x, tuple(math.log(n) for n in COUNTS)),
            Series("random scores", x, tuple(float(H.mean()) for H in drawn.values()), errors=errors),
            Series("one key", x, (0.0,) * len(x)),
        ),
    )


def _bias_chart() -> Chart:
    counts = tuple(2**power for power in range(1, 21))
    return Chart(
        "n equal weights: entropy lost to eps",
        Axis("keys n", "log"),
        Axis("too small by (nats)", "log"),
        tuple(
            # Below 1e-10 float64 rounds what is left.
            Series(
                f"eps {eps:g}",
                tuple(map(float, counts)),
                tuple(bias if (bias := eps_bias(n, eps)) > 1e-10 else None for n in counts),
            )
            for eps in EPSILONS
        ),
    )
