"""Names of the statistics, and what each needs of the kernels. The definitions stand in ``docs/maths.md``."""

from __future__ import annotations

from collections.abc import Iterable

from attemper.checks import did_you_mean
from attemper.errors import InputError

ONE_PASS = (
    "lse", "entropy", "normalized_entropy", "effective_tokens", "max_weight", "max_logit", "mean_logit",
    "logit_variance", "visible_keys", "mass", "first_token_mass",
)  # fmt: skip
"""What ``stats="all"`` means: one pass over the scores."""

BY_NAME = ("support_size", "entropy_with_sink", "mean_distance", "gini", "key_mass", "score_variance")
"""Only by name. ``mean_distance`` costs one more sum, ``score_variance`` two; ``gini`` (a sort) and ``key_mass`` need
whole rows of a tile.
"""

STATISTICS = ONE_PASS + BY_NAME

ROW_ONE_PASS = tuple("support_size" if name == "lse" else name for name in ONE_PASS)
"""What "all" means where a normalizer is not softmax: ``lse`` belongs to softmax alone."""

OF_SOFTMAX = ("lse", "entropy_with_sink")
"""What no other normalizer has."""

KEPT = ("lse", "max_logit")
"""Always there, so that partial results can merge."""

NOT_MERGEABLE = ("gini", "key_mass", "mean_distance")
"""Two parts of the keys do not determine these: they depend on all weights at once, or on positions a part cannot know.
"""

_FIELDS = {
    "entropy": "a", "normalized_entropy": "a", "entropy_with_sink": "a", "mean_logit": "a", "logit_variance": "av",
    "effective_tokens": "c", "first_token_mass": "f", "mean_distance": "t", "gini": "g",
    "score_variance": "uy",
}  # fmt: skip

_ORDER = "mznavcftguy"

_ROW_FIELDS = {
    "entropy": "h", "normalized_entropy": "h", "effective_tokens": "c", "max_weight": "p", "mean_logit": "aw",
    "logit_variance": "v", "mass": "w", "first_token_mass": "f", "support_size": "s", "mean_distance": "t", "gini": "g",
    "score_variance": "y",
}  # fmt: skip
_ROW_ORDER = "mnxwspahvcftgy"


def asked_names(where: str, stats: str | Iterable[str], one_pass: tuple[str, ...] = ONE_PASS) -> tuple[str, ...]:
    """The statistics meant by ``"all"`` (``one_pass``), one name or several, in the order of ``STATISTICS``."""
    if not isinstance(stats, Iterable):
        raise InputError(f"{where}(stats=...) must be 'all', a name or several names, got {stats!r}.")
    if isinstance(stats, str):
        if stats == "all":
            return one_pass
        asked = {stats}
    else:
        asked = {part for name in stats for part in (one_pass if name == "all" else (name,))}
    unknown = sorted(str(name) for name in asked if name not in STATISTICS)
    if unknown:
        raise InputError(
            f"{where}(stats=...) does not know {', '.join(map(repr, unknown))}. Valid: 'all' (one pass), or names of "
            f"{', '.join(STATISTICS)}.{did_you_mean(unknown[0], ('all', *STATISTICS))}"
        )
    return tuple(name for name in STATISTICS if name in asked)


def row_names(where: str, stats: str | Iterable[str], normalizer: str) -> tuple[str, ...]:
    """``asked_names`` where ``normalizer`` is not softmax."""
    asked = asked_names(where, stats, ROW_ONE_PASS)
    if refused := [name for name in asked if name in OF_SOFTMAX]:
        raise InputError(
            f"{where}(stats=...): {', '.join(refused)} belongs to softmax; normalizer={normalizer!r} has none. Leave "
            "it out, or pass 'all' for what there is."
        )
    return asked


def those_of(names: tuple[str, ...], normalizer: str) -> tuple[str, ...]:
    """``names`` of a reading as far as ``normalizer`` has them, with ``support_size`` where that is not softmax."""
    if normalizer == "softmax" or not names:
        return names
    kept = {*names, "support_size"} - {*OF_SOFTMAX}
    return tuple(name for name in STATISTICS if name in kept)


def reading_names(where: str, stats: str | Iterable[str]) -> tuple[str, ...]:
    """What a reading of heads shows, and ``stats`` beside it.

    Raises:
        InputError: ``stats`` names something else than statistics, or ``key_mass``: over batches of other texts the
            same key is another token, and padded queries cannot be left out of its sum.
    """
    asked = asked_names(where, stats)
    if "key_mass" in asked:
        raise InputError(
            f"{where}(stats=...): key_mass is a number of each key, not of a head, so no reading can show it. Take it "
            "from attemper.attention_statistics(query, key, stats=('key_mass',)) for one call."
        )
    return asked_names(where, ("all", *asked))


def with_kept(asked: tuple[str, ...]) -> tuple[str, ...]:
    """``asked`` and what any statistics carry along so that partial results merge; nothing if nothing was asked."""
    if not asked or ("lse" in asked and "max_logit" in asked):
        return asked
    return tuple(name for name in STATISTICS if name in asked or name in KEPT)


def state_fields(names: Iterable[str]) -> str:
    """The letters of the kernel's state that these statistics follow from."""
    if names is ONE_PASS:
        return "mznavcf"
    letters = set("mzn").union(*(_FIELDS.get(name, "") for name in names))
    return "".join(letter for letter in _ORDER if letter in letters)


def row_fields(names: Iterable[str]) -> str:
    """``state_fields`` where the normalizer is not softmax (docs/design/0008)."""
    # Whether a row has any weight decides about the rest.
    letters = set("mnxw" if tuple(names) else "mnx").union(*(_ROW_FIELDS.get(name, "") for name in names))
    return "".join(letter for letter in _ROW_ORDER if letter in letters)
