"""What a fingerprint keeps of an attention site for a few rows, and which rows, keys and vectors these are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

OFFSETS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Pairs of a row: the keys so many tokens before its own place ..."""
FIXED_KEYS = 8
"""... and so many keys, evenly spaced from the first of the sequence to its last, the same for all rows."""
PAIRS = len(OFFSETS) + FIXED_KEYS
VECTOR_ROWS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Places of the first sequence whose queries and keys are kept as they are."""
PROJECTIONS = 8
"""Numbers of a sketch beside its norm."""
ANCHORS = len(VECTOR_ROWS)
"""Vectors of the first sequence, at ``VECTOR_ROWS``, with which inner products are kept."""
GRAMS = ("residual", "attended", "change")
"""What inner products are kept of."""
SIDE = 6
"""Projections on each side of a weight."""
ROWS = 32
"""Rows that are kept, by default."""

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23, "float64": 2.0**-23}
"""Largest relative error of rounding once, by ``dtype`` of a site. What is kept of float64 is float32."""
MARGIN = 2.0
"""A stage of two sites is beyond rounding if its level is so many times the expected one."""

COUNTS = ("visible_keys", "first_visible", "last_visible", "argmax")
"""Exact whole numbers of a row. Keys are counted by token: padding before a sequence is below 0, behind it from its
length on. -1 and 0 of a row that sees nothing.
"""
STATISTICS = (
    *("max_logit", "mean", "variance", "lse", "lse_keys", "kept_mass", "self_weight", "first_token_mass"),
    *("q_norm", "k_norm", "multiplier"),
)
"""Numbers of a row: of its scores under their own softmax; ``lse`` with a sink; ``multiplier`` is scale / T."""
OF_HEADS = ("raw", "final", "output", "recomputed", "tiled")
"""Fields that begin with heads and rows."""


@dataclass(frozen=True, eq=False)
class SiteFingerprint:
    """One attention site. H heads, G heads of keys, R rows, P places of ``VECTOR_ROWS`` that the sequence has. Where
    heads were thinned, arrays have the kept ones alone.

    Attributes:
        name: a note for people; sites are aligned by ``order`` and shape.
        order: when it ran among the sites of a pass.
        kind: "self" or "cross".
        heads, kv_heads, head_dim: H, G and D of the model.
        scale: of the call, where all rows share it.
        softcap: of the call, or None.
        inv_freq: angles per token of rotary pairs, where the model has such a buffer.
        dtype: of queries and keys.
        matmul_precision: of float32 products in that run.
        keys: the largest number of keys.
        rows: [R, 2] int32: sequence and place of each row, by tokens.
        pair_keys: [R, PAIRS] int32: the key of each pair, by tokens; -1 where there is none.
        counts: name of ``COUNTS`` -> [H, R] int32.
        statistics: name of ``STATISTICS`` -> [H, R] float32.
        raw, final: [H, R, PAIRS] float32: q.k, and the score that enters softmax, as it follows from ``raw``; -inf
            where the key is hidden.
        query, key: [H, P, D] and [G, P, D] in float32, exactly the numbers of the run's own type.
        residual, input: [R, 1 + PROJECTIONS] float32: what enters the block, and the module that attends.
        output, recomputed: [H, R, 1 + PROJECTIONS] float32: of each head's output as the model made it, and as it
            follows from the queries, keys and values that were seen.
        tiled: the same as ``recomputed`` if query head h read key head h mod G; only where heads share keys and the
            output is not ``recomputed``.
        attended, change: [R, 1 + PROJECTIONS] float32: what the module that attends gives, and what its block adds to
            what enters it.
        grams: [R, GRAMS, 2, 1 + ANCHORS] float32: of these and of what enters the block, the norm, and inner products
            with the directions of ``ANCHORS`` vectors of the first sequence; as they are, and less the mean of
            features. A rotation leaves them as they are.
        weights: name and shape, as "q_proj.weight [128, 96]", of each weight around the site -> [1 + blocks,
            1 + SIDE^2] float32, of all and of each ``head_dim`` rows: norm, and products with signs on both sides.
        kept_heads: numbers of the heads that were kept, all that read the same keys together; None for all.
        width: features of what enters the block.
        weight_bits, weight_error: of the coarsest grid on which weights of the block stand: bits, and the error of
            rounding to it relative to them; None where they stand on none.

    What was not seen is NaN. In runs of 16 bits, ``raw`` and sketches are rounded to 15 bits of their row's largest.
    """

    name: str
    order: int
    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None
    softcap: float | None
    inv_freq: tuple[float, ...] | None
    dtype: str
    matmul_precision: str
    keys: int
    rows: np.ndarray
    pair_keys: np.ndarray
    counts: Mapping[str, np.ndarray]
    statistics: Mapping[str, np.ndarray]
    raw: np.ndarray
    final: np.ndarray
    query: np.ndarray
    key: np.ndarray
    residual: np.ndarray
    input: np.ndarray
    output: np.ndarray
    recomputed: np.ndarray
    tiled: np.ndarray
    attended: np.ndarray
    change: np.ndarray
    grams: np.ndarray
    kept_heads: tuple[int, ...] | None = None
    width: int | None = None
    weight_bits: int | None = None
    weight_error: float | None = None
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(range(self.heads)) if self.kept_heads is None else self.kept_heads

    @property
    def key_numbers(self) -> tuple[int, ...]:
        return key_numbers(self.numbers, self.heads, self.kv_heads)

    def of_heads(self, chosen: Sequence[int] | np.ndarray, key: np.ndarray, **facts: Any) -> SiteFingerprint:
        """The same with these of its heads in this order, their keys, and other ``facts``."""
        return replace(
            self,
            query=self.query[chosen],
            key=key,
            **{name: getattr(self, name)[chosen] for name in OF_HEADS},
            counts={name: part[chosen] for name, part in self.counts.items()},
            statistics={name: part[chosen] for name, part in self.statistics.items()},
            **facts,
        )


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """What the model gives for the rows: logits, the last hidden state, or whatever comes first in it.

    Attributes:
        name: its key or place in what the model returns; "" where that is one tensor.
        width: numbers of a row.
        rows: [R, 2] int32: sequence and place; a place of -1 is a whole sequence.
        sketch: [R, 1 + PROJECTIONS] float32.
    """

    name: str
    width: int
    rows: np.ndarray
    sketch: np.ndarray


def weight_shape(name: str) -> tuple[int, int]:
    rows, columns = name.rpartition("[")[2].rstrip("]").split(", ")
    return int(rows), int(columns)


def chosen_sequences(sequences: int, rows: int) -> dict[int, int]:
    """Sequence -> how many of its rows are kept, so that there are about ``rows`` in all."""
    if sequences <= rows:
        return dict.fromkeys(range(sequences), rows // sequences)
    return {number * sequences // rows: 1 for number in range(rows)}


def chosen_heads(asked: Iterable[int] | None, heads: int, kv_heads: int) -> tuple[int, ...] | None:
    """Numbers of the heads that are kept: those that read the same keys as one that was asked for; None for all."""
    if asked is None:
        return None
    groups = set(key_numbers(asked, heads, kv_heads))
    kept = tuple(head for head in range(heads) if head * kv_heads // heads in groups)
    return None if len(kept) == heads else kept


def key_numbers(numbers: Iterable[int], heads: int, kv_heads: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(head * kv_heads // heads for head in numbers))


def chosen_rows(length: int, count: int) -> list[int]:
    """Places of ``count`` rows of a sequence: evenly spaced, its last token among them."""
    return sorted({(length * (number + 1)) // count - 1 for number in range(count)} - {-1})


def keys_of_row(place: int, length: int) -> list[int]:
    """The keys of a row's pairs by tokens, [PAIRS]; -1 where there is none."""
    near = [place - offset if 0 <= place - offset < length else -1 for offset in OFFSETS]
    last = FIXED_KEYS - 1
    return [*near, *((number * (length - 1)) // last if length else -1 for number in range(FIXED_KEYS))]


@lru_cache(maxsize=64)
def projection(width: int) -> np.ndarray:
    """[width, PROJECTIONS] of +1 and -1, the same everywhere: the mean square of a vector's projections is about its
    squared norm.
    """
    import numpy as np

    # The stream of RandomState is frozen; that of newer generators may change.
    return np.random.RandomState(width).randint(0, 2, (width, PROJECTIONS)).astype(np.float32) * 2 - 1


def final_scores(
    raw: np.ndarray, multiplier: np.ndarray, softcap: float | None, bias: np.ndarray | None, hidden: np.ndarray
) -> np.ndarray:
    """The final score of pairs by their products, float32: softcap(multiplier q.k) + bias; -inf where hidden.

    Args:
        raw, bias, hidden: [H, R, PAIRS].
        multiplier: [H, R].
    """
    import numpy as np

    found = scaled_products(raw, multiplier, softcap)
    found = found if bias is None else found + bias
    return np.where(hidden, -np.inf, found).astype(np.float32)


def scaled_products(raw: np.ndarray, multiplier: np.ndarray, softcap: float | None) -> np.ndarray:
    """softcap(multiplier q.k) of pairs [H, R, PAIRS] in float64, by the multiplier of each row [H, R]."""
    import numpy as np

    product = multiplier.astype(np.float64)[..., None] * raw
    return softcap * np.tanh(product / softcap) if softcap else product
