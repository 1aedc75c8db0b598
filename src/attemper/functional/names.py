"""Names of the statistics, and what each needs of the kernels. The definitions stand in ``docs/maths.md``."""

from __future__ import annotations

from collections.abc import Iterable

from attemper.errors import InputError

ONE_PASS = (
    "lse", "entropy", "normalized_entropy", "effective_tokens", "max_weight", "max_logit", "mean_logit",
    "logit_variance", "visible_keys", "mass", "first_token_mass",
)  # fmt: skip
"""What ``stats="all"`` means: one pass over the scores."""

BY_NAME = ("support_size", "entropy_with_sink", "mean_distance", "gini", "key_mass")
"""Only by name. ``mean_distance`` costs one more sum; ``gini`` (a sort) and ``key_mass`` hold whole rows of a tile."""

STATISTICS = ONE_PASS + BY_NAME

KEPT = ("lse", "max_logit")
"""Always there, so that partial results can merge."""

NOT_MERGEABLE = ("gini", "key_mass", "mean_distance")
"""Two parts of the keys do not determine these: they depend on all weights at once, or on positions a part cannot
know.
"""

_FIELDS = {
    "entropy": "a", "normalized_entropy": "a", "entropy_with_sink": "a", "mean_logit": "a", "logit_variance": "av",
    "effective_tokens": "c", "first_token_mass": "f", "mean_distance": "t", "gini": "g",
}  # fmt: skip

_ORDER = "mznavcftg"


def asked_names(where: str, stats: str | Iterable[str]) -> tuple[str, ...]:
    """The statistics meant by ``"all"``, one name or several, in the order of ``STATISTICS``."""
    if not isinstance(stats, Iterable):
        raise InputError(f"{where}(stats=...) must be 'all', a name or several names, got {stats!r}.")
    if isinstance(stats, str):
        if stats == "all":
            return ONE_PASS
        asked = {stats}
    else:
        asked = {part for name in stats for part in (ONE_PASS if name == "all" else (name,))}
    unknown = sorted(str(name) for name in asked if name not in STATISTICS)
    if unknown:
        raise InputError(
            f"{where}(stats=...) does not know {', '.join(map(repr, unknown))}. Valid: 'all' (one pass), or names of "
            f"{', '.join(STATISTICS)}."
        )
    return tuple(name for name in STATISTICS if name in asked)


def reading_names(where: str, stats: str | Iterable[str]) -> tuple[str, ...]:
    """What a reading of heads shows, and ``stats`` beside it."""
    return asked_names(where, ("all", *asked_names(where, stats)))


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
