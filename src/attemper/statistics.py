"""The table of statistics: one row for each, with everything but the arithmetic. Without torch: pages read it, too.

How to add a statistic that follows from the state columns there are:

1. a row in ``TABLE`` below, and its formula in ``call/formulas.py`` (none if a state column is the statistic itself);
2. its annotation in the typed record ``AttentionStats`` (``call/result.py``);
3. if readings show it (``shown=``), a field of that name in the typed record ``HeadReading`` (``readings/reading.py``).

Names, orders, checks, reductions, pages, trackers, comparisons and the list in ``docs/maths.md`` follow from the row.
One that needs a new state column also takes a member of ``Column`` and a function in each backend that computes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

from attemper.checks import did_you_mean
from attemper.errors import InputError


class Column(IntEnum):
    """State columns: what a kernel leaves of each row, [B, H, Q], in the order in which they are stacked.

    Levels are relative to the row's maximum m (docs/design/0002), weights p are renormalised to sum 1 (0008).
    """

    MAXIMUM = 0
    """m, the largest score."""
    LOG_SUM = auto()
    """log sum exp(s - m): softmax."""
    VISIBLE_KEYS = auto()
    """n, keys that the row sees."""
    THRESHOLD = auto()
    """Where the weights of a normalizer begin: a rowwise kernel's own affair."""
    MASS = auto()
    """Sum of the weights: rowwise."""
    SUPPORT = auto()
    """Keys with a weight: rowwise."""
    LARGEST_WEIGHT = auto()
    """p of the largest score: rowwise."""
    MEAN_DEPTH = auto()
    """m - E_p[s]."""
    ENTROPY = auto()
    """-sum p log p: rowwise."""
    VARIANCE = auto()
    """E_p[(s - E_p[s])^2]."""
    SQUARED_WEIGHTS = auto()
    """sum p^2."""
    FIRST_TOKENS = auto()
    """p on the first tokens."""
    DISTANCE = auto()
    """E_p of the distance between query and key."""
    GINI = auto()
    """Gini coefficient of p."""
    PLAIN_DEPTH = auto()
    """m - the mean of the visible scores without weights: softmax."""
    PLAIN_VARIANCE = auto()
    """Variance of the visible scores without weights."""
    OWN_KEY = auto()
    """p on the key of the query's own place."""
    SPAN = auto()
    """p on the keys that the caller marks."""


ALL_COLUMNS = tuple(Column)
SOFTMAX_BASE = (Column.MAXIMUM, Column.LOG_SUM, Column.VISIBLE_KEYS)
"""State columns that softmax always leaves."""
ROWWISE_BASE = (Column.MAXIMUM, Column.VISIBLE_KEYS, Column.THRESHOLD)
"""State columns that every other normalizer leaves."""


class Rows(Enum):
    """Over which valid rows a statistic is defined, and averaged."""

    ALL = auto()
    WEIGHTED = auto()
    """Those with a weight that is not 0."""
    TWO_KEYS = auto()
    """Those that see two keys or more."""
    BEYOND_FIRST = auto()
    """Those that see more than ``first_tokens`` keys."""


class Reduction(Enum):
    """How rows of a head become one number of a reading."""

    MEAN = auto()
    ROOT_OF_MEAN = auto()
    LARGEST = auto()


@dataclass(frozen=True)
class Display:
    """The number of a reading that shows a statistic, and how."""

    name: str
    """Field of ``HeadReading``."""
    title: str
    unit: str
    """As it stands behind the value on a page; empty where there is none."""
    meaning: str
    low: float | None = None
    """Least value that the colours of a page stand for; None: the least found."""
    high: float | None = None
    logarithmic: bool = False
    superlative: str = "largest"
    """What the first in a ranking is: ``7th sharpest of 72``."""
    ascending: bool = False
    """Whether the first in a ranking is the smallest."""
    brief: bool = False
    """Whether it is among the few that short tables and comparisons always have."""
    column: str = ""
    """Title of its column in the table of a scan; empty: it has none."""
    digits: int = 1
    """Digits behind the point in that column."""
    compared: str = ""
    """Title of its column in the table of a comparison, if that is another."""
    percent: bool = False
    """Whether a comparison shows it in percent."""
    reduction: Reduction = Reduction.MEAN

    @property
    def scale(self) -> float:
        """What a comparison shows its numbers times."""
        return 100.0 if self.percent else 1.0


@dataclass(frozen=True)
class Statistic:
    """One row of the table."""

    name: str
    """Attribute of ``AttentionStats``, and what ``stats=`` takes."""
    definition: str
    """As ``docs/maths.md`` has it."""
    unit: str
    """Range and unit, as ``docs/maths.md`` has them."""
    softmax: tuple[Column, ...] = ()
    """State columns that softmax needs for it, beside ``SOFTMAX_BASE``."""
    rowwise: tuple[Column, ...] | None = ()
    """The same of every other normalizer, beside ``ROWWISE_BASE`` and ``MASS``; None: it belongs to softmax alone."""
    by_name: bool = False
    """Whether "all" leaves it out."""
    softmax_by_name: bool = False
    """Whether "all" leaves it out under softmax, which makes another statistic of it."""
    column: Column | None = None
    """The state column that is the statistic itself, where a kernel leaves it: no formula then."""
    kept: bool = False
    """Whether softmax always computes it, so that partial results merge."""
    mergeable: bool = True
    """Whether two parts of the keys determine it."""
    defined: Rows = Rows.WEIGHTED
    uses_sink: bool = False
    """Whether it follows from the sink, too."""
    shown: Display | None = None
    """None: no reading shows it."""


TABLE = (
    Statistic("lse", "log sum e^(s_j)", "logit", rowwise=None, kept=True),
    Statistic(
        "entropy", "H = -sum p log p = lse - mu", "0 to log n, nats",
        softmax=(Column.MEAN_DEPTH,), rowwise=(Column.ENTROPY,),
        shown=Display(
            "entropy_nats", "Entropy", "nats",
            "How spread the weights are: 0 when one key takes all, log n when n keys share equally.",
            low=0.0, superlative="lowest", ascending=True, column="H nats", digits=2,
        ),
    ),
    Statistic(
        "normalized_entropy", "H / log n, for n >= 2", "0 to 1",
        softmax=(Column.MEAN_DEPTH,), rowwise=(Column.ENTROPY,), defined=Rows.TWO_KEYS,
        shown=Display(
            "normalized_entropy", "Normalised entropy", "of log n",
            "Entropy divided by the entropy of equal weights: 0 is one-hot, 1 is uniform.",
            low=0.0, high=1.0, superlative="sharpest", ascending=True, brief=True, compared="entropy, % of log n",
            percent=True,
        ),
    ),
    Statistic(
        "effective_tokens", "1 / sum p^2", "1 to n, keys",
        softmax=(Column.SQUARED_WEIGHTS,), rowwise=(Column.SQUARED_WEIGHTS,),
        shown=Display(
            "effective_tokens", "Effective tokens", "tokens",
            "1 / sum of the squared weights: as many keys with equal weight would have the same sum.",
            low=1.0, logarithmic=True, superlative="fewest", ascending=True, brief=True, column="tokens",
        ),
    ),
    Statistic(
        "max_weight", "the largest p, e^(m - lse)", "above 0, to 1",
        rowwise=(Column.LARGEST_WEIGHT,), column=Column.LARGEST_WEIGHT,
        shown=Display(
            "max_weight", "Largest weight", "of the weight", "Weight of the key that gets most, mean over rows.",
            low=0.0, high=1.0,
        ),
    ),
    Statistic(
        "max_logit", "m", "logit", kept=True, defined=Rows.ALL, column=Column.MAXIMUM,
        shown=Display(
            "max_logit", "Largest logit", "", "The largest score before softmax, over all rows.",
            brief=True, column="max logit", reduction=Reduction.LARGEST,
        ),
    ),
    Statistic("mean_logit", "mu", "logit", softmax=(Column.MEAN_DEPTH,), rowwise=(Column.MEAN_DEPTH,)),
    Statistic(
        "logit_variance", "E_p[(s - mu)^2], the spread under the weights; readings show its root as `logit_std`",
        "logit^2", softmax=(Column.MEAN_DEPTH, Column.VARIANCE), rowwise=(Column.VARIANCE,), column=Column.VARIANCE,
        shown=Display(
            "logit_std", "Logit spread under the weights", "",
            "sqrt of the mean variance of the scores, each counted by its weight: 0 where one key takes all, however "
            "far the other scores are.",
            low=0.0, reduction=Reduction.ROOT_OF_MEAN,
        ),
    ),
    Statistic(
        "visible_keys", "n; exact to 2^24 keys (16.8 million)", "keys", defined=Rows.ALL,
        shown=Display(
            "visible_keys", "Visible keys", "keys", "Keys that a row sees, mean over rows.", low=1.0, logarithmic=True,
            compared="visible keys",
        ),
    ),
    Statistic(
        "mass", "weight given to values: 1, or sigmoid(lse - sink) with a learned sink", "0 to 1",
        defined=Rows.ALL, uses_sink=True, column=Column.MASS,
        shown=Display(
            "mass", "Sum of the weights", "",
            "1 with softmax; below 1 where a sink takes a part, above 1 only without normalisation.",
            low=0.0, high=1.0,
        ),
    ),
    Statistic(
        "first_token_mass", "p on the first `first_tokens` tokens of the sequence (by default one)", "0 to 1",
        softmax=(Column.FIRST_TOKENS,), rowwise=(Column.FIRST_TOKENS,), column=Column.FIRST_TOKENS,
        defined=Rows.BEYOND_FIRST,
        shown=Display(
            "first_token_mass", "First-token weight", "of the weight", "Weight on the first key: near 1 is a sink.",
            low=0.0, high=1.0, brief=True, compared="first token, %", percent=True,
        ),
    ),
    Statistic(
        "support_size", "weights that are not 0; with softmax this is n", "keys",
        rowwise=(Column.SUPPORT,), softmax_by_name=True, defined=Rows.ALL,
        shown=Display(
            "support_size", "Support", "keys",
            "Keys whose weight is not 0, mean over rows: sparse normalizers leave keys out, softmax none.",
            low=1.0, logarithmic=True, superlative="fewest", ascending=True, column="support",
            compared="support size",
        ),
    ),
    Statistic(
        "mean_distance", "E_p of the distance between query and key", "positions",
        softmax=(Column.DISTANCE,), rowwise=(Column.DISTANCE,), by_name=True, mergeable=False, column=Column.DISTANCE,
        shown=Display(
            "mean_distance", "Mean distance", "positions",
            "How far away the keys are that get the weight, mean under the weights: near 0 is local.",
            low=0.0, column="distance", compared="mean distance",
        ),
    ),
    Statistic(
        "gini", "sum_i (2i - n - 1) p_(i) / n, p ascending", "0 to (n - 1)/n",
        softmax=(Column.GINI,), rowwise=(Column.GINI,), by_name=True, mergeable=False, column=Column.GINI,
        shown=Display(
            "gini", "Gini coefficient", "", "Inequality of the weights: 0 is uniform, 1 is one-hot.",
            low=0.0, high=1.0, column="gini", digits=3, compared="gini, %", percent=True,
        ),
    ),
    Statistic(
        "entropy_with_sink",
        "entropy with the sink as one more outcome: mass H + h(mass), h(u) = -u log u - (1-u) log(1-u)", "nats",
        softmax=(Column.MEAN_DEPTH,), rowwise=None, by_name=True, uses_sink=True,
        shown=Display(
            "entropy_with_sink_nats", "Entropy with the sink", "nats",
            "Entropy of the weights where the learned sink counts as one more key.",
            low=0.0, superlative="lowest", ascending=True, column="H with sink", digits=2,
            compared="entropy with sink",
        ),
    ),
    Statistic("key_mass", "per key: the sum of p over all valid queries", "queries", by_name=True, mergeable=False),
    Statistic(
        "score_variance",
        "sum_j (s_j - mean s)^2 / n, all visible scores alike; inf for scores above 1e19", "logit^2",
        softmax=(Column.PLAIN_DEPTH, Column.PLAIN_VARIANCE), rowwise=(Column.PLAIN_VARIANCE,),
        column=Column.PLAIN_VARIANCE, by_name=True,
        shown=Display(
            "score_variance", "Score variance", "logit^2",
            "Variance of the visible scores, mean over rows: every key counts alike, whatever its weight.",
            low=0.0, column="score variance", digits=2,
        ),
    ),
    Statistic(
        "self_weight", "p_ii: p on the query's own key; 0 where it is hidden", "0 to 1",
        softmax=(Column.OWN_KEY,), rowwise=(Column.OWN_KEY,), by_name=True, mergeable=False, column=Column.OWN_KEY,
        shown=Display(
            "self_weight", "Own-key weight", "of the weight",
            "Weight on the query's own key, mean over rows: near 1 a head passes its own token on.",
            low=0.0, high=1.0, column="own key", digits=3, compared="own key, %", percent=True,
        ),
    ),
    Statistic(
        "span_mass", "p on the keys that `spans` marks", "0 to 1",
        softmax=(Column.SPAN,), rowwise=(Column.SPAN,), by_name=True, column=Column.SPAN,
        shown=Display(
            "span_mass", "Span weight", "of the weight",
            "Weight on the keys of the spans that were given, mean over rows.",
            low=0.0, high=1.0, column="span", digits=3, compared="span, %", percent=True,
        ),
    ),
)  # fmt: skip
"""All statistics, in the order in which they are listed everywhere."""

OF_SCANS = (
    Statistic(
        "missed_mass",
        "weight that the keys which a layer with an indexer did not choose would have had, beside those that it chose",
        "0 to 1", rowwise=None,
        shown=Display(
            "missed_mass", "Missed mass", "of the weight",
            "Weight that keys would have had which the layer did not choose, mean over rows: near 0 it misses nothing.",
            low=0.0, high=1.0, column="missed", digits=3, compared="missed, %", percent=True,
        ),
    ),
)  # fmt: skip
"""What scans alone have, without being asked: it compares two masks of one call, so no single call tells it."""

OF_CALLS = (
    Statistic(
        "expected_keys", "the keys that a row should see, by causality, window, chunks, documents and padding, where "
        "they are declared", "keys", rowwise=None, defined=Rows.ALL,
        shown=Display(
            "expected_keys", "Expected keys", "keys",
            "Keys that a row should see by what the model and its batch declare, mean over rows.",
            low=1.0, logarithmic=True, compared="expected keys",
        ),
    ),
    Statistic(
        "leaked_keys", "visible keys of other documents than the row's own, where the batch declares documents",
        "keys", rowwise=None, defined=Rows.ALL,
        shown=Display(
            "leaked_keys", "Leaked keys", "keys", "Visible keys of other documents, mean over rows: 0 is right.",
            low=0.0, compared="leaked keys",
        ),
    ),
)  # fmt: skip
"""What readings have without being asked: it follows from what a model and its batch declare, which no call tells."""
COUNTED = ("visible_keys", *(row.name for row in OF_CALLS))
"""Statistics that readings count beside the sums of kernels."""

NAMES = tuple(row.name for row in TABLE)
STATISTICS = {row.name: row for row in (*TABLE, *OF_SCANS, *OF_CALLS)}
"""Name -> its row."""
ONE_PASS = tuple(row.name for row in TABLE if not (row.by_name or row.softmax_by_name))
"""What ``stats="all"`` means: one pass over the scores."""
ROWWISE_ONE_PASS = tuple(row.name for row in TABLE if not row.by_name and row.rowwise is not None)
"""What "all" means where the normalizer is rowwise: not softmax."""
BY_NAME = tuple(row.name for row in TABLE if row.name not in ONE_PASS)
"""What softmax has only by name. ``mean_distance``, ``self_weight`` and ``span_mass`` cost one more sum each,
``score_variance`` two; ``gini`` (a sort) and ``key_mass`` need all keys of a row at once.
"""
OF_SOFTMAX = tuple(row.name for row in TABLE if row.rowwise is None)
"""What no other normalizer has."""
SHOWN = {row.shown.name: row.shown for row in STATISTICS.values() if row.shown is not None}
"""Field of ``HeadReading`` -> how it is shown."""
STATISTIC_OF = {row.shown.name: row.name for row in STATISTICS.values() if row.shown is not None}
"""Field of ``HeadReading`` -> the statistic that it shows."""
SHOWN_BY_NAME = tuple(field for field, name in STATISTIC_OF.items() if name not in ONE_PASS or name in COUNTED)
"""Fields of ``HeadReading`` that may be None of every head: not asked for, or not known."""
# Plain tuples, which a compiler may hold as they are.
_KEPT = tuple(row.name for row in TABLE if row.kept)
_COLUMNS = {row.name: row.softmax for row in TABLE}
_ROWWISE_COLUMNS = {row.name: row.rowwise or () for row in TABLE}


def asked_names(where: str, stats: str | Iterable[str], rowwise: str | None = None) -> tuple[str, ...]:
    """The statistics meant by ``"all"``, one name or several, in the order of the table. ``rowwise``: the normalizer,
    where it is not softmax.

    Raises:
        InputError: something else, or what this normalizer does not have.
    """
    one_pass = ROWWISE_ONE_PASS if rowwise else ONE_PASS
    if not isinstance(stats, Iterable):
        raise InputError(f"{where}(stats=...) must be 'all', a name or several names, got {stats!r}.")
    if isinstance(stats, str):
        if stats == "all":
            return one_pass
        asked = {stats}
    else:
        asked = {part for name in stats for part in (one_pass if name == "all" else (name,))}
    if unknown := sorted(str(name) for name in asked if name not in NAMES):
        raise InputError(
            f"{where}(stats=...) does not know {', '.join(map(repr, unknown))}. Valid: 'all' (one pass), or names of "
            f"{', '.join(NAMES)}.{did_you_mean(unknown[0], ('all', *NAMES))}"
        )
    names = tuple(name for name in NAMES if name in asked)
    if rowwise and (refused := [name for name in names if name in OF_SOFTMAX]):
        raise InputError(
            f"{where}(stats=...): {', '.join(refused)} belongs to softmax; normalizer={rowwise!r} has none. Leave "
            "it out, or pass 'all' for all that it has."
        )
    return names


def reading_names(where: str, stats: str | Iterable[str], spans: bool = False) -> tuple[str, ...]:
    """What a reading of heads shows, and ``stats`` beside it. ``spans``: whether spans of keys were given.

    Raises:
        InputError: ``stats`` names something else than statistics, or ``key_mass``: over batches of other texts the
            same key is another token, and padded queries cannot be left out of its sum; or ``span_mass`` without spans.
    """
    asked = asked_names(where, stats)
    if "key_mass" in asked:
        raise InputError(
            f"{where}(stats=...): key_mass is a number of each key, not of a head, so no reading can show it. Take it "
            "from attemper.attention_statistics(query, key, stats=('key_mass',)) for one call."
        )
    if "span_mass" in asked and not spans:
        raise InputError(
            f"{where}(stats=...): span_mass needs the spans of keys whose weight it sums: attemper.scan(..., "
            "spans=[(0, 3)]) takes them (the first four keys of every text), or a function that marks those of a batch."
        )
    return asked_names(where, ("all", *asked))


def rowwise_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """``names`` of a reading as far as a rowwise normalizer has them, with the support that it adds."""
    if not names:
        return names
    wanted = {*names, *(row.name for row in TABLE if row.softmax_by_name)}
    return tuple(name for name in NAMES if name in wanted and name not in OF_SOFTMAX)


def add_kept(asked: tuple[str, ...]) -> tuple[str, ...]:
    """``asked`` and what softmax computes beside it so that partial results merge; nothing if nothing was asked."""
    if not asked or all(name in asked for name in _KEPT):
        return asked
    return tuple(name for name in NAMES if name in asked or name in _KEPT)


def state_columns(names: Iterable[str], *, rowwise: bool = False) -> tuple[Column, ...]:
    """The state columns that these statistics follow from, in their order."""
    if names is ONE_PASS and not rowwise:
        return _ONE_PASS_COLUMNS
    names, of = tuple(names), _ROWWISE_COLUMNS if rowwise else _COLUMNS
    needed = [*(ROWWISE_BASE if rowwise else SOFTMAX_BASE), *(column for name in names for column in of[name])]
    if rowwise and names:
        needed.append(Column.MASS)  # whether a row has any weight decides about the rest
    return tuple(column for column in ALL_COLUMNS if column in needed)


_ONE_PASS_COLUMNS = state_columns((*ONE_PASS,))

BINS = 32
"""Bins of the histogram by normalised entropy, and buckets by log2 of visible keys."""

COLUMNS = (
    "rows",
    "empty",
    "nonfinite",
    "max_logit",
    "entropy",
    "normalized_entropy",
    "effective_tokens",
    "max_weight",
    "logit_variance",
    "mass",
    "first_token_mass",
    "rows_of_normalized_entropy",
    "rows_of_first_token_mass",
)
"""The single columns of a head's sums (``backends/sums.py``), in the order of the kernels. Sums over valid rows;
of the two that need more keys, with rows of their own. A new statistic is not among them: what asks for it is reduced
from its rows.
"""

BINNED = ("histogram", "curve_rows", "curve_entropy", "curve_normalized_entropy", "curve_first_token_mass")
"""What follows them, ``BINS`` columns each: rows by normalised entropy, and rows and sums by log2 of visible keys."""
